"""Sizes for which the process has no memory are errors with the numbers: no call ends the process."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from places import HELPERS
from scarce_memory import FITS
from serving import Server
from steps import still_works, table

import innet_drl as innet
from innet_drl import errors

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
        assert re.search(r"\d{6,}|\d [GM]iB", outcome["text"]), outcome


@pytest.mark.slow
def test_sizes_beyond_the_address_space_are_errors(tmp_path: Path) -> None:
    check(outcomes("addresses", tmp_path))


@pytest.mark.slow
def test_sizes_beyond_a_control_group_are_errors(tmp_path: Path, group: Path) -> None:
    check(outcomes("group", tmp_path, group))


RAW = innet.Table("raw", {"frame": innet.Column("uint8", (256, 256), codec="none")}, 64, view=innet.Window(0, 0))


def address_space(pid: int) -> int:
    """Bytes that a process has of its address space."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmSize:")[1].split()[0]) << 10


def write(replay: innet.Replay, name: str, steps: int) -> None:
    """Writes frames of 64 KiB, which are stored as they are."""
    frames = np.random.default_rng(1).integers(256, size=(16, 1, 256, 256), dtype=np.uint8)
    ended: dict[str, Any] = {flag: np.zeros((16, 1), bool) for flag in ("terminated", "truncated")}
    with replay.writer(name, 1) as writer:
        for _ in range(steps // 16):
            writer.extend(frame=frames, **ended)


def test_a_server_without_memory_says_so_to_its_client_and_serves_on(tmp_path: Path) -> None:
    # It may take more than the system gives.
    with (
        Server(f"unix://{tmp_path}/s", "--max-bytes=1024GiB") as server,
        innet.connect(server.address, tables=[table(), RAW]) as replay,
    ):
        write(replay, "raw", 64)
        assert still_works(replay)
        resource.prlimit(server.pid, resource.RLIMIT_AS, (address_space(server.pid) + (128 << 20),) * 2)
        large = np.zeros(50_000_000, np.float32)
        calls: list[tuple[type[errors.ReplayError], Callable[[], object]]] = [
            (errors.TableError, lambda: replay.create_table(innet.Table("large", {"a": "uint8"}, 1 << 24))),
            (errors.OutOfMemoryError, lambda: replay.sample("raw", 3000)),
            (errors.OutOfMemoryError, lambda: next(replay.batches("raw", 3000, prefetch=4))),
            (errors.OutOfMemoryError, lambda: replay.sample(innet.Mix({"raw": 1.0}), 3000)),
            (errors.OutOfMemoryError, lambda: replay.put_parameters("large", {"w": large})),
        ]
        for error, call in calls:
            for _ in range(2):
                with pytest.raises(error, match=r"needs \d{9,} bytes, more than the \d+ left in the address space"):
                    call()
            assert still_works(replay)
            with innet.connect(server.address) as other:
                assert still_works(other)
                assert sorted(other.stats()["tables"]) == ["raw", "t"]
        assert len(replay.sample("raw", 300)) == 300
        write(replay, "raw", 64)


def test_a_server_takes_by_default_what_fits_its_address_space(tmp_path: Path) -> None:
    def limited(kib: int) -> Server:
        return Server(f"unix://{tmp_path}/s", inside=["sh", "-c", f'ulimit -v {kib}; exec "$@"', "sh"])

    # A limit that it does not reach.
    with limited(1 << 30) as server:
        used = address_space(server.pid)
    with (
        limited((used >> 10) + (192 << 10)) as server,
        innet.connect(server.address, tables=[table(), RAW]) as replay,
    ):
        most = replay.stats()["max_bytes"]
        assert 32 << 20 < most < 192 << 20
        with pytest.raises(errors.TableError, match="max_bytes"):
            replay.create_table(innet.Table("huge", RAW.columns, 1 << 14, capacity_bytes=most))
        # What a full memory and its clients take at a time, twice over.
        for name in ("first", "second"):
            full = innet.Table(name, RAW.columns, 1 << 14, capacity_bytes=most // 2, view=innet.Window(0, 0))
            replay.create_table(full)
            write(replay, name, most // 65_536)
            assert replay.stats()["tables"][name]["bytes"] > most // 4
            others = [innet.connect(server.address) for _ in range(20)]
            parameters = np.zeros(1_000_000, np.float32)
            with pytest.raises(errors.TooLargeError, match="max_bytes"):
                for number in range(200):
                    replay.put_parameters(f"of {number}", {"w": parameters})
            for other in others:
                assert len(other.sample(name, 40)) == 40
                assert other.get_parameters("of 0") is not None
                other.close()
            assert still_works(replay)
            replay.drop_table(name)
            for number in range(200):
                if replay.get_parameters(f"of {number}", timeout=0) is None:
                    break
                replay.drop_parameters(f"of {number}")
