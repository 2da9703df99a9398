"""What every benchmark prints: one JSON object a line, with what it takes to compare it later."""

from __future__ import annotations

import functools
import json
import platform
import resource
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import innet_drl


@functools.cache
def machine() -> dict[str, Any]:
    """Commit, processor and versions."""
    root = Path(__file__).parent.parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True, check=False
    ).stdout.strip()
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {
        "commit": commit,
        "processor": processor,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "innet_drl": innet_drl.__version__,
    }


def line(benchmark: str, system: str, value: float, unit: str, **more: Any) -> None:
    """Prints one result."""
    result = {"benchmark": benchmark, "system": system, "value": round(value, 3), "unit": unit}
    print(json.dumps({**result, **more, **machine()}), flush=True)


def timed(call: Callable[[], Any], seconds: float, warm_up: int = 3) -> dict[str, float]:
    """Calls again and again for about `seconds`: p50 and p99 in ms, calls a second, CPU seconds a call."""
    for _ in range(warm_up):
        call()
    spent = []
    cpu = _cpu_seconds()
    start = time.perf_counter()
    while (begin := time.perf_counter()) < start + seconds:
        call()
        spent.append(time.perf_counter() - begin)
    elapsed = time.perf_counter() - start
    milliseconds = 1e3 * np.array(spent)
    return {
        "p50_ms": round(float(np.percentile(milliseconds, 50)), 4),
        "p99_ms": round(float(np.percentile(milliseconds, 99)), 4),
        "per_s": round(len(spent) / elapsed, 2),
        "cpu_ms": round(1e3 * (_cpu_seconds() - cpu) / len(spent), 4),
    }


def resident_bytes(process: int) -> int:
    """Memory of a process that is in RAM now."""
    pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
