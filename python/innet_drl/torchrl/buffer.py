"""A replay buffer of TensorDicts in this process or on a server, for several collectors and learners."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase

import innet_drl as innet
from innet_drl.errors import ConfigError, DeadlineError, EmptyError, SchemaError

_ITEM = "item"
"""Part of a table that has the entries of an item."""
_SINGLE_ROW = innet.Window(0, 0)
_SMALLEST = 1e-8
"""Added to priorities, as TorchRL's samplers do."""


_DTYPES = {
    torch.from_numpy(np.empty(0, kind)).dtype for kind in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}
_OPENED = ("replay", "_writer", "_layout", "_exists")
"""Attributes that an unpickled buffer sets anew."""


class InnetReplayBuffer:
    """The methods of TorchRL's remote buffer, on a memory that many processes share.

    Each item is one element of the TensorDicts that were added, with its nested entries. The first `add` or `extend`
    defines the table, and later ones have the same entries. The oldest items are evicted, whoever added them. A pickled
    buffer connects to the same server; without an address it cannot be pickled.

    Args:
        capacity: Items.
        batch_size: Items of a sample, where `sample` is not told.
        address: A server (`innet://host:7710`) that other processes may use, too; `None` keeps the items in this one.
        connection: Arguments of `innet_drl.connect` beside the address, such as `tls_ca` and `namespace`.
        alpha: Samples in proportion to priority^alpha; 0 samples uniformly.
        beta: Exponent of the importance weights.
        priority_key: Entry with the priority of an item, `update_tensordict_priority` and, where it is there, `extend`.
        samples_per_insert: Samples for each item that a server holds all its processes to; 0 sets no limit.
        table: Name of the table.
        timeout: Seconds that a call waits for a server.
    """

    def __init__(
        self,
        capacity: int,
        *,
        batch_size: int | None = None,
        address: str | None = None,
        connection: Mapping[str, Any] | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        priority_key: str = "td_error",
        samples_per_insert: float = 0.0,
        table: str = "torchrl",
        timeout: float = 60.0,
    ) -> None:
        self.capacity, self.batch_size, self.timeout = capacity, batch_size, timeout
        self.alpha, self.beta, self.priority_key = alpha, beta, priority_key
        self.samples_per_insert, self.table = samples_per_insert, table
        self._address, self._connection = address, dict(connection or {})
        self._open()

    def _open(self) -> None:
        self._writer: innet.Writer | None = None
        self._layout: dict[str, tuple[Any, ...]] = {}
        self._exists = False
        if self._address is None:
            # TorchRL seeds PyTorch's global generator.
            self.replay: innet.Replay = innet.Memory(seed=int(torch.randint(2**31, ()).item()))
        else:
            self.replay = innet.connect(self._address, **{"timeout": self.timeout, **self._connection})

    def add(self, data: TensorDictBase) -> None:
        """Adds one item, a TensorDict without a batch dimension. Blocks by `extend` are quicker."""
        self.extend(data.unsqueeze(0))

    def extend(self, data: TensorDictBase) -> None:
        """Adds items (N, ...), and returns when the replay has them.

        Items start with the priorities in `priority_key`, or, without that entry, with the largest of the table.

        Raises:
            innet_drl.ConfigError: An entry that is no tensor, or whose name cannot be a column's.
            innet_drl.SchemaError: Other entries, dtypes or shapes than the first items'; nothing is stored.
        """
        columns = dict(_entries(data))
        count = data.batch_size[0]
        if self._writer is None:
            self._writer = self._first(columns)
        layout = {name: (array.dtype.name, *array.shape[1:]) for name, array in columns.items()}
        if layout != self._layout:
            raise SchemaError(
                f"the entries are {_listed(layout)}, and the items of this buffer {_listed(self._layout)}"
            )
        priority = data.get(self.priority_key, None)
        if priority is not None:
            priority = self._priorities(priority).reshape(count, 1)
        ends = np.zeros((count, 1), bool)
        structure = _nested({name: array[:, None] for name, array in columns.items()})
        self._writer.extend(terminated=ends, truncated=ends, priority=priority, timeout=self.timeout, **structure)
        self._writer.flush(self.timeout)

    def _first(self, columns: Mapping[str, NDArray[Any]]) -> innet.Writer:
        table = innet.Table(
            self.table,
            {name: innet.Column(array.dtype, array.shape[1:]) for name, array in columns.items()},
            self.capacity,
            sampler="prioritized" if self.alpha else "uniform",
            priority_exponent=self.alpha,
            samples_per_insert=self.samples_per_insert,
            view=_SINGLE_ROW,
        )
        self.replay.create_table(table, self.timeout)
        self._layout = {name: (array.dtype.name, *array.shape[1:]) for name, array in columns.items()}
        return self.replay.writer(self.table, 1)

    def sample(self, batch_size: int | None = None) -> TensorDict:
        """Samples items by priority, with replacement.

        Args:
            batch_size: Items B; `None` is the buffer's.

        Returns:
            A TensorDict (B,) of the items, with `priority_weight` (float32, largest 1) and `index` (int64), which
            `update_priority` takes. It stays the same item's until that is evicted, unlike a position in a storage.

        Raises:
            innet_drl.EmptyError: There are no items, and no other process that could add some.
            innet_drl.DeadlineError: No process has added items for the timeout.
        """
        count = batch_size or self.batch_size
        if count is None:
            raise ConfigError("give sample a batch_size, or the buffer")
        self._await_items()
        batch = self.replay.sample(self.table, count, _SINGLE_ROW, beta=self.beta, device="cpu", timeout=self.timeout)
        entries = _first_rows(batch[_ITEM])
        entries["priority_weight"] = batch.weights
        entries["index"] = torch.from_numpy(batch.ids.view(np.int64))
        return TensorDict(entries, [count])

    def _await_items(self) -> None:
        """Returns when the table exists: a learner may begin before its collectors."""
        if self._exists:
            return
        give_up = time.monotonic() + self.timeout
        while self.table not in self.replay:
            if self._address is None:
                raise EmptyError("the buffer is empty: extend it first")
            if time.monotonic() > give_up:
                raise DeadlineError(f"no process has added items to {self!r} for {self.timeout:g} s")
            time.sleep(0.05)
        self._exists = True

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.sample()

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor | float) -> None:
        """Sets the priorities of items that are still there.

        Args:
            index: `index` of samples, (B,).
            priority: Not negative, (B,) or a number for all.
        """
        ids = np.ascontiguousarray(index.cpu().numpy().reshape(-1)).view(np.uint64)
        priorities = self._priorities(torch.as_tensor(priority).expand(len(ids)))
        self.replay.update_priorities(self.table, ids, priorities, timeout=self.timeout)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of sampled items to their `priority_key`, (B,) or (B, 1)."""
        priority = data.get(self.priority_key)
        self.update_priority(data.get("index"), priority.reshape(-1))

    @staticmethod
    def _priorities(priority: torch.Tensor) -> NDArray[np.float64]:
        values: NDArray[np.float64] = priority.detach().double().cpu().numpy()
        return values + _SMALLEST

    def __len__(self) -> int:
        """Items in the replay, of all processes."""
        return len(self.replay[self.table]) if self.table in self.replay else 0

    @property
    def write_count(self) -> int:
        """Items added by all processes."""
        tables = self.replay.stats(self.timeout)["tables"]
        return int(tables[self.table]["inserted_steps"]) if self.table in tables else 0

    def empty(self) -> None:
        """Removes all items."""
        if self.table in self.replay:
            self.replay.empty_table(self.table, self.timeout)

    def __getstate__(self) -> dict[str, Any]:
        if self._address is None:
            raise ConfigError(
                "this buffer is in its process: give it an address to use it in others, and keep its items by "
                "buffer.replay.save(path)"
            )
        return {name: value for name, value in vars(self).items() if name not in _OPENED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()

    def __repr__(self) -> str:
        return f"<InnetReplayBuffer {self.table!r} of {self.capacity} items, {self._address or 'in this process'}>"


def _entries(data: TensorDictBase, under: str = _ITEM) -> Iterator[tuple[str, NDArray[Any]]]:
    """Leaves as arrays, by the names of their columns."""
    for key, value in data.items():
        name = f"{under}/{key}"
        if not isinstance(key, str) or not key or "/" in key or key.isdigit():
            raise ConfigError(f"the entry {key!r} names a column: rename it, with no slash and not only digits")
        if isinstance(value, TensorDict):
            yield from _entries(value, name)
        elif not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"the entry {key!r} is {found}, which cannot be stored: convert it, or leave it out")
        else:
            yield name, value.detach().cpu().numpy()


def _listed(layout: Mapping[str, tuple[Any, ...]]) -> str:
    """Entries with their dtypes and shapes."""
    return ", ".join(
        f"{name.removeprefix(_ITEM + '/')} {dtype}{list(shape)}" for name, (dtype, *shape) in layout.items()
    )


def _nested(columns: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
    """Arrays in the structure that their names say."""
    structure: dict[str, Any] = {}
    for name, array in columns.items():
        *parents, last = name.split("/")
        at = structure
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = array
    return structure


def _first_rows(structure: dict[str, Any]) -> dict[str, Any]:
    """Entries of the only row of each window."""
    return {
        name: _first_rows(value) if isinstance(value, dict) else value.squeeze(1) for name, value in structure.items()
    }
