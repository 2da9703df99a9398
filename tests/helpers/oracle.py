"""A naive oracle for the views: plain Python over lists, one item at a time, nothing shared with the core.

A `Stream` is what one environment did, row by row, as the writer gets it. The functions below answer, for
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
        """Whether there is a row t that continues the row before it."""
        return t < len(self.rows) and not self.rows[t].first

    def steps_to_end(self, t: int, limit: int) -> int | None:
        """Steps from t to the end of the life or episode, t's own included: at most `limit`."""
        for k in range(limit):
            if k > 0 and not self.has(t + k):
                return None
            if self.rows[t + k].terminated or self.rows[t + k].truncated:
                return k + 1
        return limit

    def sequence_starts(self, period: int) -> list[int]:
        """Every `period`-th step of each life, from its first on."""
        starts = []
        since = 0
        for t, row in enumerate(self.rows):
            if row.first or (t > 0 and self.rows[t - 1].terminated):
                since = 0
            if not row.final and since % period == 0:
                starts.append(t)
            since += 1
        return starts


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


@dataclass
class Window:
    """What `Sequences` delivers for one item: arrays of the steps that exist."""

    steps: int
    observation: Array
    """One more than `steps` where an observation follows the last step."""
    action: list[int]
    reward: list[float]
    discount: list[float]
    terminated: list[bool]
    truncated: list[bool]


def sequence(
    stream: Stream, t: int, *, length: int, burn_in: int, stack: int, gamma: float, padding: str
) -> Window | None:
    """The sequence that starts at row t, or None when its end is not known yet."""
    if stream.rows[t].final:
        return None
    steps = stream.steps_to_end(t, burn_in + length)
    if steps is None or steps <= burn_in:
        return None
    rows = stream.rows[t : t + steps]
    ends = t + steps
    if not rows[-1].terminated and not stream.has(ends):
        return None
    known = steps if rows[-1].terminated else steps + 1
    return Window(
        steps,
        np.stack([stream.stack(i, stack, padding) for i in range(t, t + known)]),
        [row.action for row in rows],
        [row.reward for row in rows],
        [0.0 if row.terminated else gamma for row in rows],
        [row.terminated for row in rows],
        [row.truncated for row in rows],
    )
