"""A real redis-server for tests, on a port of its own."""

import contextlib
import shutil
import subprocess
from collections.abc import Iterator

import pytest

from benchmarks.services import start_redis


@contextlib.contextmanager
def running(port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A redis-server that keeps nothing on the disk; its process is killed at the end."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt install redis-server)")
    process = start_redis(port, *options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
