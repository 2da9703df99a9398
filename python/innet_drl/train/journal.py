"""A journal of what a serial run did to its memory, so that a resumed run can do it again.

A memory in this process, used by one thread and seeded, is a function of what was done to it: rows
written, batches drawn, priorities set. Doing the same again in the same order gives the same memory, with the
same keys and the same draws to come. That makes resuming exact where environments can be restored. It is
meant for small runs: 16 bytes for each drawn transition, and a few hundred for a step of all environments.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.train.errors import RunFolderError

_PREFIX = "journal."
_ROW_PREFIX = "row."


class Journal:
    """Notes rows and draws in order; `redo` does them again.

    Args:
        writer: Where rows go to.
        batches: Where batches come from: an iterator without prefetch.
        replay: The memory behind both.
        table: The table's name.
    """

    def __init__(self, writer: innet.Writer, batches: Any, replay: innet.Replay, table: str) -> None:
        self._writer = writer
        self._batches = batches
        self._replay = replay
        self._table = table
        self._rows: list[dict[str, NDArray[Any]]] = []
        self._draws_after_row: list[int] = []
        self._keys: list[NDArray[np.int64]] = []
        self._priorities: list[NDArray[np.float64]] = []

    def append(self, **row: Any) -> None:
        """Writes a row and notes it."""
        self._writer.append(**row)
        self._rows.append({name: np.array(value) for name, value in row.items()})
        self._draws_after_row.append(0)

    def update_priorities(self, key: NDArray[np.uint64], priority: NDArray[np.float64]) -> None:
        """Sets the priorities of the batch drawn last and notes both."""
        self._replay.update_priorities(self._table, key, priority)
        self._draws_after_row[-1] += 1
        # safetensors has no use for uint64: the same bits as int64.
        self._keys.append(key.view(np.int64).copy())
        self._priorities.append(priority.copy())

    def flush(self) -> None:
        """Waits until what was sent is in the memory."""
        self._writer.flush()

    def close(self, timeout: float | None = None) -> None:
        """Closes the writer."""
        self._writer.close(timeout)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The journal as tensors for a checkpoint."""
        arrays: dict[str, NDArray[Any]] = {"draws_after_row": np.array(self._draws_after_row, np.int64)}
        if self._rows:
            arrays |= {_ROW_PREFIX + name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        if self._keys:
            arrays |= {"keys": np.stack(self._keys), "priorities": np.stack(self._priorities)}
        return {_PREFIX + name: torch.from_numpy(array) for name, array in arrays.items()}

    def redo(self, tensors: dict[str, torch.Tensor]) -> None:
        """Does to a new memory what the journal in a checkpoint tells, and goes on from there.

        Raises:
            RunFolderError: The memory draws other items than it did.
        """
        arrays = {name.removeprefix(_PREFIX): t.numpy() for name, t in tensors.items() if name.startswith(_PREFIX)}
        rows = {name.removeprefix(_ROW_PREFIX): a for name, a in arrays.items() if name.startswith(_ROW_PREFIX)}
        draw = 0
        for index, draws in enumerate(arrays["draws_after_row"]):
            self.append(**{name: array[index] for name, array in rows.items()})
            for _ in range(draws):
                batch = next(self._batches)
                if not np.array_equal(batch.key.view(np.int64), arrays["keys"][draw]):
                    raise RunFolderError(
                        "the memory draws other items than it did when the checkpoint was written, probably "
                        "by another release: resume it with that one, or without --serial"
                    )
                self.update_priorities(batch.key, arrays["priorities"][draw])
                draw += 1
