"""CPU time and memory of processes."""

from __future__ import annotations

import resource
import time
from pathlib import Path


def children_cpu_seconds() -> float:
    """CPU time of this process's ended and awaited descendants."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds(process: int) -> float:
    """CPU time of another process, to the nanosecond."""
    # The clock of clock_getcpuclockid(3); `/proc/PID/stat` counts ticks of 10 ms.
    return time.clock_gettime(~process << 3 | 2)


def resident_bytes(process: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_bytes(process: int) -> int:
    """Peak resident memory of a process."""
    status = Path(f"/proc/{process}/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])
