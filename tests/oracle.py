"""A naive oracle for the views: plain Python over lists, one item at a time, nothing shared with the core.

A `Stream` is what one environment did, row by row, as the writer is told. The functions below answer, for
an anchor row, what a view must deliver; `None` where the stream does not (yet) hold the item's window.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass
class Row:
    """One step, or (with `final`) the last observation of an episode."""

    observation: Array
    action: int = 0
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    first: bool = False
    final: bool = False


@dataclass
class Stream:
    """The rows of one environment, in order."""

    rows: list[Row] = field(default_factory=list)

    def stack(self, t: int, size: int, padding: str) -> Array:
        """The observations of the rows t-size+1..t, none from before the row that starts the stack."""
        frames: list[Array] = []
        for i in range(t, t - size, -1):
            frames.insert(0, self.rows[i].observation)
            if self.rows[i].first:
                break
        blank = np.zeros_like(frames[0]) if padding == "zero" else frames[0]
        frames = [blank] * (size - len(frames)) + frames
        return np.stack(frames) if size > 1 else frames[0]

    def has(self, t: int) -> bool:
        """Whether there is a row t that goes on from the row before it."""
        return t < len(self.rows) and not self.rows[t].first

    def steps_to_end(self, t: int, limit: int) -> int | None:
        """Steps from t to the end of the life or episode, t's own included: at most `limit`."""
        for k in range(limit):
            if k > 0 and not self.has(t + k):
                return None
            if self.rows[t + k].terminated or self.rows[t + k].truncated:
                return k + 1
        return limit


@dataclass
class Transition:
    """What `NStep` delivers for one anchor."""

    observation: Array
    action: int
    reward: float
    discount: float
    next_observation: Array | None
    """None where the life or episode terminated: nothing follows."""


def n_step(stream: Stream, t: int, *, stack: int, n: int, gamma: float, padding: str) -> Transition | None:
    """The transition whose anchor is row t, or None when there is none."""
    row = stream.rows[t]
    if row.final:
        return None
    m = stream.steps_to_end(t, n)
    if m is None:
        return None
    last = stream.rows[t + m - 1]
    reward = sum(gamma**k * stream.rows[t + k].reward for k in range(m))
    observation = stream.stack(t, stack, padding)
    if last.terminated:
        return Transition(observation, row.action, reward, 0.0, None)
    if not stream.has(t + m):
        return None
    return Transition(observation, row.action, reward, gamma**m, stream.stack(t + m, stack, padding))
