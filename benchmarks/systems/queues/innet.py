"""This project: a queue with ragged columns on a server, read by acknowledged batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import innet_drl as innet
from benchmarks.systems.innet import VERSION as VERSION
from benchmarks.systems.innet import start, url
from benchmarks.systems.queues import BATCH, Block, Trajectory

VIEW = innet.Window(0, 0)
RAGGED = {"tokens": innet.Column("int32", (None,)), "log_probabilities": innet.Column("float32", (None,))}


def store(size: int) -> tuple[str, Callable[[], None]]:
    address, process = start()
    with innet.connect(url(address), tables=[innet.Table.queue("rollouts", {"numbers": "int64", **RAGGED}, size)]):
        return url(address), process.terminate


def produce(address: str, source: Iterator[Block]) -> None:
    writer = innet.connect(address).writer("rollouts", 1, VIEW, chunk_steps=BATCH)
    ends = np.zeros((BATCH, 1), bool)
    for block in source:
        ragged: dict[str, Any] = {name: innet.Ragged(block[name], block["offsets"]) for name in RAGGED}
        writer.extend(numbers=block["numbers"][:, None], **ragged, terminated=ends, truncated=ends, timeout=None)


def consume(address: str) -> Iterator[list[Trajectory]]:
    # One thread copies the values: the cores are shared with the producers.
    for batch in innet.connect(address).batches("rollouts", BATCH, VIEW, acknowledge=True, threads=1):
        # Each window has one row: the outer of the two levels says nothing.
        arrays = (getattr(batch, name).values for name in RAGGED)
        found = list(zip(batch.numbers[:, 0].tolist(), *arrays, strict=True))
        batch.acknowledge()
        yield found
