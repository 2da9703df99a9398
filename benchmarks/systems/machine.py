"""What the machine can do at best: the limits that results are set beside. Needs `lz4`, of the peers' environment."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable
from typing import Any

import lz4.block
import numpy as np

from benchmarks import recording
from benchmarks.tasks import PARAMETERS

BATCH = 512
WINDOW = recording.STACK + recording.N
"""Frames of one transition."""

VERSION = f"NumPy {np.__version__}, lz4 {lz4.__version__}"

Limit = tuple[Callable[[], Any], int]
"""A call, and how much it does."""


def memory_copy() -> Limit:
    """The parameters from one buffer into another."""
    source = np.random.default_rng(0).random(PARAMETERS, np.float32)
    target = np.empty_like(source)
    return lambda: np.copyto(target, source), 1


def frame_copy() -> Limit:
    """The frame of each transition, copied once."""
    frames = recording.load().columns["frame"].reshape(-1, 84, 84)
    target = np.empty_like(frames[:50])
    begins = iter(functools.partial(np.random.default_rng(0).integers, 0, len(frames) - 50), -1)

    def copy() -> None:
        begin = next(begins)
        np.copyto(target, frames[begin : begin + 50])

    return copy, 50


def window_copy() -> Limit:
    """The frames of a batch's windows, on one core."""
    frames = recording.load().columns["frame"].reshape(-1, 84, 84)
    target = np.empty((BATCH, WINDOW, 84, 84), np.uint8)
    random = np.random.default_rng(0)

    def copy() -> None:
        for place, begin in enumerate(random.integers(0, len(frames) - WINDOW, BATCH).tolist()):
            target[place] = frames[begin : begin + WINDOW]

    return copy, 1


def random_access(items: int = 1 << 20) -> Limit:
    """Reads and rewrites a batch of 8-byte words somewhere in as many as a tree has leaves."""
    words = np.ones(items)
    places = np.random.default_rng(0).integers(0, items, (1024, BATCH))
    turn = iter(functools.partial(np.random.default_rng(1).integers, 0, len(places)), -1)

    def access() -> None:
        place = places[next(turn)]
        words[place] = words[place] + 1.0

    return access, 1


def _compressed() -> list[bytes]:
    frames = recording.load().columns["frame"]
    return [lz4.block.compress(frame.tobytes(), store_size=False) for frame in frames[:500].reshape(-1, 84, 84)]


def lz4_compress() -> Limit:
    """One frame for each transition, on one core."""
    frames = [frame.tobytes() for frame in recording.load().columns["frame"][:500].reshape(-1, 84, 84)]
    chunks = iter(functools.partial(np.random.default_rng(0).integers, 0, len(frames) - 50), -1)

    def compress() -> None:
        begin = next(chunks)
        for frame in frames[begin : begin + 50]:
            lz4.block.compress(frame, store_size=False)

    return compress, 50


def lz4_decompress() -> Limit:
    """The frames of a batch's windows, on one core, into memory that is new each time."""
    blobs = _compressed()
    random = np.random.default_rng(0)

    def decompress() -> None:
        for begin in random.integers(0, len(blobs) - WINDOW, BATCH).tolist():
            for blob in blobs[begin : begin + WINDOW]:
                lz4.block.decompress(blob, uncompressed_size=84 * 84)

    return decompress, 1


def tcp() -> Limit:
    """The parameters over loopback TCP, as `Store.get` does."""
    return _transfer(socket.AF_INET), 1


def unix_socket() -> Limit:
    """The parameters over a pair of Unix sockets."""
    return _transfer(socket.AF_UNIX), 1


LIMITS: dict[str, Callable[[], Limit]] = {
    each.__name__.replace("_", " "): each
    for each in (memory_copy, frame_copy, window_copy, random_access, lz4_compress, lz4_decompress, tcp, unix_socket)
}


def _transfer(family: socket.AddressFamily) -> Callable[[], None]:
    """One byte there, as many bytes as the parameters have back, into a buffer that is used again."""
    payload = np.random.default_rng(0).random(PARAMETERS, np.float32).data.cast("B")
    near, far = _pair(family)
    buffer = memoryview(bytearray(len(payload)))

    def answer() -> None:
        while far.recv(1):
            far.sendall(payload)

    def transfer() -> None:
        near.sendall(b"?")
        have = 0
        while have < len(payload):
            have += near.recv_into(buffer[have:])

    threading.Thread(target=answer, daemon=True).start()
    return transfer


def _pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far
