"""The machine's limits, for comparison with measured results. Needs `lz4` of the peers' environment."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import lz4.block
import numpy as np
from numpy.typing import NDArray

from benchmarks import recording
from benchmarks.clients import PUSH
from benchmarks.tasks import PARAMETERS

BATCH = 512
WINDOW = recording.STACK + recording.N
"""Frames of one transition."""

VERSION = f"NumPy {np.__version__}, lz4 {lz4.__version__}"

SIDE = 84
Copy = Callable[[], Any]


@dataclass(frozen=True)
class Limit:
    """A timed call and its check."""

    call: Copy
    check: Callable[[], None]
    """Raises an `AssertionError` unless a call has its described effect."""
    count: int = 1
    """Units counted by one call."""


def memory_copy() -> Limit:
    """Copies the parameters from one buffer to another."""
    source = np.random.default_rng(0).random(PARAMETERS, np.float32)
    target = np.zeros_like(source)

    def copy() -> None:
        np.copyto(target, source)

    def check() -> None:
        target.fill(0)
        copy()
        assert np.array_equal(target, source), "the copy differs"

    return Limit(copy, check)


def frame_copy(threads: int = 1, times: int = 1) -> Limit:
    """Copies the frames of a push's transitions, `times` times in each of `threads` threads."""
    frames = recording.load().columns["frame"].reshape(-1, SIDE, SIDE)
    targets = np.zeros((threads, PUSH, SIDE, SIDE), np.uint8)
    random = np.random.default_rng(0)
    begins: list[list[int]] = []

    def copy_to(target: NDArray[np.uint8], places: list[int]) -> None:
        for begin in places:
            np.copyto(target, frames[begin : begin + PUSH])

    share = _together(threads, copy_to)

    def copy() -> None:
        begins[:] = random.integers(0, len(frames) - PUSH, (threads, times)).tolist()
        share(targets, begins)

    def check() -> None:
        targets.fill(0)
        copy()
        for target, (*_, begin) in zip(targets, begins, strict=True):
            assert np.array_equal(target, frames[begin : begin + PUSH]), "the copy differs"

    return Limit(copy, check, threads * times * PUSH)


def window_write(threads: int = 2) -> Limit:
    """Writes the array of a batch's windows once, from a frame in the cache."""
    frame = recording.load().columns["frame"][-2, 0].reshape(-1)
    target = np.zeros((BATCH * WINDOW, SIDE * SIDE), np.uint8)
    parts = np.array_split(target, threads)
    share = _together(threads, np.copyto)

    def write() -> None:
        share(parts, [frame] * threads)

    def check() -> None:
        target.fill(0)
        write()
        assert (target == frame).all(), "the written bytes differ"

    return Limit(write, check)


def random_access(items: int = 1 << 20) -> Limit:
    """Reads and rewrites a batch of random 8-byte words in an array as long as a tree's leaves."""
    words = np.ones(items)
    places = np.random.default_rng(0).integers(0, items, (1024, BATCH))
    turn = iter(functools.partial(np.random.default_rng(1).integers, 0, len(places)), -1)

    def access() -> None:
        place = places[next(turn)]
        words[place] = words[place] + 1.0

    def check() -> None:
        before = words.copy()
        access()
        changed = np.flatnonzero(words != before)
        assert 0.99 * BATCH < len(changed) <= BATCH, f"{len(changed)} words changed"
        assert (words[changed] == before[changed] + 1.0).all(), "a word was not rewritten"

    return Limit(access, check)


def _together(threads: int, call: Callable[[Any, Any], None]) -> Callable[[Iterable[Any], Iterable[Any]], None]:
    """Returns a function that calls with pairs of two lists in threads: NumPy releases the GIL while it copies."""
    if threads == 1:
        return lambda *arguments: call(*(next(iter(each)) for each in arguments))
    pool = ThreadPoolExecutor(threads)
    return lambda *arguments: [*pool.map(call, *arguments)].clear()


def _frames() -> list[bytes]:
    return [frame.tobytes() for frame in recording.load().columns["frame"][:500].reshape(-1, SIDE, SIDE)]


def lz4_compress() -> Limit:
    """Compresses one frame for each transition, on one core."""
    frames = _frames()
    begins = iter(functools.partial(np.random.default_rng(0).integers, 0, len(frames) - PUSH), -1)

    def compress() -> list[bytes]:
        begin = next(begins)
        return [lz4.block.compress(frame, store_size=False) for frame in frames[begin : begin + PUSH]]

    def check() -> None:
        packed = compress()
        assert len(packed) == PUSH, f"{len(packed)} frames were packed"
        for each in packed:
            assert lz4.block.decompress(each, uncompressed_size=SIDE * SIDE) in frames, "a frame differs"

    return Limit(compress, check, PUSH)


def lz4_decompress() -> Limit:
    """Decompresses the frames of a batch's windows on one core, into new memory."""
    frames = _frames()
    blobs = [lz4.block.compress(frame, store_size=False) for frame in frames]
    random = np.random.default_rng(0)

    def decompress() -> None:
        for begin in random.integers(0, len(blobs) - WINDOW, BATCH).tolist():
            for blob in blobs[begin : begin + WINDOW]:
                lz4.block.decompress(blob, uncompressed_size=SIDE * SIDE)

    def check() -> None:
        for blob, frame in zip(blobs[:WINDOW], frames, strict=False):
            assert lz4.block.decompress(blob, uncompressed_size=SIDE * SIDE) == frame, "a frame differs"

    return Limit(decompress, check)


def tcp() -> Limit:
    """Transfers the parameters over loopback TCP, as `Store.get` does."""
    return _transfer(socket.AF_INET)


def unix_socket() -> Limit:
    """Transfers the parameters over a pair of Unix sockets."""
    return _transfer(socket.AF_UNIX)


_ALL = (memory_copy, frame_copy, window_write, random_access, lz4_compress, lz4_decompress, tcp, unix_socket)
LIMITS: dict[str, Callable[[], Limit]] = {
    **{each.__name__.replace("_", " "): each for each in _ALL},
    "frame copy, two threads": lambda: frame_copy(threads=2, times=20),
}


def _transfer(family: socket.AddressFamily) -> Limit:
    """Sends one byte, and receives the parameters' bytes into a reused buffer."""
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
            have += near.recv_into(buffer[have:], flags=socket.MSG_WAITALL)

    def check() -> None:
        buffer[:] = bytes(len(buffer))
        transfer()
        assert buffer == payload, "the received bytes differ"

    threading.Thread(target=answer, daemon=True).start()
    return Limit(transfer, check)


def _pair(family: socket.AddressFamily) -> tuple[socket.socket, socket.socket]:
    if family == socket.AF_UNIX:
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return near, far
