"""TorchRL's replay buffers and prioritized sampler, which are in the learner's process.

The form `stacks` stores both observations of a transition whole. The form `slices` stores each frame once, and samples
slices of `STACK + N` steps, with the two observations as overlapping views. It never samples the first steps of a
game, whose stacks begin with empty frames, and searches the ends of games again after each write (here none happens
between samples). With `words` frames are int64 instead of uint8: PyTorch gathers an eighth as many numbers.
"""

from __future__ import annotations

import itertools
import logging
from typing import Any

import numpy as np
import torch
import torchrl
from numpy.typing import NDArray
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    TensorDictPrioritizedReplayBuffer,
    TensorDictReplayBuffer,
)

from benchmarks import recording
from benchmarks.recording import GAMMA, STACK, N

VERSION = f"TorchRL {torchrl.__version__}, PyTorch {torch.__version__}"
SWEEP: dict[str, list[dict[str, Any]]] = {
    "Memory": [
        {"form": "stacks", "words": True, "storage": "memmap"},
        {"form": "stacks", "words": True, "storage": "memmap", "prefetch": 2},
        {"form": "stacks", "words": True, "storage": "tensor"},
        {"form": "stacks", "words": False},
        {"form": "slices", "words": True},
        {"form": "slices", "words": True, "prefetch": 2},
        {"form": "slices", "words": False},
    ],
    "Tree": [{"dtype": "float32"}, {"dtype": "float64"}, {"dtype": "float32", "threads": 1}],
}
# TorchRL logs every new storage.
logging.getLogger("torchrl").setLevel(logging.WARNING)
PREPARED = 2_000
STORAGES = {"tensor": LazyTensorStorage, "memmap": LazyMemmapStorage}


class Tree:
    """`PrioritizedSampler` alone."""

    def __init__(
        self, items: int, batch: int, priorities: NDArray[np.float64], threads: int = 2, dtype: str = "float32"
    ) -> None:
        torch.set_num_threads(threads)
        self._dtype = getattr(torch, dtype)
        # Alpha is 1, as priorities are given after the exponent.
        self._sampler = PrioritizedSampler(items, alpha=1.0, beta=0.4, dtype=self._dtype)
        self._storage, self._batch = _Full(items), batch
        self.rewrite(np.arange(items), priorities)

    def sample(self) -> NDArray[np.int64]:
        index, _ = self._sampler.sample(self._storage, self._batch)
        sampled: NDArray[np.int64] = index.numpy()
        return sampled

    def rewrite(self, indexes: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        self._sampler.update_priority(torch.from_numpy(indexes), torch.from_numpy(priorities).to(self._dtype))


class _Full:
    """A storage of the given size, as far as the sampler reads it."""

    ndim = 1
    device = None

    def __init__(self, items: int) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._items


class Memory:
    """`TensorDictPrioritizedReplayBuffer`, or `TensorDictReplayBuffer` with a slice sampler."""

    def __init__(
        self,
        batch: int,
        capacity: int,
        storage: str = "memmap",
        form: str = "stacks",
        words: bool = True,
        prefetch: int | None = None,
        threads: int = 2,
    ) -> None:
        torch.set_num_threads(threads)
        self._batch, self._form, self._words = batch, form, words
        self._buffer: Any
        if form == "slices":
            sampler = PrioritizedSliceSampler(
                capacity,
                alpha=0.6,
                beta=0.4,
                slice_len=STACK + N,
                end_key="done",
                truncated_key=None,
                init_key=None,
                cache_values=True,
            )
            self._buffer = TensorDictReplayBuffer(
                storage=STORAGES[storage](capacity),
                sampler=sampler,
                batch_size=batch * (STACK + N),
                prefetch=prefetch,
                priority_key="td_error",
            )
        else:
            self._buffer = TensorDictPrioritizedReplayBuffer(
                alpha=0.6, beta=0.4, storage=STORAGES[storage](capacity), batch_size=batch, prefetch=prefetch
            )

    def push(self, count: int) -> None:
        if self._form == "slices":
            return self._push_frames(count)
        transitions = recording.load().stacked(PREPARED)
        while count > 0:
            now = min(count, PREPARED)
            columns = {name: self._packed(column[:now]) for name, column in transitions.items()}
            self._buffer.extend(TensorDict(columns, [now]))
            count -= now
        return None

    def _push_frames(self, count: int) -> None:
        columns = recording.load().columns
        done = columns["terminated"] | columns["truncated"] | columns["final"]
        for stream in itertools.cycle(range(recording.STREAMS)):
            now = min(count, len(done))
            if now == 0:
                break
            steps = {name: self._packed(columns[name][:now, stream]) for name in ("frame", "action", "reward")}
            ends = torch.from_numpy(done[:now, stream].copy())
            ends[-1] = True
            self._buffer.extend(TensorDict({**steps, "done": ends[:, None]}, [now]))
            count -= now

    def flush(self) -> None:
        pass

    def sample(self) -> dict[str, NDArray[Any]]:
        sampled = self._buffer.sample()
        if self._form == "stacks":
            batch = {name: sampled[name].numpy() for name in ("action", "reward", "discount")}
            for name in ("observation", "next_observation"):
                batch[name] = sampled[name].view(torch.uint8).view(-1, STACK, 84, 84).numpy()
            return batch
        frames = sampled["frame"].view(torch.uint8).view(self._batch, STACK + N, 84, 84)
        actions, rewards = (sampled[name].view(self._batch, STACK + N)[:, STACK - 1 :] for name in ("action", "reward"))
        return {
            "observation": frames[:, :STACK].numpy(),
            "next_observation": frames[:, N:].numpy(),
            "action": actions[:, 0].numpy(),
            "reward": (rewards[:, :N] @ GAMMA ** torch.arange(N)).numpy(),
            "discount": np.full(self._batch, GAMMA**N, np.float32),
        }

    def _packed(self, column: NDArray[Any]) -> torch.Tensor:
        """A column as it is stored."""
        tensor = torch.from_numpy(np.ascontiguousarray(column))
        return tensor.view(len(tensor), -1).view(torch.int64) if self._words and tensor.ndim > 1 else tensor


class Vectors:
    """`TensorDictPrioritizedReplayBuffer` of transitions of vectors."""

    def __init__(self, data: dict[str, NDArray[Any]], batch: int, threads: int = 2, device: str | None = None) -> None:
        torch.set_num_threads(threads)
        items = len(data["reward"])
        storage = LazyTensorStorage(items, device=device or "cpu")
        self._buffer = TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=storage, batch_size=batch, priority_key="td_error"
        )
        self._buffer.extend(TensorDict({name: torch.from_numpy(column) for name, column in data.items()}, [items]))

    def sample(self) -> tuple[Any, Any]:
        sampled = self._buffer.sample()
        return sampled["index"], sampled

    def rewrite(self, ids: Any, priorities: NDArray[np.float64]) -> None:
        self._buffer.update_priority(ids, torch.from_numpy(priorities).float())
