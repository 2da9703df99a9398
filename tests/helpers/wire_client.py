"""A client of an innet-replay server in plain Python: sockets, pycapnp and the schema file, nothing of ours.

It exists to prove that `schema/innet.capnp` alone is enough to speak to a server.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import shutil
import socket
import struct
import subprocess
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import capnp  # type: ignore[import-untyped]
from places import ROOT

REPOSITORY = ROOT
SCHEMA: Any = capnp.load(str(REPOSITORY / "crates/replay_wire/schema/innet.capnp"))
PROTOCOL = 1

FIRST, TERMINATED, TRUNCATED, FINAL, DIFFERENCE, REFERENCE = 1, 2, 4, 8, 16, 32
MARK = 1 << 31


class ServerError(Exception):
    """The server answered with an error."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


ABOUT_TABLES = {"openWriter", "push", "sample", "updatePriorities", "readSteps", "reportCorrupt", "closeWriter"}
"""Requests about a table, which the first one names and the others have the number of."""


class WireClient:
    """One connection.

    `address` is a path of a Unix socket or a pair of host and port; `table` is what requests are about.
    """

    def __init__(
        self,
        address: str | tuple[str, int],
        token: str | None = None,
        *,
        handshake: bool = True,
        table: str = "steps",
    ) -> None:
        self._table, self._named = table, False
        family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.settimeout(60)
        self.socket.connect(address)
        self.last_id = 0
        try:
            self.incarnation = self._handshake(token) if handshake else 0
        except BaseException:
            self.socket.close()
            raise

    def __enter__(self) -> WireClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def _handshake(self, token: str | None) -> int:
        nonce = os.urandom(32)
        hello = SCHEMA.Hello.new_message(protocol=PROTOCOL, release="python", nonce=nonce)
        challenge = self.call(hello=hello)[0].challenge
        assert challenge.protocol == PROTOCOL
        nonces = nonce + challenge.nonce
        proof = b"" if token is None else _proof(token, b"innet client", nonces)
        welcome = self.call(authenticate=proof)[0].welcome
        if token is not None:
            assert hmac.compare_digest(welcome, _proof(token, b"innet server", nonces))
        return int(challenge.incarnation)

    def send(self, payload: bytes = b"", *, deadline_ms: int = 0, **body: Any) -> int:
        """Sends a request, whose kind is the name of the one other argument, and returns its id."""
        self.last_id += 1
        request = SCHEMA.Request.new_message(id=self.last_id, deadlineMs=deadline_ms, **body)
        if ABOUT_TABLES.intersection(body):
            request.table = 1
            if not self._named:
                request.tableName, self._named = self._table, True
        control = request.to_bytes()
        self.socket.sendall(struct.pack("<II", len(control), len(payload)) + control + payload)
        return self.last_id

    def receive(self) -> tuple[Any, bytes]:
        """The next reply and its payload, which may be an error."""
        control, payload = struct.unpack("<II", self._read(8))
        with SCHEMA.Reply.from_bytes(self._read(control)) as reply:
            return reply.as_builder().as_reader(), self._read(payload)

    def call(self, payload: bytes = b"", *, deadline_ms: int = 0, **body: Any) -> tuple[Any, bytes]:
        """Asks and waits for the answer.

        Raises:
            ServerError: The answer is an error.
        """
        sent = self.send(payload, deadline_ms=deadline_ms, **body)
        reply, payload = self.receive()
        if reply.which() == "error":
            raise ServerError(str(reply.error.code), reply.error.message or reply.error.waitedFor)
        assert reply.id == sent
        return reply, payload

    def _read(self, length: int) -> bytes:
        parts = []
        while length > 0:
            part = self.socket.recv(length)
            if not part:
                raise ConnectionError("the server closed the connection")
            parts.append(part)
            length -= len(part)
        return b"".join(parts)


def _proof(token: str, side: bytes, nonces: bytes) -> bytes:
    return hmac.new(token.encode(), side + nonces, hashlib.sha256).digest()


def lz4_run(value: int, length: int) -> bytes:
    """An LZ4 block of `length` (at least 24) equal bytes: one literal, a match at offset 1, five literals."""
    extra = length - 1 - 5 - 4 - 15
    lengths = b"\xff" * (extra // 255) + bytes([extra % 255])
    byte = bytes([value])
    return b"\x1f" + byte + struct.pack("<H", 1) + lengths + b"\x50" + byte * 5


def apply_difference(difference: bytes, key: bytes) -> bytes:
    """The value that differs so from a key row's."""
    value, at, position = bytearray(key), 0, 0
    lengths = []
    while at < len(difference):
        length = shift = 0
        while difference[at] & 0x80:
            length |= (difference[at] & 0x7F) << shift
            at, shift = at + 1, shift + 7
        lengths.append(length | difference[at] << shift)
        at += 1
        if len(lengths) == 2:
            skip, count = lengths
            position += skip
            value[position : position + count] = difference[at : at + count]
            at, position, lengths = at + count, position + count, []
    assert len(value) == len(key)
    return bytes(value)


def server_binary() -> str:
    """The `innet-replay` command: `SERVER_CLI_BIN`, the one of this environment, or that on the path.

    Raises:
        FileNotFoundError: There is none.
    """
    beside = Path(sysconfig.get_path("scripts")) / "innet-replay"
    found = os.environ.get("SERVER_CLI_BIN") or shutil.which(beside) or shutil.which("innet-replay")
    if found is None:
        raise FileNotFoundError("no innet-replay: run `make build`, or set SERVER_CLI_BIN")
    return found


@contextmanager
def running_server(listen: str, token: str | None = None) -> Iterator[str]:
    """A server that listens on `listen`; yields the address that it printed."""
    environment = {key: value for key, value in os.environ.items() if key != "INNET_TOKEN"}
    if token is not None:
        environment["INNET_TOKEN"] = token
    command = [server_binary(), "serve", "--listen", listen, "--max-bytes", "1GiB"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = process.stdout.readline()
            assert " ready on " in ready, "the server did not start"
            yield ready.split()[-1]
        finally:
            process.terminate()
        assert process.wait() == 0
