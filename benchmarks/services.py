"""Servers of the benchmarks, each in a process of its own."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gradients.links import within
from benchmarks.paper.settings import NetworkStack
from innet_drl.errors import MissingExtraError
from innet_drl.extras import naming_extras
from innet_drl.gradients import Station

MAX_BYTES = "10GiB"
MAX_FRAME_BYTES = "1GiB"
"""Frame limit: a batch of 512 in the paper's format has 116 MB, four messages 181 MB."""
START_SECONDS = 60.0
MEMIF_EAL = "--no-huge -m 128 --no-pci"
MEMIF_SLEEP_US = 1
"""Sleep of idle polling threads: workers and the aggregator outnumber the cores."""


def why_not_redis(named: str | None) -> str | None:
    """Returns the reason why Redis cannot be measured; `None` if it can."""
    try:
        with naming_extras():
            import lz4.block  # noqa: F401

            import redis  # noqa: F401
    except MissingExtraError as error:
        return str(error)
    if named is None and shutil.which("redis-server") is None:
        return "redis-server is not installed (Debian: apt install redis-server), and --redis names none"
    return None


@contextlib.contextmanager
def redis(named: str | None, versions: dict[str, str | None]) -> Iterator[str]:
    """Starts a Redis without persistence, or connects to the given one, and removes the benchmark's keys.

    Args:
        named: URL of a running Redis, or `None` to start one.
        versions: Receives the release of the Redis.
    """
    from innet_drl.redis.store import RedisStore

    with contextlib.ExitStack() as running:
        address = named or running.enter_context(_redis_server())
        keys = running.enter_context(contextlib.closing(RedisStore(address, "bench", "", {})))
        keys.clear()
        versions["redis"] = keys.version()
        try:
            yield address
        finally:
            keys.clear()


@contextlib.contextmanager
def _redis_server() -> Iterator[str]:
    from innet_drl.redis.client import start_server

    port = free_port()
    with _ending(start_server(port)):
        yield f"redis://127.0.0.1:{port}"


@contextlib.contextmanager
def ours(stack: NetworkStack) -> Iterator[str]:
    """Starts `innet-replay serve` on a network stack.

    Raises:
        SystemExit: The server did not start; the message is its last line of output.
    """
    sizes = ["--max-bytes", MAX_BYTES, "--max-frame-bytes", MAX_FRAME_BYTES]
    with _serve("--listen", stack.listen, *sizes, *stack.serve) as (address, _):
        yield address


@dataclass(frozen=True)
class Aggregator:
    """A server that sums gradients."""

    address: str
    """Its URL."""
    process: subprocess.Popen[str]

    def lose(self, share: float | None) -> None:
        """Makes it drop a share of received datagrams; see `losses.lose`.

        Raises:
            SystemExit: The server has ended.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            print(share, file=self.process.stdin, flush=True)
        if not self.process.stdout.readline():
            raise SystemExit("the server that sums gradients has ended")


@contextlib.contextmanager
def aggregator(namespace: str | None = None) -> Iterator[Aggregator]:
    """Starts `innet-replay serve --gradients`.

    Args:
        namespace: Network namespace of the server, which listens on all of its addresses; `None` for loopback.

    Raises:
        SystemExit: The server did not start; the message is its last line of output.
    """
    host = "127.0.0.1" if namespace is None else "0.0.0.0"
    gradients = f"{host}:{free_port(socket.SOCK_DGRAM)}"
    flags = ["--listen", f"innet://{host}:0", "--gradients", gradients, "--trusted-network"]
    with _serve(*flags, namespace=namespace, module="benchmarks.gradients.losses") as (address, process):
        yield Aggregator(address, process)


@dataclass(frozen=True)
class Memifs:
    """An aggregator on DPDK's memif, with a device for each worker."""

    server: str
    """URL of the server."""
    sockets: list[str]
    """Socket paths of the workers' devices."""
    process: int

    def station(self, rank: int) -> Station:
        """The DPDK station of worker `rank`."""
        device = f"net_memif0,role=client,id=0,socket={self.sockets[rank]}"
        return Station(device, f"10.8.1.{2 + rank}:7711", eal=MEMIF_EAL, idle_sleep_us=MEMIF_SLEEP_US)


@contextlib.contextmanager
def memif_aggregator(folder: Path, workers: int) -> Iterator[Memifs]:
    """Starts `innet-replay serve --gradients-devices` on one memif for each worker, with their sockets in a folder.

    Raises:
        SystemExit: The server did not start; the message is its last line of output.
    """
    sockets = [str(folder / f"memif{rank}.sock") for rank in range(workers)]
    flags = ["--listen", "innet://127.0.0.1:0", "--gradients-only", "--trusted-network", "--gradients", "10.8.1.1:7711"]
    memory = 128 + 32 * workers
    flags += [f"--gradients-eal=--no-huge -m {memory} --no-pci", f"--gradients-idle-sleep-us={MEMIF_SLEEP_US}"]
    for number, path in enumerate(sockets):
        flags += ["--gradients-devices", f"net_memif{number},role=server,id=0,socket={path}"]
    with _serve(*flags) as (address, process):
        yield Memifs(address, sockets, process.pid)


@contextlib.contextmanager
def _serve(
    *flags: str, namespace: str | None = None, module: str = "innet_drl.server_cli"
) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [*within(namespace), sys.executable, "-c", f"from {module} import main; main()", "serve"]
    flags = ("--log-level", "error", *flags)
    pipe = subprocess.PIPE
    process = subprocess.Popen([*command, *flags], text=True, stdin=pipe, stdout=pipe, stderr=pipe)
    with _ending(process):
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        if " ready on " not in line:
            said = process.stderr.read().strip().splitlines()
            raise SystemExit(said[-1] if said else "innet-replay serve did not start")
        yield line.split(" ready on ")[1].split()[0], process


@contextlib.contextmanager
def _ending(process: subprocess.Popen[Any]) -> Iterator[None]:
    """Ends the process."""
    with process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(START_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    """Returns a free port of this machine."""
    with socket.socket(socket.AF_INET, kind) as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port
