"""A journal of a serial run's memory, which a resumed run replays.

A seeded memory in this process, used by one thread, is a function of the calls made to it: rows written, batches
sampled, priorities set. The same calls in the same order give the same memory, with the same future samples; only the
keys differ, since each memory has its own. That makes resuming exact if the environments can be restored. It is meant
for small runs: 16 bytes for each sampled transition, and a few hundred for a step of all environments. They are kept in
files, one for each checkpoint with the calls since the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from innet_drl.batches import TorchBatch
from innet_drl.train.checkpoints import under
from innet_drl.train.errors import RunFolderError
from innet_drl.train.memory import ReplayMemory, RowWriter

_PREFIX = "journal."
_ROW_PREFIX = "row."


class Journal:
    """Records rows and samples in order; `replay` repeats them.

    Args:
        writer: Writer of the memory.
        batches: Batches of the memory: an iterator without prefetch.
        memory: The memory behind both.
    """

    def __init__(self, writer: RowWriter, batches: Iterator[TorchBatch], memory: ReplayMemory) -> None:
        self._writer = writer
        self._batches = batches
        self._memory = memory
        self._rows: list[dict[str, NDArray[Any]]] = []
        self._draws_after_row: list[int] = []
        self._keys: list[NDArray[np.int64]] = []
        self._priorities: list[NDArray[np.float64]] = []

    def append(self, *, timeout: float | None = None, **row: Any) -> None:
        """Writes a row and records it."""
        self._writer.append(**row, timeout=timeout)
        self._rows.append({name: np.array(value) for name, value in row.items()})
        self._draws_after_row.append(0)

    def update_priorities(self, keys: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        """Sets the priorities of the last batch and records both arrays."""
        self._memory.update_priorities(keys, priorities)
        self._draws_after_row[-1] += 1
        # safetensors does not support uint64: the same bits as int64.
        self._keys.append(keys.view(np.int64).copy())
        self._priorities.append(priorities.copy())

    def flush(self, timeout: float | None = None) -> None:
        """Waits until all sent rows are in the memory."""
        self._writer.flush(timeout)

    def close(self, timeout: float | None = None) -> None:
        """Closes the writer."""
        self._writer.close(timeout)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the calls since the last `forget` as tensors."""
        arrays: dict[str, NDArray[Any]] = {"draws_after_row": np.array(self._draws_after_row, np.int64)}
        if self._rows:
            arrays |= {_ROW_PREFIX + name: np.stack([row[name] for row in self._rows]) for name in self._rows[0]}
        if self._keys:
            arrays |= {"keys": np.stack(self._keys), "priorities": np.stack(self._priorities)}
        return {_PREFIX + name: torch.from_numpy(array) for name, array in arrays.items()}

    def forget(self) -> None:
        """Drops the calls that are in a file."""
        for calls in (self._rows, self._draws_after_row, self._keys, self._priorities):
            calls.clear()

    def replay(self, tensors: dict[str, torch.Tensor]) -> None:
        """Repeats the calls of one file, after all earlier files. The journal continues behind them.

        Raises:
            RunFolderError: The memory samples other items than before.
        """
        arrays = {name: tensor.numpy() for name, tensor in under(_PREFIX, tensors).items()}
        rows = {name.removeprefix(_ROW_PREFIX): a for name, a in arrays.items() if name.startswith(_ROW_PREFIX)}
        # Keys of the recorded run and of this memory: a pair names one item.
        now: dict[int, int] = {}
        recorded: dict[int, int] = {}
        draw = 0
        for index, draws in enumerate(arrays["draws_after_row"]):
            self.append(**{name: array[index] for name, array in rows.items()})
            for _ in range(draws):
                batch = next(self._batches)
                for key, earlier in zip(batch.ids.tolist(), arrays["keys"][draw].tolist(), strict=True):
                    if now.setdefault(earlier, key) == key and recorded.setdefault(key, earlier) == earlier:
                        continue
                    raise RunFolderError(
                        "the memory samples other items than it did when the checkpoint was written, probably "
                        "by another release: resume it with that one, or without --serial"
                    )
                self.update_priorities(batch.ids, arrays["priorities"][draw])
                draw += 1
