"""The machine that a process runs on."""

from __future__ import annotations

import os
import time


def cores() -> int:
    """Cores that this process may use: fewer than the machine has under `taskset` or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds(process: int) -> float:
    """Processor time of another process so far, to the nanosecond."""
    # The clock that clock_getcpuclockid(3) names; `/proc/PID/stat` counts in ticks of 10 ms.
    return time.clock_gettime(~process << 3 | 2)
