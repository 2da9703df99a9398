"""Times of a run: seconds of each thread by activity, and their sums over all sessions in `times.json`."""

from __future__ import annotations

import functools
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from innet_drl.train.files import replacing

logger = logging.getLogger(__name__)

TIMES = "times.json"
SERIAL = "serial"
"""Name of a serial run's process, which acts and learns."""
WAITING = "wait for a batch"
"""Activity of a learner that waits for actors or for a batch."""
MEMORY = "wait for the memory"
"""Activity of an actor that waits for the memory: transfer of its rows, and the replay ratio."""
RATIO = "wait for the replay ratio"
"""Seconds of `MEMORY` in which an actor's rows waited for the replay ratio; the memory counts them."""


class Stopwatch:
    """Seconds of each activity of one thread, by its name. Every moment belongs to one activity.

    Its thread calls `lap`; one other thread may call `take`.
    """

    def __init__(self) -> None:
        self._last = time.perf_counter()
        # Only the thread of the laps writes the sums; the reader subtracts the sums of its previous call.
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """Adds the time since the last lap to `name`."""
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def take(self) -> dict[str, float]:
        """Returns the seconds by name since the last call."""
        seconds, before = dict(self._seconds), self._taken
        self._taken = seconds
        since = {name: value - before.get(name, 0.0) for name, value in seconds.items()}
        return {name: value for name, value in since.items() if value > 0.0}


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


class Times:
    """Times of the processes of a run, over its sessions."""

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        self._file = folder / TIMES
        self._warned = False
        earlier = read_times(folder) if resumed else {}
        self.seconds: dict[str, dict[str, float]] = earlier.get("seconds", {})
        """By process and activity: `learner 0`, `actor 3`. Other threads are beside their process, `learner 0:
        targets`."""
        self.samples: int = earlier.get("samples", 0)
        """Batches that the memory sampled for the first learner."""
        self.blocked_samples: int = earlier.get("blocked_samples", 0)
        """Sampled batches that waited for the replay ratio."""

    def add(self, process: str, seconds: Mapping[str, float]) -> None:
        """Adds the seconds of a process, or of a thread, by activity."""
        add_seconds(self.seconds.setdefault(process, {}), seconds)

    def add_samples(self, added: Mapping[str, float], batch_size: int) -> None:
        """Adds samples, and the waits of actors, as `MemoryCounters.record` returns them."""
        self.samples += int(added["sampled_items"]) // batch_size
        self.blocked_samples += int(added["blocked_samples"])
        for name in added.keys() & self.seconds.keys():
            self.add(name, {RATIO: added[name]})

    def write(self) -> None:
        """Writes the sums; if they cannot be written, a warning says so once."""
        sums = {"seconds": self.seconds, "samples": self.samples, "blocked_samples": self.blocked_samples}
        try:
            with replacing(self._file) as file:
                file.write_text(json.dumps(sums) + "\n")
        except OSError as error:
            if not self._warned:
                folder, reason = self._file.parent, error.strerror or error
                logger.warning("%s: the times of the run cannot be written: %s", folder, reason)
            self._warned = True


def read_times(folder: Path) -> dict[str, Any]:
    """Reads the file of `Times.write`; empty if it is missing or damaged."""
    try:
        found: dict[str, Any] = json.loads((folder / TIMES).read_text())
        return {name: found[name] for name in ("seconds", "samples", "blocked_samples")}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def add_seconds(totals: dict[str, float], seconds: Mapping[str, float]) -> None:
    """Adds seconds by activity to totals."""
    for name, value in seconds.items():
        totals[name] = totals.get(name, 0.0) + value
