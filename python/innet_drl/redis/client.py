"""Redis for all comparisons: a client with the fastest settings, and a server without persistence.

Needs the extra `redis`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from typing import Any

from redis.connection import Encoder, PythonRespSerializer

import redis

ANSWER_SECONDS = 60.0
"""Timeout of a command."""
READ_BYTES = 1 << 18
"""Bytes received at a time. Values of megabytes took 10 % longer with redis-py's default of 64 KiB."""
START_SECONDS = 60.0


def connect(address: str, password: str = "", *, hiredis_packs: bool = False, **options: Any) -> redis.Redis:
    """Makes a client.

    Args:
        address: `redis://host:port`.
        password: Password of the Redis; empty for none.
        hiredis_packs: Whether hiredis encodes commands, the default of redis-py if it is installed. It copies each
            value, so that a push of 45 MB takes twice as long.
        options: Further arguments of redis-py.
    """
    if not hiredis_packs:
        options["command_packer"] = PythonRespSerializer(6_000, Encoder("utf-8", "strict", False).encode)
    # No retries: a push with a lost answer would be inserted twice.
    retry = redis.retry.Retry(redis.backoff.NoBackoff(), 0)
    defaults = {"socket_timeout": ANSWER_SECONDS, "socket_read_size": READ_BYTES, "retry": retry}
    return redis.Redis.from_url(address, password=password or None, **{**defaults, **options})


def start_server(port: int, *options: str) -> subprocess.Popen[bytes]:
    """Starts a Redis without persistence on loopback, and waits until it accepts connections or has ended.

    Raises:
        FileNotFoundError: redis-server is not installed.
    """
    flags = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--appendonly", "no", "--loglevel", "warning"]
    process = subprocess.Popen(["redis-server", *flags, *options], stdout=subprocess.DEVNULL)
    give_up = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            break
        time.sleep(0.01)
    return process
