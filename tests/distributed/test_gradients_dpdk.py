"""Workers on DPDK's devices from Python: what is said where the package has none, and sums over memif where it has."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from gradient_workers import gradient_server
from serving import SERVE

import innet_drl as innet
from innet_drl import errors
from innet_drl.gradients import Station

EAL = "--no-huge -m 256 --no-pci"

# DPDK starts once in a process and stays, so each worker has a process of its own. It keeps its end of the memif until
# both are done: DPDK may fault where the other end of a memif goes.
WORKER = """
import sys
sys.path.insert(0, "tests/helpers")
import innet_drl as innet
import numpy as np
from gradient_worker import expected, vector
address, socket, eal, worker = *sys.argv[1:4], int(sys.argv[4])
station = Station(
    f"net_memif0,role=client,id=0,socket={socket}", f"10.8.1.{2 + worker}:7711", eal=eal, idle_sleep_us=20
)
with innet.connect(address) as replay, replay.join_gradients("memif", worker, 2, station=station) as place:
    for seed in range(3):
        values = vector(worker, 40_000, seed)
        assert place.sum(values) == 2
        np.testing.assert_array_equal(values, expected(2, 40_000, seed))
    print(station, flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def memif_server(sockets: list[Path]) -> Iterator[str]:
    """An aggregator with one memif for each worker; where they join."""
    devices = [f"net_memif{number},role=server,id=0,socket={socket}" for number, socket in enumerate(sockets)]
    command = [*SERVE, "innet://127.0.0.1:0", "--gradients=10.8.1.1:7711", "--gradients-only"]
    command += ["--trusted-network", f"--gradients-eal={EAL}", "--gradients-idle-sleep-us=20"]
    command += [f"--gradients-devices={device}" for device in devices]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            yield next(word for word in line.split() if "://" in word).rstrip(",;")
        finally:
            server.terminate()


def refused(**options: Any) -> str:
    """What a worker is told that joins on a device that is not there, or without DPDK."""
    station = Station("net_nothing0", "10.8.1.2:7711", eal=EAL)
    with gradient_server() as address, innet.connect(address) as replay:
        with pytest.raises(errors.ConfigError) as raised:
            replay.join_gradients("job", 0, 1, station=station, **options)
        # No place was taken by it.
        assert replay.stats()["gradients"]["jobs"] == {}
        return str(raised.value)


def test_a_station_is_checked() -> None:
    station = Station("net_null0", "10.8.1.2:7711", prefix=16, gateway="10.8.0.1")
    assert repr(station) == "<Station 10.8.1.2:7711/16 on net_null0>"
    for address in ("10.8.1.2", "[::1]:7711", "here:1"):
        with pytest.raises(errors.ConfigError, match="IPv4 address"):
            Station("net_null0", address)
    with pytest.raises(errors.ConfigError, match="gateway is an IPv4 address"):
        Station("net_null0", "10.8.1.2:7711", gateway="the way out")
    assert "leave one of them out" in refused(via="127.0.0.1:7711")


def test_what_is_missing_is_named() -> None:
    # A process of its own: where the package has DPDK, it starts.
    ask = "import sys; sys.path[:0] = ['tests/distributed', 'tests/helpers']; import test_gradients_dpdk as dpdk"
    ask += "; print(dpdk.refused())"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert "built without DPDK" in done.stdout or "net_nothing0" in done.stdout, done.stdout
    if "built without DPDK" in done.stdout:
        assert "cargo feature `dpdk`" in done.stdout


def test_workers_sum_over_memif(tmp_path: Path) -> None:
    if "built without DPDK" in refused():
        pytest.skip("the package was built without the cargo feature dpdk")
    sockets = [tmp_path / f"{worker}.sock" for worker in range(2)]
    with memif_server(sockets) as address, contextlib.ExitStack() as stack:
        workers = []
        for worker, socket in enumerate(sockets):
            command = [sys.executable, "-c", WORKER, address, str(socket), EAL, str(worker)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            workers.append(stack.enter_context(process))
        for worker, process in enumerate(workers):
            assert process.stdout is not None
            assert f"10.8.1.{2 + worker}:7711/24 on net_memif0,role=client" in process.stdout.readline()
