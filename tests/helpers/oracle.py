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

    def steps_to_end(self, t: int, limit: int) -> tuple[int, int] | None:
        """At most `limit` steps from t to the end of the life or episode, t's own included.

        First those that terminate or whose next observation came, then with a truncated one whose next never comes.
        `None` while the end is not known.
        """
        for k in range(limit):
            if k > 0 and not self.has(t + k):
                return None
            row = self.rows[t + k]
            if row.terminated or row.truncated:
                known = row.terminated or self.has(t + k + 1)
                return k + known, k + 1
        return (limit, limit) if self.has(t + limit) else None

    def stack_after(self, t: int, size: int, padding: str, missing: int = 1) -> Array:
        """The stack of row t. If that never came, the one before it goes on with `missing` observations of zeros."""
        if self.has(t):
            return self.stack(t, size, padding)
        blank = np.zeros_like(self.rows[t - 1].observation)
        known = list(self.stack(t - 1, size, padding)) if size > 1 else [self.rows[t - 1].observation]
        frames = [*known, *[blank] * missing][-size:]
        return np.stack(frames) if size > 1 else frames[0]

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
    next_observation: Array
    steps: int
    """Steps of the return."""


def n_step(stream: Stream, t: int, *, stack: int, n: int, gamma: float, padding: str) -> Transition | None:
    """The transition whose anchor is row t, or None when there is none."""
    row = stream.rows[t]
    if row.final:
        return None
    steps = stream.steps_to_end(t, n)
    if steps is None or steps[0] == 0:
        return None
    m = steps[0]
    reward = sum(gamma**k * stream.rows[t + k].reward for k in range(m))
    discount = 0.0 if stream.rows[t + m - 1].terminated else gamma**m
    now, following = stream.stack(t, stack, padding), stream.stack_after(t + m, stack, padding, n - m + 1)
    return Transition(now, row.action, reward, discount, following, m)


@dataclass
class Window:
    """What `Sequences` delivers for one item: arrays of the steps that exist."""

    steps: int
    """Steps that learning may use. A truncated one may follow whose next observation never came."""
    observation: Array
    """One more than `steps`."""
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
    found = stream.steps_to_end(t, burn_in + length)
    if found is None or found[0] <= burn_in:
        return None
    steps, shown = found
    rows = stream.rows[t : t + shown]
    following = stream.stack_after(t + steps, stack, padding)
    return Window(
        steps,
        np.stack([*(stream.stack(i, stack, padding) for i in range(t, t + steps)), following]),
        [row.action for row in rows],
        [row.reward for row in rows],
        [0.0 if row.terminated or k >= steps else gamma for k, row in enumerate(rows)],
        [row.terminated for row in rows],
        [row.truncated for row in rows],
    )
