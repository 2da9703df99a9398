"""A relay on loopback that emulates a link to a server: a delay and a rate, without TCP's congestion control.

It needs only the standard library, because workers in the environments of peers use it, too.

Its threads sleep until each piece of data is due. Pieces are about 10 µs late on an idle machine, at up to 1 GB/s
(docs/explanation/decisions.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import queue
import socket
import subprocess
import sys
import threading
import time
from typing import Self

PIECE = 64 << 10
"""Bytes of one read from a connection."""
PIECES = 1024
"""Largest number of pieces of a connection in flight in one direction; then its sender waits."""
QUEUE_SECONDS = 0.02
"""Longest queue of a link with a rate, as transmission time; then senders wait."""
_PR_SET_TIMERSLACK = 29


class Relay:
    """Emulates a link to a TCP server: the delay, and one rate for all connections, in each direction.

    Use it as a context manager, or call `close`.

    Args:
        to: The server's `ip:port`.
        delay: Seconds that each piece takes, one way.
        rate: Bytes per second; `None` has no limit.
    """

    def __init__(self, to: str, *, delay: float = 0.0, rate: float | None = None) -> None:
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._directions = [_Direction(delay, rate), _Direction(delay, rate)]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        """Address for clients: `ip:port`."""
        self._open: set[socket.socket] = set()
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes carried so far: to the server, and back."""
        there, back = self._directions
        return there.bytes, back.bytes

    def cut(self) -> None:
        """Cuts all open connections, and loses their data in flight. New connections work."""
        for end in list(self._open):
            _shut(end, socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends the relay and its connections."""
        self._closed = True
        _shut(self._listener, socket.SHUT_RDWR)
        self.cut()

    def _accept(self) -> None:
        # Timer slack, which threads inherit: by default the kernel may add 50 µs to each sleep.
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1_000)
        with contextlib.suppress(OSError), self._listener:
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        """Relays one connection to its end, with two threads for each direction."""
        # If the server is away, the client's connection is closed.
        with client, contextlib.suppress(OSError), socket.create_connection(self._to) as server:
            ends = {client, server}
            for end in ends:
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open |= ends
            threads = []
            for direction, source, sink in zip(self._directions, (client, server), (server, client), strict=True):
                pieces: queue.Queue[tuple[float, bytes]] = queue.Queue(PIECES)
                threads.append(threading.Thread(target=direction.read, args=(source, pieces), daemon=True))
                threads.append(threading.Thread(target=direction.write, args=(sink, source, pieces), daemon=True))
            for thread in threads:
                thread.start()
            if self._closed:
                self.cut()
            for thread in threads:
                thread.join()
            self._open -= ends


class RelayProcess:
    """A relay in a process of its own, which takes no time of the measured one.

    Args:
        to: Host and port of the server.
        each_way_ms: One-way delay in milliseconds.
    """

    def __init__(self, to: tuple[str, int], each_way_ms: float = 0.0) -> None:
        command = [sys.executable, "-m", "benchmarks.relay", "{}:{}".format(*to), str(each_way_ms)]
        pipe = subprocess.PIPE
        self._relay = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        host, port = self._answer().split(":")
        self.address = host, int(port)
        """Address for clients."""

    @property
    def bytes(self) -> int:
        """TCP payload bytes so far, in both directions."""
        print(file=self._relay.stdin, flush=True)
        return int(self._answer())

    def _answer(self) -> str:
        assert self._relay.stdout is not None
        return self._relay.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._relay.terminate()
        self._relay.communicate()


class _Direction:
    """One direction of a link, which all connections share."""

    def __init__(self, delay: float, rate: float | None) -> None:
        self.bytes = 0
        self._delay, self._rate = delay, rate
        self._free = 0.0
        """End of the transmission of all earlier pieces."""
        self._lock = threading.Lock()

    def read(self, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        piece = b"begin"
        while piece:
            _sleep_until(self._free - QUEUE_SECONDS)
            try:
                piece = source.recv(PIECE)
            except OSError:
                # A broken connection is relayed as end of file.
                piece = b""
            pieces.put((self._due(len(piece)), piece))

    def _due(self, size: int) -> float:
        """Returns the arrival time of a piece that is sent now."""
        with self._lock:
            self.bytes += size
            self._free = max(self._free, time.monotonic()) + (size / self._rate if self._rate else 0.0)
            return self._free + self._delay

    def write(self, sink: socket.socket, source: socket.socket, pieces: queue.Queue[tuple[float, bytes]]) -> None:
        while True:
            due, piece = pieces.get()
            _sleep_until(due)
            if not piece:
                return _shut(sink, socket.SHUT_WR)
            try:
                sink.sendall(piece)
            except OSError:
                # The remaining data is read and dropped.
                _shut(sink, socket.SHUT_RDWR)
                _shut(source, socket.SHUT_RDWR)


def _sleep_until(due: float) -> None:
    if (left := due - time.monotonic()) > 0:
        time.sleep(left)


def _shut(end: socket.socket, how: int) -> None:
    """Shuts a socket down; ignores errors of a closed connection."""
    with contextlib.suppress(OSError):
        end.shutdown(how)


if __name__ == "__main__":
    with Relay(sys.argv[1], delay=1e-3 * float(sys.argv[2])) as running:
        print(running.address, flush=True)
        # Until its input ends, each line asks for the bytes so far.
        for _ in sys.stdin:
            print(sum(running.bytes), flush=True)
