"""The machine and its software; processor time and open files."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from pathlib import Path
from typing import Any

import innet_drl as innet

PACKAGES = ("numpy", "torch", "gymnasium", "ale-py")
"""Distributions whose versions matter to a run."""


def description() -> dict[str, Any]:
    """Returns processor, cores, system and versions, as plain JSON values."""
    return {
        "processor": processor(),
        "cores": cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "innet_drl": innet.__version__,
    }


def versions() -> dict[str, str]:
    """Returns the versions of `PACKAGES` that are installed."""
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def processor() -> str:
    """Returns the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def cores() -> int:
    """Returns the cores available to this process: fewer than the machine's under `taskset` or in a container."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_seconds(process: int) -> float:
    """Returns the processor time of another process, to the nanosecond."""
    # The clock of clock_getcpuclockid(3); `/proc/PID/stat` counts ticks of 10 ms.
    return time.clock_gettime(~process << 3 | 2)


def file_position(path: Path) -> int:
    """Returns how many bytes of a file this process has read or written; 0 while it is not open."""
    wanted = str(path.resolve())
    for descriptor in os.listdir("/proc/self/fd"):
        # Descriptors of other threads come and go.
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}") == wanted:
                return int(Path(f"/proc/self/fdinfo/{descriptor}").read_text().split()[1])
    return 0
