"""Plain TCP, the machine's limit: blocks from two sockets into one buffer. Nothing is stored."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Iterator

import numpy as np

from benchmarks.systems import Address, free_port
from benchmarks.systems.queues import BATCH, LONGEST, Block, Trajectory, split

VERSION = "of the kernel"
KEEPS = False
PARTS = {"numbers": "i8", "offsets": "i8", "tokens": "i4", "log_probabilities": "f4"}


def store(size: int) -> tuple[Address, Callable[[], None]]:
    return ("127.0.0.1", free_port()), lambda: None


def produce(address: Address, source: Iterator[Block]) -> None:
    connection = socket.create_connection(address)
    for block in source:
        for name in PARTS:
            connection.sendall(block[name].data)


def consume(address: Address) -> Iterator[list[Trajectory]]:
    # It listens before the first batch is asked for.
    return _batches(socket.create_server(address))


def _batches(listener: socket.socket) -> Iterator[list[Trajectory]]:
    buffers = {name: np.zeros(BATCH * LONGEST, dtype) for name, dtype in PARTS.items()}
    for source in _ready([listener.accept()[0] for _ in range(2)]):
        counts, block = {"numbers": BATCH, "offsets": BATCH + 1}, Block()
        for name, buffer in buffers.items():
            block[name] = buffer[: counts.get(name) or int(block["offsets"][-1])]
            got = source.recv_into(block[name].data, flags=socket.MSG_WAITALL)
            assert got == block[name].nbytes, "a producer has left"
        yield split(block)


def _ready(sources: list[socket.socket]) -> Iterator[socket.socket]:
    """Sockets with a block; not in turn, since one producer may have taken all free places for its blocks."""
    while True:
        yield from select.select(sources, [], [])[0]
