"""A hostile client that knows a token of the server, for `benchmarks.hostile`."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any

from wire_client import FIRST, PROTOCOL, SCHEMA, ServerError, WireClient

THREADS = 4
ATTACK_S = 2.0
"""Socket timeout of an attack."""
FLOOD = 200
CROWD = 48
"""Connections that stay open without reading."""
LENGTHS = (0, 1, 100, 70_000)
NUMBERS: dict[str, tuple[float, ...]] = {"float": (0.0, -1.0, 1e300, float("inf"), float("nan"))}
NUMBERS |= {f"int{bits}": (0, 1, -1, -(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)}
NUMBERS |= {
    f"uint{bits}": tuple(
        each for each in (0, 1, 7, 2**16 - 1, 2**24, 2**31, 2**32 - 1, 2**63, 2**64 - 1) if each < 2**bits
    )
    for bits in (8, 16, 32, 64)
}
NUMBERS |= {"float32": NUMBERS["float"], "float64": NUMBERS["float"], "bool": (False, True)}
REFUSALS = (OSError, ServerError, AssertionError, KeyError)
"""A server refuses, closes the connection or times out."""
KINDS = [kind for kind in SCHEMA.Request.schema.union_fields if kind not in ("hello", "authenticate")]

Address = tuple[str, int]


class Attacker:
    """Attacks in random order.

    Args:
        address: Address of the server.
        token: Token of the attacker's role.
        tables: Names of tables that the requests use.
        seed: Seed of the order and the contents.
    """

    def __init__(self, address: Address, token: str, tables: list[str], seed: int) -> None:
        self._address, self._token, self._tables = address, token, tables
        self._random = random.Random(seed)
        self.attacks = (
            *(self.extreme,) * 3,
            self.mutated,
            self.flood,
            self.half_handshakes,
            self.unread,
            self.wide_writer,
            self.many_links,
            self.long_waits,
            self.large_frames,
            self.many_tables,
        )
        self._crowd: list[WireClient] = []

    def attack(self) -> str:
        """Runs one attack; returns its name."""
        chosen = self._random.choice(self.attacks)
        with suppress(*REFUSALS):
            chosen()
        return chosen.__name__

    @contextmanager
    def _client(self, table: str = "hostile") -> Iterator[WireClient]:
        with WireClient(self._address, self._token, table=table) as client:
            client.socket.settimeout(ATTACK_S)
            yield client

    def _socket(self) -> socket.socket:
        return socket.create_connection(self._address, ATTACK_S)

    def _value(self, kind: str, type_: Any, schema: Any, name: str, lengths: tuple[int, ...] = LENGTHS) -> Any:
        """Returns a value at the limits of a field's type; elements of long lists are short."""
        chosen = self._random
        if kind == "text":
            own = chosen.random() < 0.8 and name in ("table", "name", "emptyTable", "dropTable", "describeTable")
            return chosen.choice(self._tables) if own else "x" * chosen.choice(lengths)
        if kind == "data":
            return chosen.randbytes(chosen.choice(lengths))
        if kind == "struct":
            return self._fields(schema, lengths)
        if kind == "enum":
            return chosen.choice(list(schema.enumerants))
        if kind == "list":
            element = type_.list.elementType
            inner = schema.elementType if element.which() in ("struct", "enum") else None
            # Equal elements are cheap to make: the load belongs on the server.
            return [self._value(element.which(), element, inner, "", (0, 1))] * chosen.choice(lengths)
        return chosen.choice(NUMBERS[kind])

    def _fields(self, schema: Any, lengths: tuple[int, ...]) -> dict[str, Any]:
        fields = {}
        for name, field in schema.fields.items():
            type_ = field.proto.slot.type
            nested = field.schema if type_.which() in ("struct", "enum", "list") else None
            fields[name] = self._value(type_.which(), type_, nested, name, lengths)
        return fields

    def _request(self) -> dict[str, Any]:
        kind = self._random.choice(KINDS)
        field = SCHEMA.Request.schema.fields[kind]
        type_ = field.proto.slot.type
        if type_.which() == "void":
            return {kind: None}
        return {kind: self._value(type_.which(), type_, field.schema if type_.which() == "struct" else None, kind)}

    def extreme(self) -> None:
        """Sends requests of every kind with extreme fields. Each has its own connection, as the server closes many."""
        for _ in range(10):
            with self._client() as client, suppress(OSError, ServerError, AssertionError):
                payload = self._random.randbytes(self._random.choice(LENGTHS))
                client.send(payload, deadline_ms=self._random.choice((0, 1, 2**32 - 1)), **self._request())
                client.socket.settimeout(0.1)
                client.receive()

    def mutated(self) -> None:
        """Sends frames with flipped bits and wrong lengths, before and after the handshake."""
        for _ in range(20):
            control = bytearray(SCHEMA.Request.new_message(id=1, **self._request()).to_bytes())
            lengths = struct.pack("<II", len(control), self._random.choice((0, 0, 8, 2**32 - 1)))
            frame = bytearray(lengths + control)
            for _ in range(self._random.choice((1, 8, 64))):
                frame[self._random.randrange(min(len(frame), 512))] ^= 1 << self._random.randrange(8)
            with ExitStack() as stack:
                if self._random.random() < 0.5:
                    connection = stack.enter_context(self._client()).socket
                else:
                    connection = stack.enter_context(self._socket())
                connection.settimeout(0.05)
                with suppress(OSError):
                    connection.sendall(frame[: self._random.choice((len(frame), len(frame) // 2))])
                    connection.recv(1 << 16)

    def flood(self) -> None:
        """Opens connections without sending a handshake."""
        with ExitStack() as stack:
            for _ in range(FLOOD):
                stack.enter_context(self._socket())
            time.sleep(ATTACK_S / 4)

    def half_handshakes(self) -> int:
        """Opens connections that stop after `hello`; returns the number of challenges received."""
        challenged = 0
        with ExitStack() as stack:
            for _ in range(FLOOD):
                client = stack.enter_context(WireClient(self._address, handshake=False))
                client.socket.settimeout(ATTACK_S)
                # The server refuses connections beyond `max_handshakes_per_address`.
                with suppress(ServerError, ConnectionError):
                    client.call(hello=SCHEMA.Hello.new_message(protocol=PROTOCOL, release="x", nonce=bytes(32)))
                    challenged += 1
            time.sleep(ATTACK_S / 4)
        return challenged

    def unread(self) -> None:
        """Requests large replies without reading them."""
        with ExitStack() as stack:
            for _ in range(8):
                client = stack.enter_context(self._client())
                for _ in range(64):
                    client.send(getParameters=SCHEMA.GetParameters.new_message(name="hostile"))
                    client.send(sample=SCHEMA.Sample.new_message(count=65_536))
                    client.send(stats=None)
            time.sleep(ATTACK_S)

    def crowd(self) -> int:
        """Keeps connections whose unread replies exceed the socket buffers; returns how many it opened."""
        self._crowd = [client for client in self._crowd if self._ask_large(client)]
        missing = CROWD - len(self._crowd)
        for _ in range(missing):
            client = WireClient(self._address, self._token, table="hostile")
            client.socket.settimeout(0.1)
            self._crowd.append(client)
            self._ask_large(client)
        return missing

    def _ask_large(self, client: WireClient) -> bool:
        """Requests large replies; returns whether the connection is still open."""
        try:
            for _ in range(4):
                client.send(deadline_ms=2**32 - 1, getParameters=SCHEMA.GetParameters.new_message(name="hostile"))
                sample = SCHEMA.Sample.new_message(count=65_536)
                client.send(deadline_ms=2**32 - 1, sample=sample)
        except TimeoutError:
            # The server stops reading a connection with too many pending requests.
            return True
        except OSError:
            client.socket.close()
            return False
        return True

    def _open(self, client: WireClient, writer: int, streams: int = 1, before: int = 0) -> int:
        opened = {"writer": writer, "name": "hostile", "streams": streams, "windowBefore": before}
        return int(client.call(openWriter=SCHEMA.OpenWriter.new_message(**opened))[0].writer.epoch)

    def wide_writer(self) -> None:
        """Opens writers with the largest number of streams in every table, except `blocked` (see `long_waits`)."""
        for table in self._tables:
            if table == "blocked":
                continue
            with suppress(ServerError), self._client(table) as client:
                self._open(client, self._random.getrandbits(64), self._random.choice((32_768, 65_536)))

    def many_links(self) -> None:
        """Pushes and samples windows over thousands of one-row chunks, too many at a time and few at a time."""
        rows, writer = 16_000, self._random.getrandbits(64)
        with self._client() as client:
            epoch = self._open(client, writer, before=rows - 1)
            chunks = [{"stream": 0, "rows": 1, "firstStep": step, "bytes": 9} for step in range(rows)]
            item = {"anchor": rows - 1, "stream": 0, "before": rows - 1, "after": 0, "priority": 1e30}
            # The server refuses the first push and stores the second.
            for items in (70_000, 60):
                push = {"writer": writer, "epoch": epoch, "sequence": 1, "chunks": chunks}
                message = SCHEMA.Push.new_message(**push, items=[item] * items)
                with suppress(ServerError):
                    client.call(struct.pack("<Bq", FIRST, -1) * rows, push=message)
            for count in (65_536, 100) * 8:
                client.send(sample=SCHEMA.Sample.new_message(count=count, before=rows - 1))
            for _ in range(16):
                client.receive()

    def long_waits(self) -> None:
        """Pushes and samples with the longest deadline on a table whose rate limiter blocks them."""
        with ExitStack() as stack:
            for _ in range(16):
                client = stack.enter_context(self._client("blocked"))
                writer = self._random.getrandbits(64)
                epoch = self._open(client, writer)
                for step in range(64):
                    item = [{"anchor": step, "stream": 0, "before": 0, "after": 0}]
                    chunk = [{"stream": 0, "rows": 1, "firstStep": step, "bytes": 9}]
                    push = {"writer": writer, "epoch": epoch, "sequence": step + 1}
                    message = SCHEMA.Push.new_message(**push, chunks=chunk, items=item)
                    client.send(struct.pack("<Bq", 0, -1), deadline_ms=2**32 - 1, push=message)
                waiting = stack.enter_context(self._client("blocked"))
                for _ in range(64):
                    sample = SCHEMA.Sample.new_message(count=1)
                    waiting.send(deadline_ms=2**32 - 1, sample=sample)
            time.sleep(ATTACK_S)

    def large_frames(self) -> None:
        """Sends payloads of 1 and 31 MiB, close to the frame limit, some of them incomplete."""
        with ExitStack() as stack:
            for _ in range(4):
                client = stack.enter_context(self._client())
                put = SCHEMA.PutParameters.new_message(name=self._random.choice(("hostile", "other")))
                control = SCHEMA.Request.new_message(id=1, putParameters=put).to_bytes()
                length = self._random.choice((1 << 20, 31 << 20))
                client.socket.sendall(struct.pack("<II", len(control), length) + control)
                header = b'{"x":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}'
                header = (header % (length - 128, length - 128)).ljust(120)
                whole = struct.pack("<Q", 120) + header + bytes(length - 128)
                client.socket.sendall(whole[: self._random.choice((length, length // 2))])

    def many_tables(self) -> None:
        """Creates tables up to the memory limit, then empties and drops them."""
        table = {"columns": [{"name": "x", "dtype": "uint8"}], "capacity_bytes": 1 << 20}
        with self._client() as client:
            for number in range(64):
                name, capacity = f"{self._tables[0]}-{number}", self._random.choice((1, 1 << 16, 1 << 20, 1 << 24))
                with suppress(ServerError):
                    client.call(createTable=json.dumps({"name": name, "capacity": capacity, **table}))
            for number in range(64):
                for kind in ("emptyTable", "dropTable"):
                    with suppress(ServerError):
                        client.call(b"", deadline_ms=0, **{kind: f"{self._tables[0]}-{number}"})


def attack(address: Address, token: str, tables: list[str], until: float, seed: int, result: Connection) -> None:
    """Attacks from several threads until `until`, and sends the number of attacks by name.

    Another thread keeps the crowd of connections that do not read.
    """
    counts: Counter[str] = Counter()

    def attacking(number: int) -> None:
        attacker = Attacker(address, token, tables, seed * THREADS + number)
        while time.monotonic() < until:
            counts[attacker.attack()] += 1

    def crowding() -> None:
        attacker = Attacker(address, token, tables, seed)
        while time.monotonic() < until:
            with suppress(OSError, ServerError):
                counts["crowd"] += attacker.crowd()
            time.sleep(ATTACK_S)

    with ThreadPoolExecutor(THREADS + 1) as pool:
        attackers = [pool.submit(crowding), *(pool.submit(attacking, number) for number in range(THREADS))]
    for each in attackers:
        each.result()
    result.send(dict(counts))
