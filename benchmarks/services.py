"""Servers of the papers' evaluations, each in a process of its own, and the network stacks that lead to them."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from serving import Server

from benchmarks.gradients.links import within
from benchmarks.systems import free_port, wait_for
from innet_drl.errors import MissingExtraError, naming_extras

MAX_BYTES = "10GiB"
MAX_FRAME_BYTES = "1GiB"
"""Frame limit: a batch of 512 in the paper's format has 116 MB, four messages 181 MB."""


@dataclass(frozen=True)
class NetworkStack:
    """The network stack between two processes."""

    name: str
    link: str
    """Link under the stack: loopback, veth, memif, NIC."""
    serve: tuple[str, ...] = ()
    """Flags of `innet-replay serve`."""
    listen: str = "innet://127.0.0.1:0"
    """Address that the server listens on."""
    scheme: str = "innet"
    """Scheme of the address that clients connect to."""
    spin: bool = False
    """Clients poll for answers without sleeping."""
    client_config: str = ""
    """F-Stack's configuration file of a client; `{index}` in its name is the client's number, 0 for the learner."""

    def connection(self, address: str, client: int) -> tuple[str, dict[str, Any]]:
        """Returns URL and options of `innet.connect` for one client."""
        options: dict[str, Any] = {"spin": True} if self.spin else {}
        if self.client_config:
            options["config"] = self.client_config.format(index=client)
        return address.replace("innet://", f"{self.scheme}://", 1), options


KERNEL = NetworkStack("kernel", "loopback")
SPINNING = NetworkStack("kernel-spin", "loopback", serve=("--spin",), spin=True)


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


def start_redis(port: int, *options: str) -> subprocess.Popen[bytes]:
    """Starts a Redis without persistence on loopback, and waits until it accepts connections.

    Raises:
        FileNotFoundError: redis-server is not installed.
        AssertionError: It has ended.
    """
    flags = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
    # Ctrl-C is the command's alone, which ends Redis.
    process = subprocess.Popen(["redis-server", *flags, *options], stdout=subprocess.DEVNULL, start_new_session=True)
    wait_for(("127.0.0.1", port), process)
    return process


@contextlib.contextmanager
def redis(named: str | None) -> Iterator[tuple[str, str]]:
    """Starts a Redis without persistence, or connects to the given one, and removes the benchmark's keys.

    Args:
        named: URL of a running Redis, or `None` to start one.

    Yields:
        Its URL and its release.
    """
    from innet_drl.redis import client
    from innet_drl.redis.store import RedisStore

    with contextlib.ExitStack() as running:
        if named is None:
            port = free_port()
            process = running.enter_context(start_redis(port))
            running.callback(process.terminate)
            named = f"redis://127.0.0.1:{port}"
        keys = running.enter_context(contextlib.closing(RedisStore(named, "bench", "", {})))
        keys.clear()
        running.callback(keys.clear)
        with client.connect(named) as asked:
            release = asked.info("server")["redis_version"]
        yield named, release


@contextlib.contextmanager
def serving(listen: str, *flags: str, namespace: str | None = None) -> Iterator[Server]:
    """Runs `innet-replay serve`.

    Args:
        listen: Its address.
        flags: More flags.
        namespace: Network namespace of the server; `None` for the current one.

    Raises:
        AssertionError: The server did not start, and printed why.
    """
    # Ctrl-C is the command's alone, which ends the server.
    with Server(listen, "--log-level=error", *flags, inside=["setsid", *within(namespace)]) as server:
        yield server
        # A killed DPDK leaves its files.
        server.send(signal.SIGTERM)
        server.wait()


def ours(stack: NetworkStack) -> contextlib.AbstractContextManager[Server]:
    """Runs a replay memory on a network stack."""
    return serving(stack.listen, f"--max-bytes={MAX_BYTES}", f"--max-frame-bytes={MAX_FRAME_BYTES}", *stack.serve)


def aggregator(namespace: str | None, *flags: str) -> contextlib.AbstractContextManager[Server]:
    """Runs a server that sums gradients; in a network namespace it listens on all addresses."""
    host = "127.0.0.1" if namespace is None else "0.0.0.0"
    gradients = f"--gradients={host}:{free_port(socket.SOCK_DGRAM)}"
    return serving(f"innet://{host}:0", gradients, "--trusted-network", *flags, namespace=namespace)
