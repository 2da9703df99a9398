"""The machine and its software."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import zlib
from collections.abc import Sequence
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
