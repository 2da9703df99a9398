"""A client of Redis with the fastest settings, for runs and for all comparisons.

Needs the extra `redis`.
"""

from __future__ import annotations

from typing import Any

import redis
from redis.connection import Encoder, PythonRespSerializer

ANSWER_SECONDS = 60.0
"""Timeout of a command."""
READ_BYTES = 1 << 18
"""Bytes received at a time. Values of megabytes took 10 % longer with redis-py's default of 64 KiB."""


def connect(address: str, password: str = "", **options: Any) -> redis.Redis:
    """Makes a client of `redis://host:port`. Options are arguments of redis-py, in place of the fastest ones."""
    defaults = {
        "socket_timeout": ANSWER_SECONDS,
        "socket_read_size": READ_BYTES,
        # hiredis, the default where it is installed, copies each value: a push of 45 MB takes twice as long.
        "command_packer": PythonRespSerializer(6_000, Encoder("utf-8", "strict", False).encode),
        # No retries: a push with a lost answer would be inserted twice.
        "retry": redis.retry.Retry(redis.backoff.NoBackoff(), 0),
    }
    return redis.Redis.from_url(address, password=password or None, **{**defaults, **options})
