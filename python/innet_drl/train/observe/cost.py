"""The cost of training: processor seconds and memory of all processes, and joules where the machine counts them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from innet_drl.train.observe.energy import EnergyCounters
from innet_drl.train.observe.metrics import Meter

PERIOD_SECONDS = 1.0
"""Shortest time between two scans of the process table for processes of the run."""


@dataclass(frozen=True)
class Cost:
    """Cost of a run over all sessions, without the evaluation after training."""

    processor_s: float
    """Processor seconds, user and system, of this process and all its descendants: learners, actors, evaluations."""
    joules: float | None
    """Energy of this machine's processors and of the learners' GPUs, other programs included; `None` without counters
    (RAPL, NVML) in any session."""
    frames: int
    """Environment frames of the run."""
    resident_bytes: int
    """Resident memory of these processes now. Memory that they share counts in each of them."""

    @property
    def processor_s_per_million_frames(self) -> float | None:
        """Processor seconds of a million frames."""
        return _per_million(self.processor_s, self.frames)

    @property
    def joules_per_million_frames(self) -> float | None:
        """Joules of a million frames."""
        return _per_million(self.joules, self.frames)

    def record(self, meter: Meter) -> None:
        """Records the cost for a line of metrics."""
        meter.record("processor_s", self.processor_s)
        meter.record("processor_s_per_million_frames", self.processor_s_per_million_frames)
        meter.record("joules", self.joules)
        meter.record("joules_per_million_frames", self.joules_per_million_frames)
        meter.record("resident_bytes", self.resident_bytes)

    def __str__(self) -> str:
        costs = ((self.processor_s, "processor seconds"), (self.joules, "joules"))
        shown = [f"{value:,.0f} {unit}{self._rate(value)}" for value, unit in costs if value is not None]
        return ", ".join(shown)

    def _rate(self, value: float) -> str:
        rate = _per_million(value, self.frames)
        return "" if rate is None else f" ({rate:,.0f} per million frames)"


class ProcessorTime:
    """Processor seconds of this process and its descendants, including ended ones, since the object was made.

    The same scan also gives their resident memory.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.resident_bytes = 0
        """Resident memory at the last `read`."""
        self._first = self._all()
        self._last = 0.0
        self._read = -PERIOD_SECONDS

    def read(self, *, fresh: bool = False) -> float:
        """Returns the seconds, at most `PERIOD_SECONDS` old unless `fresh`."""
        if fresh or time.monotonic() - self._read >= PERIOD_SECONDS:
            # A descendant whose parent died first is no longer counted.
            self._last = max(self._last, self._all() - self._first)
            self._read = time.monotonic()
        return self._last

    def _all(self) -> float:
        found = [_use(process) for process in (self._process, *self._process.children(recursive=True))]
        self.resident_bytes = sum(resident for _, resident in found)
        return sum(seconds for seconds, _ in found)


class CostMeter:
    """Counts the cost of a run."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._time = ProcessorTime()
        self._energy = EnergyCounters(gpus)
        self._earlier_s = 0.0
        self._earlier_joules: float | None = 0.0

    @property
    def missing(self) -> str:
        """Unreadable energy counters with reasons; empty if there are none."""
        return "; ".join(f"{name}: {reason}" for name, reason in self._energy.missing.items())

    def read(self, frames: int, *, fresh: bool = False) -> Cost:
        """Returns the cost of the run until now; `fresh` forces a scan of its processes."""
        joules, earlier = self._energy.read().joules, self._earlier_joules
        return Cost(
            round(self._earlier_s + self._time.read(fresh=fresh), 2),
            None if joules is None or earlier is None else round(earlier + joules, 2),
            frames,
            self._time.resident_bytes,
        )

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain JSON values."""
        cost = self.read(0, fresh=True)
        return {"processor_s": cost.processor_s, "joules": cost.joules}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self._earlier_s, self._earlier_joules = state["processor_s"], state["joules"]


def _use(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds and resident bytes of a process."""
    try:
        spent, resident = process.cpu_times(), process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0, 0
    # Ended children count in the process that waited for them.
    return float(spent.user + spent.system + spent.children_user + spent.children_system), int(resident)


def _per_million(value: float | None, frames: int) -> float | None:
    return None if value is None or frames <= 0 else round(1e6 * value / frames, 2)
