"""AgileRL's prioritized buffer, which is in the learner's process. Batches are TensorDicts."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import numpy as np
import torch
from agilerl.components.replay_buffer import PrioritizedReplayBuffer
from numpy.typing import NDArray
from tensordict import TensorDict

VERSION = f"AgileRL {importlib.metadata.version('agilerl')}, PyTorch {torch.__version__}"
SWEEP: dict[str, list[dict[str, Any]]] = {}
BLOCK = 10_000


class Vectors:
    """`PrioritizedReplayBuffer` of transitions."""

    def __init__(self, data: dict[str, NDArray[Any]], batch: int, threads: int = 2) -> None:
        torch.set_num_threads(threads)
        self._batch, items = batch, len(data["reward"])
        self._buffer = PrioritizedReplayBuffer(items, alpha=0.6)
        for first in range(0, items, BLOCK):
            block = {name: torch.from_numpy(column[first : first + BLOCK]) for name, column in data.items()}
            self._buffer.add(TensorDict(block, [len(block["reward"])]))

    def sample(self) -> tuple[Any, Any]:
        sampled = self._buffer.sample(self._batch, beta=0.4)
        return sampled["idxs"], sampled

    def rewrite(self, ids: Any, priorities: NDArray[np.float64]) -> None:
        self._buffer.update_priorities(ids, torch.from_numpy(priorities))
