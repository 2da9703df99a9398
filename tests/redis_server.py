"""A real redis-server for tests, on a port of its own."""

import contextlib
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A redis-server that keeps nothing on the disk; its process is killed at the end."""
    command = shutil.which("redis-server")
    if command is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    arguments = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", *options]
    process = subprocess.Popen([command, *arguments], stdout=subprocess.DEVNULL)
    try:
        _wait(port, process)
        yield process
    finally:
        process.kill()
        process.wait()


def _wait(port: int, process: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 30
    while time.monotonic() < give_up:
        assert process.poll() is None, f"redis-server ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
    raise TimeoutError(f"no redis-server at port {port}")
