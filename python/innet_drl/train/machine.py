"""Cores and processor time of this machine."""

from __future__ import annotations

import os
import time


def cores() -> int:
    """Returns the cores available to this process: fewer than the machine's under `taskset` or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds(process: int) -> float:
    """Returns the processor time of another process, to the nanosecond."""
    # The clock of clock_getcpuclockid(3); `/proc/PID/stat` counts ticks of 10 ms.
    return time.clock_gettime(~process << 3 | 2)
