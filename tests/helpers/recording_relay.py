"""A relay between clients and a server, which keeps the requests that pass it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from wire_client import SCHEMA


class RecordingRelay:
    """Listens on a Unix socket, and forwards each connection to that of a server. Its clients end before it."""

    def __init__(self, path: Path, server: Path) -> None:
        self.address = f"unix://{path}"
        self.loses_replies = False
        self.in_replies = (b"", b"")
        """Bytes of replies, and as many that take their place: an answer of another server."""
        self._server = str(server)
        self._sent: list[bytearray] = []
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # It wakes the thread, which then ends.
        self._listener.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._sent.append(bytearray())
            self._threads.append(threading.Thread(target=self._serve, args=(client, self._sent[-1])))
            self._threads[-1].start()

    def _serve(self, client: socket.socket, sent: bytearray) -> None:
        with client, socket.socket(socket.AF_UNIX) as server:
            try:
                server.connect(self._server)
            except OSError:
                # The server is away.
                return
            replies = threading.Thread(target=_forward, args=(server, client, self._reply))
            replies.start()

            def record(part: bytes) -> bytes:
                sent.extend(part)
                return part

            _forward(client, server, record)
            replies.join()

    def _reply(self, part: bytes) -> bytes:
        return b"" if self.loses_replies else part.replace(*self.in_replies)

    def requests(self) -> list[tuple[str, int]]:
        """Kind and deadline in milliseconds of each whole request so far, connection after connection."""
        found: list[tuple[str, int]] = []
        for sent in self._sent:
            data, at = bytes(sent), 0
            while at + 8 <= len(data):
                control, payload = struct.unpack_from("<II", data, at)
                if at + 8 + control > len(data):
                    break
                message: Any
                with SCHEMA.Request.from_bytes(data[at + 8 : at + 8 + control]) as message:
                    found.append((str(message.which()), int(message.deadlineMs)))
                at += 8 + control + payload
        return found


def _forward(source: socket.socket, target: socket.socket, what_passes: Callable[[bytes], bytes]) -> None:
    # An error is the end of one side, which the other one then sees.
    with suppress(OSError):
        while part := source.recv(1 << 16):
            target.sendall(what_passes(part))
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
