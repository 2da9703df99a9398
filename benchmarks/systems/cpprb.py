"""cpprb's prioritized buffer, which is in the learner's process.

Forms of an observation: `whole` stores both stacks of a transition. `next` shares an observation with the transition
three steps earlier, as its next observation (cpprb's `next_of`; every third step of a stream is an episode to cpprb).
`compressed` stores each frame once for all stacks (`stack_compress`), but separately for the two observations.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import cpprb
import numpy as np
from numpy.typing import NDArray

from benchmarks import recording
from benchmarks.recording import STACK, N

VERSION = f"cpprb {importlib.metadata.version('cpprb')}"
SWEEP: dict[str, list[dict[str, Any]]] = {
    "Memory": [{"form": "whole"}, {"form": "next"}, {"form": "compressed"}],
    "Tree": [{}],
}
PREPARED = 2_000
SCALARS = {"action": {"dtype": np.uint8}, "reward": {"dtype": np.float32}, "discount": {"dtype": np.float32}}


class Tree:
    """`PrioritizedReplayBuffer` with items of one byte."""

    def __init__(self, items: int, batch: int, priorities: NDArray[np.float64]) -> None:
        self._batch = batch
        # Alpha is 1, as priorities are given after the exponent.
        self._buffer = cpprb.PrioritizedReplayBuffer(items, {"item": {"dtype": np.uint8}}, alpha=1.0, eps=0.0)
        self._buffer.add(item=np.zeros(items, np.uint8), priorities=priorities)

    def sample(self) -> NDArray[np.int64]:
        indexes: NDArray[np.int64] = self._buffer.sample(self._batch)["indexes"]
        return indexes

    def rewrite(self, indexes: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        self._buffer.update_priorities(indexes, priorities)


class Memory:
    """`PrioritizedReplayBuffer` of transitions."""

    def __init__(self, batch: int, capacity: int, form: str = "whole") -> None:
        self._batch, self._form = batch, form
        frames = {"dtype": np.uint8, "shape": (84, 84, STACK) if form == "compressed" else (STACK, 84, 84)}
        columns = {**SCALARS, "observation": frames, "next_observation": frames}
        options: dict[str, Any] = {}
        if form == "next":
            # cpprb adds the column `next_observation`.
            del columns["next_observation"]
            options["next_of"] = "observation"
        elif form == "compressed":
            options["stack_compress"] = ["observation", "next_observation"]
        self._buffer = cpprb.PrioritizedReplayBuffer(capacity, columns, alpha=0.6, **options)

    def push(self, count: int) -> None:
        if self._form != "whole":
            return self._push_streams(count, N if self._form == "next" else 1)
        transitions = recording.load().stacked(PREPARED)
        while count > 0:
            now = min(count, PREPARED)
            self._buffer.add(**{name: column[:now] for name, column in transitions.items()})
            count -= now
        return None

    def _push_streams(self, count: int, stride: int) -> None:
        """Adds transitions `stride` steps apart, in order; each unbroken series is an episode."""
        played = recording.load()
        order = [each for phase in range(stride) for each in self._phase(phase, stride)]
        added, last = 0, (-1, -1)
        while added < count:
            for row, stream in order[: count - added]:
                if last != (row - stride, stream):
                    self._buffer.on_episode_end()
                transition = played.transition(row, stream)
                if self._form == "compressed":
                    for name in ("observation", "next_observation"):
                        transition[name] = np.moveaxis(transition[name], 0, -1)
                self._buffer.add(**transition)
                last = (row, stream)
            added += len(order[: count - added])

    @staticmethod
    def _phase(phase: int, stride: int) -> list[tuple[int, int]]:
        return [(row, stream) for row, stream in recording.load().transitions if row % stride == phase]

    def flush(self) -> None:
        pass

    def sample(self) -> dict[str, NDArray[Any]]:
        sampled = self._buffer.sample(self._batch)
        batch = {name: sampled[name][:, 0] for name in SCALARS}
        for name in ("observation", "next_observation"):
            # `stack_compress` needs the stack as the last dimension; the view has it first.
            batch[name] = np.moveaxis(sampled[name], -1, 1) if self._form == "compressed" else sampled[name]
        return batch


class Vectors:
    """`PrioritizedReplayBuffer` of transitions of vectors."""

    def __init__(self, data: dict[str, NDArray[Any]], batch: int) -> None:
        self._batch = batch
        columns = {name: {"dtype": column.dtype, "shape": column.shape[1:] or 1} for name, column in data.items()}
        self._buffer = cpprb.PrioritizedReplayBuffer(len(data["reward"]), columns, alpha=0.6)
        self._buffer.add(**data)

    def sample(self) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        sampled = self._buffer.sample(self._batch, beta=0.4)
        return sampled["indexes"], sampled

    def rewrite(self, ids: NDArray[np.int64], priorities: NDArray[np.float64]) -> None:
        self._buffer.update_priorities(ids, priorities)
