"""The bars of a breakdown: shares of each process's time by activity, which sum to 1.

Furukawa and Matsutani show their baseline in the same way: a bar for actors and one for the learner, with shares of
parameters, experience and computation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from innet_drl.analysis.recorded_run import read_sessions
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.stopwatch import MEMORY, WAITING
from innet_drl.train.observe.times import ProcessTimes, read_times
from innet_drl.train.run_folder import RunFolder

RATIO = "wait for the replay ratio"
KINDS = {
    "computation": ("inference", "environment", "targets", "forward", "backward", "optimizer"),
    "communication": (
        *("parameters", "write", "send", "sample", "upload", "average gradients", "priorities", "publish"),
    ),
    "waiting": (WAITING, RATIO, "wait for the learner"),
    "bookkeeping": ("free", "evaluate", "report", "checkpoint", "other"),
}
"""Activities by kind."""
START = "start"
"""Activity before training, excluded from the shares."""
HOST_TIMES = (
    "the learner's times are of its host: it starts the GPU's work, which overlaps all of them, and waits for it where "
    "it needs a result, in priorities"
)
"""Note on runs whose learner has a GPU."""
MOST_PROCESSES = 6
"""Largest number of processes with their own bars; above it, all actors share a bar."""


@dataclass(frozen=True)
class Bar:
    """The time of one thread of a process, or of all actors together."""

    process: str
    """`learner 0`, `actor 3`, `evaluator`, `serial`, or all `actors`."""
    thread: str
    """Name of a thread beside the main thread; empty for the main thread."""
    seconds: float
    """Seconds of training."""
    shares: dict[str, float]
    """Shares of the seconds by activity, which sum to 1."""
    start_s: float = 0.0
    """Seconds of the start, before training."""
    beside: dict[str, float] = field(default_factory=dict)
    """Processor seconds of the core's threads by work, as shares of `seconds`; these threads run in parallel."""

    @property
    def name(self) -> str:
        """Name of the process, and of the thread if it is not the main one."""
        return f"{self.process}: {self.thread}" if self.thread else self.process

    @property
    def kinds(self) -> dict[str, float]:
        """Shares by kind of activity."""
        return {
            kind: sum(self.shares.get(activity, 0.0) for activity in activities) for kind, activities in KINDS.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Returns the bar as plain JSON values."""
        return {
            "process": self.process,
            "thread": self.thread or None,
            "overlaps": self.process if self.thread else None,
            "seconds": round(self.seconds, 3),
            "start_s": round(self.start_s, 3),
            "shares": self.shares,
            "kinds": self.kinds,
            "beside": self.beside,
        }


@dataclass(frozen=True)
class Breakdown:
    """The bars of a run."""

    path: Path
    environment: str
    bars: list[Bar]
    """Bars of every process and its threads, learners first."""
    samples: int
    """Batches that the memory sampled."""
    blocked_samples: int
    """Sampled batches that waited for the replay ratio."""
    note: str = ""

    @property
    def shown(self) -> list[Bar]:
        """Bars of every process, or of the learners and of all actors together."""
        actors = [bar for bar in self.bars if bar.process.startswith("actor ")]
        if len({bar.process for bar in self.bars}) <= MOST_PROCESSES or not actors:
            return self.bars
        return [*(bar for bar in self.bars if bar not in actors), together(actors)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the breakdown as plain JSON values."""
        return {
            "run": str(self.path),
            "environment": self.environment,
            "note": self.note or None,
            "samples": self.samples,
            "blocked_samples": self.blocked_samples,
            "bars": [bar.as_dict() for bar in self.bars],
        }


def read(path: Path) -> Breakdown:
    """Reads the times of a run.

    Raises:
        RunFolderError: There is no run.
        ConfigurationError: The run has recorded no times.
    """
    config = RunFolder.open(path).config()
    processes = read_times(path)
    if not processes:
        raise ConfigurationError(f"{path} has recorded no times: it has no times.json")
    names = sorted(processes, key=_order)
    learner = processes[names[0]]
    devices = [session["device"] for session in read_sessions(path) if "device" in session]
    note = HOST_TIMES if devices and devices[-1] != "cpu" else ""
    bars = [bar for name in names for bar in _bars(name, processes[name])]
    return Breakdown(path, config.environment_name, bars, learner.samples, learner.blocked_samples, note)


def _order(name: str) -> tuple[int, int]:
    role, _, number = name.partition(" ")
    return ("evaluator", "actor").index(role) + 1 if role in ("evaluator", "actor") else 0, int(number or 0)


def _bars(name: str, times: ProcessTimes) -> list[Bar]:
    seconds = dict(times.seconds)
    if MEMORY in seconds:
        # The memory counts how long an actor's rows wait; the rest of the actor's wait is transfer.
        waited = min(times.waited_s, seconds[MEMORY])
        seconds |= {RATIO: waited, "send": seconds.pop(MEMORY) - waited}
    start = seconds.pop(START, 0.0)
    whole = sum(seconds.values())
    beside = {work: value / whole for work, value in times.processor_s.items()} if whole else {}
    return [
        Bar(name, "", whole, _shares(seconds), start, beside),
        *(Bar(name, thread, sum(spent.values()), _shares(spent)) for thread, spent in times.threads.items()),
    ]


def together(bars: Sequence[Bar]) -> Bar:
    """Merges bars of actors: mean shares, weighted by seconds."""
    seconds: dict[str, float] = {}
    for bar in bars:
        for activity, share in bar.shares.items():
            seconds[activity] = seconds.get(activity, 0.0) + share * bar.seconds
    return Bar("actors", "", sum(seconds.values()), _shares(seconds), sum(bar.start_s for bar in bars))


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}
