"""cpprb's prioritized buffer, which works in the learner's process.

Forms of an observation: `whole` stores both stacks of a transition; `next` shares an observation with the transition of
three steps before, whose next one it is (cpprb's `next_of`; each third step of a stream is an episode to cpprb);
`compressed` stores a frame once for the stacks that it is in (`stack_compress`), separately for the two observations.
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
    """`PrioritizedReplayBuffer` with a byte in each item."""

    def __init__(self, items: int, batch: int, priorities: NDArray[np.float64]) -> None:
        self._batch = batch
        # It raises to the power of alpha itself; others are given priorities that are.
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
            # It adds next_observation itself.
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
        """Transitions in the order of their steps, `stride` apart, each unbroken series as an episode."""
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
            # A network takes frames in the last place as well.
            batch[name] = np.moveaxis(sampled[name], -1, 1) if self._form == "compressed" else sampled[name]
        return batch
