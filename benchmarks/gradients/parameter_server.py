"""A parameter server over TCP, the baseline of `python -m benchmarks gradients`.

Each worker sends its vector and receives the sum. A message is a length in bytes (u64) and float32 values,
little-endian. The kernel's copies and NumPy's additions take all of the time: a server in Rust was no faster
(docs/explanation/decisions.md).
"""

from __future__ import annotations

import os
import socket
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADER = 8
"""Bytes of a message before its values."""
PIECE = 128 << 10
"""Bytes received at a time; a piece fits the cache for the addition."""


def serve(workers: int, max_bytes: int, host: str, pipe: Connection) -> None:
    """The main function of the server's process: sends its address and process id, then sums until a worker leaves."""
    with socket.create_server((host, 0)) as listener:
        pipe.send(("{}:{}".format(*listener.getsockname()), os.getpid()))
        connections = [_without_delay(listener.accept()[0]) for _ in range(workers)]
    message, piece = memoryview(bytearray(HEADER + max_bytes)), np.empty(PIECE // 4, np.float32)
    try:
        while True:
            size = _sum(connections, message, piece)
            for connection in connections:
                connection.sendall(message[: HEADER + size])
    except EOFError:
        return


def _sum(connections: list[socket.socket], message: memoryview, piece: NDArray[np.float32]) -> int:
    """Receives the vectors, adds them up in `message`, and returns their size in bytes."""
    first, *others = connections
    _receive(first, message[:HEADER])
    header = bytes(message[:HEADER])
    size = int.from_bytes(header, "little")
    if size > len(message) - HEADER or size % 4:
        raise SystemExit(f"a vector of {size} bytes: at most {len(message) - HEADER}, of 4 each")
    # Socket buffers receive the other vectors meanwhile.
    total = np.frombuffer(message, np.float32, size // 4, HEADER)
    _receive(first, total)
    for connection in others:
        received = bytearray(HEADER)
        _receive(connection, received)
        if received != header:
            raise SystemExit(f"vectors of {size} and {int.from_bytes(received, 'little')} bytes")
        for begin in range(0, len(total), len(piece)):
            part = total[begin : begin + len(piece)]
            _receive(connection, piece[: len(part)])
            part += piece[: len(part)]
    return size


class ParameterWorker:
    """A worker's connection to the server at `address`."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = _without_delay(socket.create_connection((host, int(port))))

    def sum(self, values: NDArray[np.float32]) -> None:
        """Replaces the values by their sum over all workers."""
        self._connection.sendall(values.nbytes.to_bytes(HEADER, "little"), socket.MSG_MORE)
        self._connection.sendall(values.data)
        _receive(self._connection, bytearray(HEADER))
        _receive(self._connection, values)

    def close(self) -> None:
        """Ends the connection."""
        self._connection.close()


def _without_delay(connection: socket.socket) -> socket.socket:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(connection: socket.socket, into: Any) -> None:
    """Fills a buffer.

    Raises:
        EOFError: The other end has left.
    """
    rest = memoryview(into).cast("B")
    while rest:
        count = connection.recv_into(rest, flags=socket.MSG_WAITALL)
        if not count:
            raise EOFError("the other end of a connection has left")
        rest = rest[count:]
