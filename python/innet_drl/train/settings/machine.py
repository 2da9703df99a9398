"""The machine and its software, freed memory, and positions in open files."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import innet_drl as innet

PACKAGES = ("numpy", "torch", "gymnasium", "ale-py")
"""Distributions whose versions matter to a run."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of mallopt(3)."""
_KEPT_BYTES = 1 << 30
"""Size above which freed blocks are returned to the kernel."""


def description() -> dict[str, Any]:
    """Returns processor, cores, system and versions, as plain JSON values."""
    return {
        "processor": processor(),
        "cores": cores(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "innet_drl": innet.__version__,
    }


def commit(folder: Path | None = None, results: Sequence[str] = ()) -> str:
    """Returns the commit of a folder, this package's by default; empty if none of its files is in git.

    If its files differ, or with `results` (from the root) others of the repository, `-dirty-` and a checksum follow.
    """
    folder = folder or Path(innet.__file__).parent

    def git(*arguments: str) -> bytes:
        return subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, check=False).stdout.strip()

    # Installed packages may be ignored files of another repository.
    if not shutil.which("git") or not git("ls-files"):
        return ""
    others = [f":(top,exclude){name}" for name in results]
    changes = git(
        "diff", "--no-ext-diff", "--no-textconv", "--no-color", "HEAD", "--", ":/" if results else ".", *others
    )
    dirty = f"-dirty-{zlib.crc32(changes):08x}" if changes else ""
    return git("describe", "--always", "--exclude=*").decode() + dirty


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
    # macOS has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def keep_freed_memory() -> None:
    """Keeps freed memory in this process, if the C library is glibc.

    glibc returns large blocks to the kernel, which zeroes each page of the next allocation: a fifth of an update on 128
    stacks of frames.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD):
            mallopt(parameter, _KEPT_BYTES)


def file_position(path: Path) -> int:
    """Returns this process's position in an open file; 0 while it is not open."""
    wanted = str(path.resolve())
    return next((int(file.position) for file in psutil.Process().open_files() if file.path == wanted), 0)
