"""Times of a run: seconds of every process by activity (`times.json`), and laps for a trace (`trace.jsonl`).

The sums are over all sessions, and are written with each line of metrics. The trace is of the newest session with
`--trace-seconds`.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from innet_drl.train.files import new_file, replaceable
from innet_drl.train.observe.stopwatch import Laps, Stopwatch, add_seconds

logger = logging.getLogger(__name__)

TIMES = "times.json"
TRACE = "trace.jsonl"
SERIAL = "serial"
"""Name of a serial run's process, which acts and learns."""
TASKS = Path("/proc/self/task")
SERVING = ("io", "http", "work", "snapshots", "fstack", "eal", "gradients", "parent", "updates")
CORE_THREADS = {
    "innet-batches": "sample ahead",
    "innet-shard": "sample ahead",
    "innet-unpack": "decode ahead",
    **{f"innet-{name}": "send, receive and serve" for name in SERVING},
}
"""Work of the core's threads, by their full names without a final number. Other threads are named after the command,
`innet-drl`."""
NUMBER = re.compile(r"-\d+$")


@dataclass
class ProcessTimes:
    """Times of one process."""

    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of the main thread by activity, which cover all of its time."""
    threads: dict[str, dict[str, float]] = field(default_factory=dict)
    """Seconds by activity of other threads with a stopwatch, by name: they run in parallel."""
    processor_s: dict[str, float] = field(default_factory=dict)
    """Processor seconds of the core's threads by work: they also run in parallel."""
    waited_s: float = 0.0
    """Seconds of an actor in which its rows waited for the replay ratio."""
    samples: int = 0
    """Batches of a learner that the memory sampled."""
    blocked_samples: int = 0
    """Sampled batches that waited for the replay ratio."""


@dataclass(frozen=True)
class LearnerTimes:
    """Report of another learner to the first learner."""

    seconds: dict[str, dict[str, float]]
    """Seconds by thread (the main thread is '') and activity."""
    processor_s: dict[str, float]
    laps: dict[str, Laps]
    """By thread."""

    @classmethod
    def take(cls, stopwatches: Mapping[str, Stopwatch], core: CoreThreads) -> LearnerTimes:
        """Takes the times of stopwatches by thread."""
        laps = {name: laps for name, each in stopwatches.items() if (laps := each.take_laps()) is not None}
        return cls({name: each.take() for name, each in stopwatches.items()}, core.take(), laps)


class CoreThreads:
    """Processor seconds of the core's threads in this process, by their work (`CORE_THREADS`)."""

    def __init__(self) -> None:
        self._before: dict[int, float] = {}

    def take(self) -> dict[str, float]:
        """Returns the processor seconds since the last call. Threads that ended since then do not count."""
        found: dict[str, float] = {}
        before, self._before = self._before, {}
        for task in TASKS.glob("*/comm"):
            try:
                name, number = NUMBER.sub("", task.read_text().strip()), int(task.parent.name)
                work = CORE_THREADS.get(name)
                if work is None:
                    continue
                # The clock of a thread that pthread_getcpuclockid(3) names.
                seconds = time.clock_gettime(~number << 3 | 6)
            except OSError:
                # It has ended.
                continue
            self._before[number] = seconds
            found[work] = found.get(work, 0.0) + seconds - before.get(number, 0.0)
        return {work: seconds for work, seconds in found.items() if seconds > 0.0}


class Times:
    """Times of all processes of a run, over its sessions."""

    def __init__(self, folder: Path, *, resumed: bool) -> None:
        self._folder = folder
        self.processes: dict[str, ProcessTimes] = read_times(folder) if resumed else {}
        self._trace: list[dict[str, Any]] = []
        self._has_trace = False
        self._warned = False

    def process(self, name: str) -> ProcessTimes:
        """The times of a process: `learner 0`, `actor 3`."""
        return self.processes.setdefault(name, ProcessTimes())

    def add(self, process: str, seconds: Mapping[str, float], laps: Laps | None, thread: str = "") -> None:
        """Adds seconds of a thread by activity, and laps for the trace; the main thread has no name."""
        times = self.process(process)
        add_seconds(times.threads.setdefault(thread, {}) if thread else times.seconds, seconds)
        if laps is not None:
            self._trace.append({"process": process, "thread": thread, **asdict(laps)})

    def add_core(self, process: str, processor_s: Mapping[str, float]) -> None:
        """Adds processor seconds of the core's threads by their work."""
        add_seconds(self.process(process).processor_s, processor_s)

    def add_learner(self, number: int, times: LearnerTimes) -> None:
        """Adds the report of another learner."""
        name = f"learner {number}"
        for thread, seconds in times.seconds.items():
            self.add(name, seconds, times.laps.get(thread), thread)
        self.add_core(name, times.processor_s)

    def add_samples(self, process: str, added: Mapping[str, float], batch_size: int) -> None:
        """Adds a learner's samples and the waits of actors, as `MemoryCounters.record` returns them."""
        times = self.process(process)
        times.samples += int(added["sampled_items"]) // batch_size
        times.blocked_samples += int(added["blocked_samples"])
        for name in added.keys() & self.processes.keys():
            self.processes[name].waited_s += added[name]

    def write(self) -> None:
        """Writes the sums, and appends to the trace; if they cannot be written, a warning says so once."""
        try:
            if self._trace:
                with (self._folder / TRACE).open("a" if self._has_trace else "w") as file:
                    file.writelines(json.dumps(line, separators=(",", ":")) + "\n" for line in self._trace)
                self._has_trace = True
            partial = self._folder / f"{TIMES}.partial"
            text = json.dumps({name: asdict(times) for name, times in self.processes.items()}) + "\n"
            with new_file(partial) as file:
                file.write(text.encode())
            partial.replace(replaceable(self._folder / TIMES))
        except OSError as error:
            if not self._warned:
                logger.warning("%s: the times of the run cannot be written: %s", self._folder, error.strerror or error)
            self._warned = True
        self._trace.clear()


def read_times(folder: Path) -> dict[str, ProcessTimes]:
    """Reads the times of a run by process; none if the file is missing or damaged."""
    try:
        found = json.loads((folder / TIMES).read_text())
        return {name: ProcessTimes(**times) for name, times in found.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
