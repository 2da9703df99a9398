"""Redis 7 without persistence: a stream whose consumer group acknowledges and deletes what it has read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import redis

from benchmarks.services import start_redis
from benchmarks.systems import Address, free_port
from benchmarks.systems.queues import BATCH, Block, Trajectory, split
from innet_drl.redis import client as redis_client

VERSION = f"Redis 7, redis-py {redis.__version__}"
STREAM, GROUP = "trajectories", "learner"
PIPELINE = 8
"""Trajectories sent at once; 1 and 64 were slower."""


def store(size: int) -> tuple[Address, Callable[[], None]]:
    address = ("127.0.0.1", free_port())
    process = start_redis(address[1])
    _connect(address).xgroup_create(STREAM, GROUP, "0", mkstream=True)
    return address, process.terminate


def produce(address: Address, source: Iterator[Block]) -> None:
    pipeline = _connect(address).pipeline(transaction=False)
    for block in source:
        for place, (number, *arrays) in enumerate(split(block), 1):
            tokens, log_probabilities = (each.data.cast("B") for each in arrays)
            pipeline.xadd(STREAM, {"number": number, "tokens": tokens, "log_probabilities": log_probabilities})
            if place % PIPELINE == 0:
                pipeline.execute()


def consume(address: Address) -> Iterator[list[Trajectory]]:
    client = _connect(address)
    while True:
        entries: list[Any] = []
        while lacks := BATCH - len(entries):
            for _, more in client.xreadgroup(GROUP, "0", {STREAM: ">"}, count=lacks, block=1_000):
                entries += more
        ids = [name for name, _ in entries]
        client.pipeline(transaction=False).xack(STREAM, GROUP, *ids).xdel(STREAM, *ids).execute()
        rows = [each.values() for _, each in entries]
        yield [(int(number), np.frombuffer(t, np.int32), np.frombuffer(l, np.float32)) for number, t, l in rows]


def _connect(address: Address) -> Any:
    return redis_client.connect("redis://{}:{}".format(*address), protocol=2)
