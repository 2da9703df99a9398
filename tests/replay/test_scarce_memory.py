"""Sizes for which the process has no memory are errors with the numbers: no call ends the process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from places import HELPERS
from scarce_memory import FITS

CALLS = HELPERS / "scarce_memory.py"
GROUP_BYTES = 512 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 512 MB."""
    limits = {"/sys/fs/cgroup": "memory.max", "/sys/fs/cgroup/memory": "memory.limit_in_bytes"}
    reasons = []
    for mount, limit in limits.items():
        folder = Path(mount, f"innet-test-{os.getpid()}")
        try:
            if not Path(mount, "cgroup.procs").exists():
                raise FileNotFoundError(f"{mount} has no groups")
            folder.mkdir()
            try:
                (folder / limit).write_text(str(GROUP_BYTES))
                yield folder
                return
            finally:
                folder.rmdir()
        except OSError as error:
            reasons.append(str(error))
    pytest.skip(f"no control group can be made: {'; '.join(reasons)}")


def outcomes(*arguments: str | Path) -> list[dict[str, Any]]:
    """What each call raised, in a process of its own."""
    done = subprocess.run([sys.executable, CALLS, *arguments], capture_output=True, text=True, timeout=300, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}: {done.stderr}"
    assert "panicked" not in done.stderr, done.stderr
    return [line for line in lines if "error" in line]


def check(outcomes: list[dict[str, Any]]) -> None:
    assert len(outcomes) > 15
    for outcome in outcomes:
        if outcome["call"] in FITS:
            assert outcome["error"] is None, outcome
            continue
        assert outcome["error"] is not None, f"{outcome['call']} has fitted"
        assert outcome["own"], outcome
        # Of threads the system tells no number.
        assert outcome["error"] == "StorageError" or re.search(r"\d{6,}", outcome["text"]), outcome


@pytest.mark.slow
def test_sizes_beyond_the_address_space_are_errors(tmp_path: Path) -> None:
    check(outcomes("addresses", tmp_path))


@pytest.mark.slow
def test_sizes_beyond_a_control_group_are_errors(tmp_path: Path, group: Path) -> None:
    check(outcomes("group", tmp_path, group))
