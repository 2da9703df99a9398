"""Timers of a thread: seconds by activity and, for a trace, each lap with its start."""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

BOOT = Path("/proc/sys/kernel/random/boot_id")
WAITING = "wait for a batch"
"""Activity of a learner that waits for actors or for a batch."""
MEMORY = "wait for the memory"
"""Activity of an actor that waits for the memory: transfer of its rows, and the replay ratio."""


@dataclass(frozen=True)
class Laps:
    """Consecutive laps of a thread: each begins at the end of the previous one."""

    host: str
    """Boot id of the host: processes of one boot share the monotonic clock."""
    offset_s: float
    """Wall-clock time at zero of the monotonic clock, for other hosts."""
    begin_ns: int
    """Start of the first lap by the monotonic clock."""
    laps: list[tuple[str, int]]
    """Activity and nanoseconds of each lap."""


class Stopwatch:
    """Seconds of each activity of one thread, by its name. Every moment belongs to one activity.

    Its thread calls `lap`; one other thread may call `take`, `take_laps` and `record`.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        # Only the thread of the laps writes the sums; the reader subtracts the sums of its previous call.
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
        """Records laps for a trace during the next `seconds`, once; `None` records none."""
        if seconds is not None and not self._recorded:
            self._recorded = True
            self._record_until = time.perf_counter() + seconds

    def take_laps(self) -> Laps | None:
        """Returns the laps recorded since the last call; `None` without any."""
        if not self._laps:
            return None
        taken = []
        while self._laps:
            taken.append(self._laps.popleft())
        # On Linux `perf_counter` is the monotonic clock, which all processes of a host share.
        offset = time.time() - time.perf_counter()
        ends = [round(1e9 * begin) for _, begin, _ in taken] + [round(1e9 * taken[-1][2])]
        laps = [(name, end - begin) for (name, _, _), begin, end in zip(taken, ends, ends[1:], strict=False)]
        return Laps(_boot(), offset, ends[0], laps)


class TimedBatches:
    """Wraps an iterator over batches with laps of waiting and of copying to the device."""

    def __init__(self, batches: Iterator[Any], stopwatch: Stopwatch, waiting: str = WAITING) -> None:
        self._batches = batches
        self._waited: Callable[[], None] = functools.partial(stopwatch.lap, waiting)
        self._ended = self._waited
        # Only `TorchBatches` has separate copies.
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


def add_seconds(totals: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Adds seconds by activity to totals."""
    for name, value in seconds.items():
        totals[name] = totals.get(name, 0.0) + value
