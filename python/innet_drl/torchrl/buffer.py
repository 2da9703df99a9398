"""A replay buffer of TensorDicts in this process or on a server, for several collectors and learners."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDict, TensorDictBase, is_non_tensor

import innet_drl as innet
from innet_drl.errors import (
    ConfigError,
    DeadlineError,
    EmptyError,
    ExpiredError,
    PriorityError,
    SchemaError,
    UnknownTableError,
)
from innet_drl.structures import check_part, map_leaves

logger = logging.getLogger(__name__)

_ITEM = "item"
"""Part of a table that has the entries of an item."""
_OWN_ENTRIES = ("index", "priority_weight")
"""Entries of a sample that its item lacks."""
_SINGLE_ROW = innet.Window(0, 0)
_CHUNK_ITEMS = 50
"""Most items that are stored, and evicted, together."""
_SMALLEST = 1e-8
"""Added to priorities, as TorchRL's samplers do."""
_DTYPES = {
    torch.from_numpy(np.empty(0, kind)).dtype for kind in ("bool", "u1", "i1", "i2", "i4", "i8", "f2", "f4", "f8")
}
_OPENED = ("replay", "_writer", "_interrupted", "_exists")
"""Attributes that an unpickled buffer sets anew."""


class InnetReplayBuffer:
    """TensorDicts in and out of a memory that many processes share, as TorchRL's remote buffers.

    Items are the elements of the TensorDicts that were added, with their nested entries. The first `add` or `extend`
    defines the table; later ones have the same entries. The oldest items are evicted first, whichever process added
    them. Runs at one server need a `table` or a namespace each: a sample has the items of all that share one. After a
    restart of the server the buffer reconnects. A pickled buffer connects to the same server, with the token of the
    environment variable INNET_TOKEN.

    Args:
        capacity: Items.
        batch_size: Items of a sample, where `sample` is not told.
        address: A server (`innet://host:7710`) that other processes may use, too; `None` keeps the items in this one.
        connection: Arguments of `innet_drl.connect` beside the address, such as `tls_ca` and `namespace`.
        alpha: Samples in proportion to priority^alpha, 0 to 4; 0 samples uniformly.
        beta: Exponent of the importance weights, 0 to 4.
        priority_key: Entry with the priority of an item, for `update_tensordict_priority`, and for `extend` if it is
            there.
        samples_per_insert: Samples for each item that a server holds all its processes to; 0 sets no limit.
        table: Name of the table.
        timeout: Seconds that a call waits for a server; `None` waits without limit.

    Raises:
        innet_drl.ConfigError: A number out of range, or a setting that needs an address.
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
        timeout: float | None = 60.0,
    ) -> None:
        self.batch_size, self.beta, self.priority_key, self.timeout = batch_size, beta, priority_key, timeout
        self._address, self._connection = address, dict(connection or {})
        if address is None and (connection or samples_per_insert):
            raise ConfigError("connection and samples_per_insert need an address")
        if batch_size is not None and batch_size < 1:
            raise ConfigError(f"batch_size is at least 1, or None, got {batch_size}")
        if not 0.0 <= beta <= 4.0:
            raise ConfigError(f"beta is 0 to 4, got {beta}")
        # The first items have its columns.
        self._definition = innet.Table(
            table,
            {f"{_ITEM}/any": "uint8"},
            capacity,
            sampler="prioritized" if alpha else "uniform",
            priority_exponent=alpha,
            samples_per_insert=samples_per_insert,
            view=_SINGLE_ROW,
        )
        self.table, self.capacity = self._definition.name, self._definition.capacity
        self._open()

    def _open(self) -> None:
        self._writer: innet.Writer | None = None
        self._interrupted = False
        self._exists = False
        if self._address is None:
            # TorchRL seeds PyTorch's global generator.
            self.replay: innet.Replay = innet.Memory(seed=int(torch.randint(2**31, ()).item()))
        else:
            patience = 1e9 if self.timeout is None else self.timeout
            settings = {"timeout": self.timeout, "reconnect_for": patience, **self._connection}
            self.replay = innet.connect(self._address, **settings)

    def add(self, data: TensorDictBase) -> None:
        """Adds one item, a TensorDict without a batch dimension. Blocks by `extend` are quicker."""
        priority = data.get(self.priority_key, None)
        columns = {name: array[None] for name, array in _entries(data)}
        self._store(columns, 1, None if priority is None else priority[None])

    def extend(self, data: TensorDictBase | Sequence[TensorDictBase]) -> None:
        """Adds items (N, ...), or a list of single ones, and returns when the replay has them.

        Items start with the priorities in `priority_key`, (N,) or (N, ...) whose largest counts, or, without that
        entry, with the largest of the table.

        Raises:
            innet_drl.ConfigError: An entry that is no tensor, or with a name no column can have.
            innet_drl.SchemaError: NaN, or other entries, dtypes or shapes than the first items'; nothing is stored.
            innet_drl.TableDiffersError: The table on the server has other entries or settings than this buffer.
            innet_drl.PriorityError: A priority that is NaN or negative; nothing is stored.
            innet_drl.DeadlineError: The server has not taken the items, or, as the message says, has not confirmed
                them: then they follow, and are not to be added again.
        """
        if isinstance(data, Sequence) and data and all(isinstance(item, TensorDictBase) for item in data):
            try:
                data = torch.stack(list(data))
            except RuntimeError as error:
                raise SchemaError(f"items of a list have the same entries, dtypes and shapes: {error}") from None
        if not isinstance(data, TensorDictBase):
            raise ConfigError(
                f"extend takes a TensorDict with a batch dimension, or a list of single ones, got {type(data).__name__}"
            )
        if not data.batch_size:
            raise ConfigError("a TensorDict without a batch dimension is one item: use add")
        if data.batch_size[0]:
            self._store(dict(_entries(data)), data.batch_size[0], data.get(self.priority_key, None))

    def _store(self, columns: dict[str, NDArray[Any]], count: int, priority: torch.Tensor | None) -> None:
        rows: dict[str, Any] = {name: array[:, None] for name, array in columns.items()}
        rows["terminated"] = rows["truncated"] = np.zeros((count, 1), bool)
        rows["priority"] = None if priority is None else _priorities(priority, count)[:, None]
        try:
            self._extend(columns, rows)
        except (ExpiredError, UnknownTableError):
            # A server that was restarted without its items knows neither the writer nor the table.
            self._writer = None
            self._extend(columns, rows)

    def _extend(self, columns: Mapping[str, NDArray[Any]], rows: dict[str, Any]) -> None:
        if self._writer is None:
            # The order of a TensorDict's entries differs between processes.
            made = {name: innet.Column(array.dtype, array.shape[1:]) for name, array in sorted(columns.items())}
            self.replay.create_table(replace(self._definition, columns=made), self.timeout)
            # Whole chunks are evicted: a chunk is a small part of the items.
            chunk_steps = max(1, min(_CHUNK_ITEMS, self.capacity // 16))
            name = f"collector {socket.gethostname()} {os.getpid()}"
            self._writer = self.replay.writer(self.table, 1, name=name, chunk_steps=chunk_steps, timeout=self.timeout)
        try:
            self._writer.extend(**rows, timeout=self.timeout)
            self._writer.flush(self.timeout)
        except KeyboardInterrupt:
            self._interrupted = True
            raise
        except DeadlineError as error:
            count = len(rows["terminated"])
            raise DeadlineError(
                f"{count} items are taken, and follow: do not add them again, and close() the buffer before the "
                f"program ends; {error}"
            ) from error

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
            innet_drl.TableDiffersError: The table on the server has other settings than this buffer.
        """
        count = self.batch_size if batch_size is None else batch_size
        if count is None:
            raise ConfigError("give sample a batch_size, or the buffer")
        try:
            batch = self._sampled(count)
        except UnknownTableError:
            # The server was restarted without its items.
            self._exists = False
            batch = self._sampled(count)
        entries = map_leaves(lambda array: torch.from_numpy(array[:, 0]), batch[_ITEM])
        entries["priority_weight"] = torch.from_numpy(batch.weights)
        entries["index"] = torch.from_numpy(batch.ids.view(np.int64))
        return TensorDict(entries, [count])

    def _sampled(self, count: int) -> innet.Batch:
        if self._address is None:
            try:
                # No other writer to wait for.
                return self.replay.sample(self.table, count, _SINGLE_ROW, beta=self.beta, timeout=0.0)
            except (UnknownTableError, DeadlineError):
                raise EmptyError("the buffer is empty: extend it first") from None
        began = time.monotonic()
        while not self._exists:
            try:
                stored = self.replay.table(self.table, self.timeout)
            except UnknownTableError:
                # A learner may begin before its collectors.
                if self.timeout is not None and time.monotonic() > began + self.timeout:
                    raise DeadlineError(f"no process has added items to {self!r} for {self.timeout:g} s") from None
                time.sleep(0.05)
            else:
                # Refused where the definitions differ.
                self.replay.create_table(replace(self._definition, columns=stored.columns), self.timeout)
                self._exists = True
        return self.replay.sample(self.table, count, _SINGLE_ROW, beta=self.beta, timeout=self.timeout)

    def next(self) -> TensorDict:
        """Samples `batch_size` items, as the iterator does without end."""
        return self.sample()

    def __iter__(self) -> Iterator[TensorDict]:
        while True:
            yield self.sample()

    def update_priority(self, index: torch.Tensor, priority: torch.Tensor | float) -> None:
        """Sets the priorities of items that are still there.

        Args:
            index: `index` of samples, int64 (B,) or (B, 1).
            priority: Not negative: (B,), (B, ...) whose largest counts, or a number for all.

        Raises:
            innet_drl.ConfigError: Another dtype of the indices, or not as many priorities.
            innet_drl.PriorityError: A priority that is NaN or negative.
        """
        index = torch.as_tensor(index)
        if index.dtype != torch.int64:
            raise ConfigError(f"index is that of a sample, int64, got {index.dtype}")
        ids = index.cpu().numpy().reshape(-1).view(np.uint64)
        self.replay.update_priorities(self.table, ids, _priorities(priority, len(ids)), timeout=self.timeout)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Sets the priorities of sampled items to their `priority_key`: see `update_priority`."""
        priority = data.get(self.priority_key, None)
        if priority is None:
            raise ConfigError(f"the batch has no entry {self.priority_key!r}, the priority_key of this buffer")
        self.update_priority(data.get("index"), priority)

    def stats(self) -> dict[str, Any]:
        """Counters of the table, as `Replay.stats` has them; empty before the first items."""
        table: dict[str, Any] = self.replay.stats(self.timeout)["tables"].get(self.table, {})
        return table

    def __len__(self) -> int:
        """Items in the replay, of all processes."""
        return int(self.stats().get("items", 0))

    @property
    def write_count(self) -> int:
        """Items added by all processes."""
        return int(self.stats().get("inserted_steps", 0))

    def empty(self) -> None:
        """Removes all items."""
        with contextlib.suppress(UnknownTableError):
            self.replay.empty_table(self.table, self.timeout)

    def close(self) -> None:
        """Sends what the server has not confirmed, and ends the connection; or drops the items of this process.

        After a Ctrl-C in `extend` it does not wait again: its items are lost where the server has no room.
        """
        try:
            if self._writer is not None:
                self._writer.close(0.0 if self._interrupted else self.timeout)
        except DeadlineError as error:
            if not self._interrupted:
                raise
            logger.warning("items of the interrupted extend are lost: %s", error)
        finally:
            self.replay.close()

    def __getstate__(self) -> dict[str, Any]:
        if self._address is None:
            raise ConfigError(
                "this buffer is in its process: give it an address to use it in others, and keep its items by "
                "buffer.replay.save(path)"
            )
        if self._connection.get("token"):
            raise ConfigError("a pickled buffer would show its token: give it in the environment variable INNET_TOKEN")
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
        if under == _ITEM and key in _OWN_ENTRIES:
            raise ConfigError(f"the entry {key!r} is a sample's own: rename it, or leave it out")
        check_part(key, "the TensorDict")
        if isinstance(value, TensorDictBase) and not is_non_tensor(value):
            if not value.keys():
                raise ConfigError(f"the entry {key!r} is an empty TensorDict: leave it out")
            yield from _entries(value, name)
        elif not isinstance(value, torch.Tensor) or value.dtype not in _DTYPES:
            found = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
            raise ConfigError(f"the entry {key!r} is {found}, which cannot be stored: convert it, or leave it out")
        else:
            array = value.detach().cpu().numpy()
            if array.dtype.kind == "f" and np.isnan(array).any():
                raise SchemaError(f"the entry {key!r} has NaN: nothing is stored")
            yield name, array


def _priorities(priority: torch.Tensor | float, count: int) -> NDArray[np.float64]:
    """Priorities of `count` items, the largest where an item has several."""
    values = torch.as_tensor(priority).detach().double().cpu()
    if values.ndim == 0:
        values = values.expand(count)
    if len(values) != count or (count and not values.numel()):
        raise ConfigError(f"{count} items have priorities of the shape {list(values.shape)}")
    if values.ndim > 1:
        values = values.flatten(1).amax(1)
    found: NDArray[np.float64] = values.numpy()
    wrong = np.flatnonzero(~(np.isfinite(found) & (found >= 0)))
    if len(wrong):
        raise PriorityError(f"priority {wrong[0]} of {count} is {found[wrong[0]]}: it is a number of at least 0")
    return found + _SMALLEST
