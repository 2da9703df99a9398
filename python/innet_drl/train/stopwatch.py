"""Timers of a thread: its seconds by activity, always, and for a trace each lap with its begin."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

BOOT = Path("/proc/sys/kernel/random/boot_id")
WAITING = "wait for a batch"
"""Activity of a learner that waits for its actors, or for a batch that is being sampled."""
MEMORY = "wait for the memory"
"""Activity of an actor until the memory has taken its rows: their way, and the wait for the replay ratio."""


@dataclass(frozen=True)
class Laps:
    """Consecutive laps of a thread: each begins where the one before has ended."""

    host: str
    """The boot of the host: processes of one boot share the monotonic clock."""
    offset_s: float
    """Wall-clock time at the zero of the monotonic clock, for other hosts."""
    begin_ns: int
    """Begin of the first lap by the monotonic clock."""
    laps: list[tuple[str, int]]
    """Activity and nanoseconds of each lap."""

    def parts(self, count: int, longest_ns: int) -> Iterator[Laps]:
        """Returns the same laps in parts of at most `count`; a longer lap than `longest_ns` becomes several."""
        laps: list[tuple[str, int]] = []
        for name, duration in self.laps:
            whole, rest = divmod(duration, longest_ns)
            laps += [(name, longest_ns)] * whole + [(name, rest)]
        begin = self.begin_ns
        for first in range(0, len(laps), count):
            part = laps[first : first + count]
            yield replace(self, begin_ns=begin, laps=part)
            begin += sum(duration for _, duration in part)


class Stopwatch:
    """Seconds of each activity of one thread, by its name. Every moment belongs to one activity.

    Its thread calls `lap`; one other thread may call `take`, `take_laps` and `record`.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        # Only the thread of the laps writes the sums: a reader subtracts those that it took before.
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._laps: deque[tuple[str, float, float]] = deque()
        self._record_until: float | None = None
        self._recorded = False

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        if self._record_until is not None:
            self._laps.append((name, self._last, now))
            if now >= self._record_until:
                self._record_until = None
        self._last = now

    def take(self) -> dict[str, float]:
        """Returns the seconds by name since the last call."""
        seconds, before = dict(self._seconds), self._taken
        self._taken = seconds
        since = {name: value - before.get(name, 0.0) for name, value in seconds.items()}
        return {name: value for name, value in since.items() if value > 0.0}

    def record(self, seconds: float | None) -> None:
        """Keeps each lap for a trace, from now on for so many seconds; only the first call does. `None` keeps none."""
        if seconds is not None and not self._recorded:
            self._recorded = True
            self._record_until = time.perf_counter() + seconds

    def take_laps(self) -> Laps | None:
        """Returns the laps kept since the last call; `None` without any."""
        if not self._laps:
            return None
        taken = []
        while self._laps:
            taken.append(self._laps.popleft())
        # The clock of `perf_counter` is the monotonic one on Linux, which all processes of a host share.
        offset = time.time() - time.perf_counter()
        ends = [round(1e9 * begin) for _, begin, _ in taken] + [round(1e9 * taken[-1][2])]
        laps = [(name, end - begin) for (name, _, _), begin, end in zip(taken, ends, ends[1:], strict=False)]
        return Laps(_boot(), offset, ends[0], laps)


class TimedBatches:
    """An iterator over the same batches: laps of waiting and of copying to the device."""

    def __init__(self, batches: Iterator[Any], stopwatch: Stopwatch, waiting: str = WAITING) -> None:
        self._batches = batches
        self._waited: Callable[[], None] = functools.partial(stopwatch.lap, waiting)
        self._ended = self._waited
        # Only a `TorchBatches` has its copies apart.
        if hasattr(batches, "on_sample"):
            batches.on_sample = self._waited
            self._ended = functools.partial(stopwatch.lap, "upload")

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._batches)
        except BaseException:
            self._waited()
            raise
        self._ended()
        return batch


@functools.cache
def _boot() -> str:
    try:
        return BOOT.read_text().strip()
    except OSError:
        return ""
