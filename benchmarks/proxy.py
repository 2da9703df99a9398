"""A TCP proxy that counts its bytes."""

from __future__ import annotations

import contextlib
import socket
import threading

from benchmarks.systems import Address


class CountingProxy:
    """Passes connections on to `target`, byte by byte as they are."""

    def __init__(self, target: Address) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()
        self._lock = threading.Lock()
        self.bytes = 0
        """Payload of TCP, both directions together."""
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                for source, sink in ((near, far), (far, near)):
                    source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 20):
                with self._lock:
                    self.bytes += len(part)
                sink.sendall(part)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()
