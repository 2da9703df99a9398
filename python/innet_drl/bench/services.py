"""The servers that are measured, each in a process of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import innet_drl as innet
from innet_drl.bench.crew import BenchError
from innet_drl.bench.links import within
from innet_drl.bench.settings import Stack

MAX_BYTES = "10GiB"
MAX_FRAME_BYTES = "1GiB"
"""A batch of 512 in the paper's format has 116 MB, four messages have 181."""
START_SECONDS = 60.0
MEMIF_EAL = "--no-huge -m 128 --no-pci"
MEMIF_SLEEP_US = 1
"""Workers and the aggregator share fewer cores than they are: who waits lets another one run."""


def why_not_redis(named: str | None) -> str | None:
    """Why there is no Redis to measure; `None` where there is one."""
    try:
        import lz4.block  # noqa: F401
        import redis  # noqa: F401
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: pip install 'innet-drl[redis]'"
    if named is None and shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: apt install redis-server), and --redis names none"
    return None


@contextlib.contextmanager
def redis(named: str | None, versions: dict[str, str | None]) -> Iterator[str]:
    """A Redis without anything on the disk, or the one that was named; the keys of the benchmark are removed.

    Args:
        named: Its URL, or `None` to start one.
        versions: Gets its release.
    """
    from innet_drl.bench.redis_memory import RedisMemory

    with contextlib.ExitStack() as running:
        address = named or running.enter_context(_redis_server())
        keys = running.enter_context(contextlib.closing(RedisMemory(address, "bench", "", {})))
        keys.clear()
        versions["redis"] = keys.version()
        try:
            yield address
        finally:
            keys.clear()


@contextlib.contextmanager
def _redis_server() -> Iterator[str]:
    port = _free_port()
    flags = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
    with _process(["redis-server", *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        give_up = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < give_up:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.01)
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def ours(stack: Stack) -> Iterator[str]:
    """`innet-replay serve` on a stack.

    Raises:
        BenchError: It did not start; the message is what it said.
    """
    sizes = ["--max-bytes", MAX_BYTES, "--max-frame-bytes", MAX_FRAME_BYTES]
    with _serve("--listen", stack.listen, *sizes, *stack.serve) as (address, _):
        yield address


@contextlib.contextmanager
def aggregator(namespace: str | None = None) -> Iterator[tuple[str, str, int]]:
    """`innet-replay serve --gradients`: its URL, where it takes datagrams, and its process.

    Args:
        namespace: The network namespace that it is in, at all of its addresses; `None` for loopback.

    Raises:
        BenchError: It did not start; the message is what it said.
    """
    host = "127.0.0.1" if namespace is None else "0.0.0.0"
    gradients = f"{host}:{_free_port(socket.SOCK_DGRAM)}"
    flags = ["--listen", f"innet://{host}:0", "--gradients", gradients, "--trusted-network"]
    with _serve(*flags, namespace=namespace) as (address, process):
        yield address, gradients, process


@dataclass(frozen=True)
class Memifs:
    """An aggregator on DPDK's memif, with a device for each worker."""

    server: str
    """URL of the server."""
    sockets: list[str]
    """Of the workers' devices."""
    process: int

    def station(self, rank: int) -> innet.Station:
        """The end of worker `rank`."""
        device = f"net_memif0,role=client,id=0,socket={self.sockets[rank]}"
        return innet.Station(device, f"10.8.1.{2 + rank}:7711", eal=MEMIF_EAL, idle_sleep_us=MEMIF_SLEEP_US)


@contextlib.contextmanager
def memif_aggregator(folder: Path, workers: int) -> Iterator[Memifs]:
    """`innet-replay serve --gradients-devices` on so many memifs, whose sockets are in a folder.

    Raises:
        BenchError: It did not start; the message is what it said.
    """
    sockets = [str(folder / f"memif{rank}.sock") for rank in range(workers)]
    flags = ["--listen", "innet://127.0.0.1:0", "--gradients-only", "--trusted-network", "--gradients", "10.8.1.1:7711"]
    memory = 128 + 32 * workers
    flags += [f"--gradients-eal=--no-huge -m {memory} --no-pci", f"--gradients-idle-sleep-us={MEMIF_SLEEP_US}"]
    for number, path in enumerate(sockets):
        flags += ["--gradients-devices", f"net_memif{number},role=server,id=0,socket={path}"]
    with _serve(*flags) as (address, process):
        yield Memifs(address, sockets, process)


@contextlib.contextmanager
def _serve(*flags: str, namespace: str | None = None) -> Iterator[tuple[str, int]]:
    command = [
        *within(namespace),
        sys.executable,
        "-c",
        "from innet_drl.server_cli import main; main()",
        "serve",
        "--log-level",
        "error",
    ]
    with _process([*command, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if " ready on " not in line:
            said = process.stderr.read().strip().splitlines()
            raise BenchError(said[-1] if said else "innet-replay serve did not start")
        yield line.split(" ready on ")[1].split()[0], process.pid


@contextlib.contextmanager
def _process(command: list[str], **pipes: int) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def _free_port(kind: int = socket.SOCK_STREAM) -> int:
    with socket.socket(socket.AF_INET, kind) as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
