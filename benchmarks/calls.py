"""Whole calls from Python with both ends polling: F-Stack over memif against the kernel's TCP over loopback.

`python -m benchmarks.calls` wants the Python package with the feature `fstack`, and writes the raw data of a
report. `cargo bench --bench transport` has the same ends without codec, memory and Python.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import innet_drl as innet
from benchmarks import report, services
from benchmarks.services import SPINNING, NetworkStack
from benchmarks.table import today
from innet_drl._core import fstack_release

SIZES = {64: 2_000, 1_024: 2_000, 4_096: 2_000, 65_536: 1_000, 1 << 20: 100, 13_170_000: 10}
"""Calls in a round, by bytes of the single tensor."""
SERVER, CLIENT = 0, 1
"""Core of each end, for its polling loop and all of its threads."""
NAME = "policy"

Times = dict[tuple[str, int], list[float]]
"""Microseconds of calls, by operation and bytes."""


def calls(rounds: int = 3, out: Path | None = None) -> None:
    """Times `get_parameters` and `put_parameters` of each size; the record has the best of the rounds.

    Args:
        rounds: Turns of each stack.
        out: File for the record; `docs/reports/DATE-fstack/calls.json` by default.
    """
    if fstack_release is None:
        raise SystemExit("this innet_drl was built without F-Stack: maturin develop --release --features fstack")
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("each end polls on a core of its own: two are needed")
    measured: dict[str, list[Times]] = {}
    with tempfile.TemporaryDirectory(prefix="innet-") as folder:
        for turn in range(rounds):
            for stack in (fstack(Path(folder), 1), fstack(Path(folder), 0), SPINNING):
                print(f"turn {turn + 1}: {stack.name}", file=sys.stderr)
                measured.setdefault(stack.name, []).append(one(stack))
    record = {
        "what": "whole calls from Python, both ends polling",
        **report.machine(),
        "fstack": fstack_release,
        "dpdk": _said("pkg-config", "--modversion", "libdpdk"),
        "kernel": os.uname().release,
        "links": {name: "loopback TCP" if name == SPINNING.name else "memif" for name in measured},
        "rounds": rounds,
        "rows": rows(measured),
    }
    text = json.dumps(record, indent=2) + "\n"
    (out or today("fstack") / "calls.json").write_text(text)
    print(text, end="")


def one(stack: NetworkStack, share: float = 1.0) -> Times:
    """Times calls between a server and a client process on a stack: `share` of the numbers in `SIZES`."""
    with on_core(SERVER), services.ours(stack) as server:
        url, options = stack.connection(server.address, 0)
        # F-Stack starts once in a process: each turn needs a new client process.
        with ProcessPoolExecutor(1, get_context("spawn")) as client:
            return client.submit(measure, url, options, share).result()


def measure(url: str, options: dict[str, Any], share: float) -> Times:
    """Times the calls in the client process.

    Raises:
        AssertionError: The returned bytes differ from the stored ones.
    """
    os.sched_setaffinity(0, {CLIENT})
    times: Times = {}
    with innet.connect(url, **options) as replay:
        for size, count in SIZES.items():
            tensors = {"weights": np.random.default_rng(size).integers(0, 256, size, np.uint8)}
            count = max(2, int(share * count))
            warm = count // 10 + 1
            times["put", size] = _timed(lambda sent=tensors: replay.put_parameters(NAME, sent), warm, count)
            times["get", size] = _timed(lambda: replay.get_parameters(NAME), warm, count)
            got = replay.get_parameters(NAME)
            assert got is not None
            assert np.array_equal(got.tensors["weights"], tensors["weights"])
    return times


def rows(measured: dict[str, list[Times]]) -> list[dict[str, Any]]:
    """Returns a row for each call and size, with the fastest round of each stack: noise only adds time."""

    def best(stack: str, key: tuple[str, int], share: int) -> float:
        return round(min(float(np.percentile(times[key], share)) for times in measured[stack]), 2)

    told = []
    for key in next(iter(measured.values()))[0]:
        row: dict[str, Any] = {"call": f"{key[0]}_parameters", "bytes": key[1]}
        for stack in measured:
            p50 = best(stack, key, 50)
            row[stack] = {"p50_us": p50, "p99_us": best(stack, key, 99)}
            row[stack]["p50_lower_by"] = round(1 - p50 / best(SPINNING.name, key, 50), 4)
        told.append(row)
    return told


def _timed(call: Any, warm: int, count: int) -> list[float]:
    times = []
    for number in range(warm + count):
        begun = time.perf_counter_ns()
        call()
        if number >= warm:
            times.append((time.perf_counter_ns() - begun) / 1e3)
    return times


@contextmanager
def on_core(core: int) -> Iterator[None]:
    """Pins processes started in the context to a core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def fstack(folder: Path, segments: int) -> NetworkStack:
    """F-Stack at both ends of a memif, as in `cargo bench --bench transport`."""
    name = "fstack_segments" if segments else "fstack"
    configs = {}
    for role, core, host in (("server", SERVER, 2), ("client", CLIENT, 1)):
        configs[role] = folder / f"{name}-{role}.ini"
        configs[role].write_text(
            f"[dpdk]\nlcore_mask={1 << core:x}\nchannel=4\npromiscuous=1\nnuma_on=0\nno_huge=1\nmemory=256\n"
            f"file_prefix=calls-{os.getpid()}-{role}\nport_list=0\nnb_vdev=0\npkt_tx_delay=0\nidle_sleep=0\n"
            f"[port0]\naddr=10.8.0.{host}\nnetmask=255.255.255.0\nbroadcast=10.8.0.255\ngateway=10.8.0.254\n"
            "[freebsd.boot]\nhz=100\nfd_reserve=1024\nkern.ipc.maxsockets=262144\n"
            "[freebsd.sysctl]\nkern.ipc.maxsockbuf=16777216\n"
            f"[innet]\nmemif_segments = {segments}\neal = --no-pci\neal = --no-telemetry\n"
            f"eal = --vdev=net_memif0,role={role},id=0,mac=02:00:00:00:00:0{host},"
            f"socket={folder}/{name}.sock\n"
        )
    return NetworkStack(
        name,
        "memif",
        serve=("--stack", "fstack", "--stack-config", str(configs["server"]), "--trusted-network"),
        listen="innet://10.8.0.2:7711",
        scheme="innet+fstack",
        client_config=str(configs["client"]),
    )


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


if __name__ == "__main__":
    tyro.cli(calls, description=__doc__)
