"""Ray's object store: a block is an object, whose reference a queue actor passes. An object a trajectory was slower."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

# Read when Ray is imported: it stays on 127.0.0.1, and reports no use.
os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

import ray
from ray.util.queue import Queue

from benchmarks.systems.queues import BATCH, Block, Trajectory, split

VERSION = f"Ray {ray.__version__}"
QUEUE = "queue"


def start() -> str:
    """Starts Ray, and returns its address."""
    ray.init("local", num_cpus=4, namespace=QUEUE, include_dashboard=False, object_store_memory=2 << 30)
    return str(ray.get_runtime_context().gcs_address)


def join(address: str) -> None:
    """Connects this process to Ray."""
    ray.init(address, namespace=QUEUE, log_to_driver=False)
    # Ray's handler would print a stack.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def store(size: int) -> tuple[str, Callable[[], None]]:
    address = start()
    actor = Queue(size // BATCH, actor_options={"name": QUEUE, "num_cpus": 0})
    return address, actor.shutdown


def produce(address: str, source: Iterator[Block]) -> None:
    join(address)
    queue = ray.get_actor(QUEUE)
    for block in source:
        # In a list a reference is passed on; alone its object would be.
        ray.get(queue.put.remote([ray.put(block)], None))


def consume(address: str) -> Iterator[list[Trajectory]]:
    join(address)
    queue = ray.get_actor(QUEUE)
    while True:
        yield split(ray.get(ray.get(queue.get.remote(None))[0]))
