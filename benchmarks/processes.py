"""What the system knows about processes."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def own_cpu_seconds() -> float:
    """CPU time of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def cpu_seconds(process: int) -> float:
    """CPU time of another process."""
    # The second field is the program's name in parentheses, whatever it holds.
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(process: int) -> int:
    """Memory of a process that is in RAM now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()
