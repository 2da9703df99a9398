"""Servers, clients and items that are not as they should be: each is named, and nothing else breaks."""

from __future__ import annotations

import faulthandler
import itertools
import logging
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from steps import fill, still_works, table
from wire_client import FIRST, SCHEMA, TERMINATED, ServerError, WireClient

import innet_drl as innet
from innet_drl import errors


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    for address in (f"innet://127.0.0.1:{port}", f"unix://{tmp_path}/absent"):
        with pytest.raises(errors.ConnectError, match="is `innet-replay serve` running there"):
            innet.connect(address, timeout=0.1)
    for address in ("http://a:1", "unix://relative", "innet://:7710", "innet://host:port"):
        with pytest.raises(errors.ConfigError, match="an address is innet://host:port"):
            innet.connect(address)


def test_a_server_that_does_not_answer_is_left_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises((errors.ConnectError, errors.DeadlineError)):
            innet.connect(f"innet://127.0.0.1:{listener.getsockname()[1]}", timeout=0.3)


@pytest.mark.parametrize("timeout", [0.05, 1.5])
def test_a_client_tries_until_its_timeout(timeout: float) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"innet://127.0.0.1:{listener.getsockname()[1]}"
    begun = time.monotonic()
    with pytest.raises(errors.ConnectError, match="refused"):
        innet.connect(address, timeout=timeout)
    assert timeout <= time.monotonic() - begun < timeout + 10


def test_a_timeout_of_zero_is_one_attempt() -> None:
    with innet.Memory() as replay, replay.serve("innet://127.0.0.1:0") as server:
        innet.connect(server.addresses[0], timeout=0, grace=60).close()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        with pytest.raises(errors.ConnectError, match="no answer within"):
            innet.connect(f"innet://127.0.0.1:{listener.getsockname()[1]}", timeout=0, grace=0.1)


def test_an_address_in_use_is_named(tmp_path: Path) -> None:
    with innet.Memory() as replay, replay.serve(f"unix://{tmp_path}/s"):
        with pytest.raises(errors.ReplayError, match="a server is running there"):
            replay.serve(f"unix://{tmp_path}/s")
        with pytest.raises(errors.ConfigError, match="can be reached from other machines and needs a token"):
            replay.serve("innet://0.0.0.0:0")


def answer_once(listener: socket.socket, reply: bytes) -> None:
    """Takes one connection, reads what comes first and sends `reply`."""
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(reply)
        # Until the client has read the reply and left.
        connection.recv(1)


@pytest.mark.parametrize(
    ("reply", "error", "message"),
    [
        (
            "version",
            errors.VersionError,
            r"server speaks protocol 999 \(release 9\.9\.9\).*same release at both",
        ),
        ("oversized", errors.TooLargeError, r"over the limit of \d+; is it an innet-replay server"),
        ("http", errors.TooLargeError, r"over the limit of \d+; is it an innet-replay server"),
        ("garbage", errors.ProtocolError, "is it an innet-replay server"),
    ],
)
def test_a_server_that_is_none_of_ours(reply: str, error: type[Exception], message: str) -> None:
    if reply == "version":
        challenge = {"protocol": 999, "release": "9.9.9", "nonce": bytes(32), "maxFrameBytes": 1 << 20}
        control = SCHEMA.Reply.new_message(id=1, challenge=challenge).to_bytes()
        data = struct.pack("<II", len(control), 0) + control
    elif reply == "oversized":
        data = struct.pack("<II", 8, 0xFFFF_FFF8)
    elif reply == "http":
        data = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
    else:
        data = struct.pack("<II", 64, 0) + bytes(range(64))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=answer_once, args=(listener, data))
        server.start()
        with pytest.raises(error, match=message):
            innet.connect(f"innet://127.0.0.1:{listener.getsockname()[1]}", timeout=10)
        server.join()


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(struct.pack("<II", 0xFFFF_FFF8, 0), id="oversized control"),
        pytest.param(struct.pack("<II", 8, 0xFFFF_FFFF), id="oversized payload"),
        pytest.param(struct.pack("<II", 7, 0), id="odd length"),
        pytest.param(struct.pack("<II", 64, 0) + b"\xff" * 64, id="no message"),
        pytest.param(struct.pack("<II", 4096, 0) + b"\x00" * 100, id="truncated"),
        pytest.param(b"\x00" * 3, id="truncated header"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="http"),
    ],
)
@pytest.mark.parametrize("welcomed", [False, True])
def test_a_bad_frame_ends_its_own_connection_alone(tmp_path: Path, data: bytes, welcomed: bool) -> None:
    path = f"{tmp_path}/s"
    with innet.Memory([table()]) as memory, memory.serve(f"unix://{path}") as server:
        with innet.connect(server.addresses[0]) as replay, WireClient(path, handshake=welcomed) as other:
            other.socket.sendall(data)
            other.socket.shutdown(socket.SHUT_WR)
            while other.socket.recv(4096):
                pass
            assert still_works(replay)


def push_a_bad_blob(path: str, *, writer: int, name: str, priority: float) -> None:
    """Pushes one item whose frame does not unpack to table "t"."""
    with WireClient(path, table="t") as client:
        names = {"writer": writer, "streams": 1, "windowBefore": 0, "windowAfter": 1}
        opened = client.call(openWriter=SCHEMA.OpenWriter.new_message(name=name, **names))[0].writer
        blob = b"\xf0not an LZ4 block"
        row = struct.pack("<BqfI", FIRST | TERMINATED, 3, 1.0, len(blob))
        push = SCHEMA.Push.new_message(
            writer=writer,
            epoch=opened.epoch,
            sequence=1,
            chunks=[{"stream": 0, "rows": 1, "firstStep": 0, "bytes": len(row + blob)}],
            items=[{"anchor": 0, "stream": 0, "before": 0, "after": 0, "priority": priority}],
        )
        client.call(row + blob, push=push)


def test_where_no_item_decodes_others_are_sampled(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    view = innet.NStep(stack=1, n=1, observation="frame")
    with innet.Memory([table(priority_exponent=1.0)]) as memory, memory.serve(f"unix://{path}") as server:
        with innet.connect(server.addresses[0]) as client:
            fill(memory, 20, view=view, priority=0.001)
            # Of the mass, the others have one part in fifty million.
            for number, (replay, prefetch) in enumerate(itertools.product((memory, client), (0, 2)), 1):
                push_a_bad_blob(path, writer=number, name="careless", priority=1e6)
                assert len(replay.sample("t", 4, view, timeout=10)) == 4
                push_a_bad_blob(path, writer=10 + number, name="careless", priority=1e6)
                with replay.batches("t", 4, view, prefetch=prefetch, timeout=10) as batches:
                    assert len(next(batches)) == 4
            push_a_bad_blob(path, writer=99, name="careless", priority=1e6)
            with pytest.raises(errors.DeadlineError, match='none of 4 items sampled from table "t" could be decoded'):
                client.sample("t", 4, view, timeout=0)
        assert memory.stats()["tables"]["t"]["corrupt_items"] == 9


class Held(logging.Handler):
    """Holds up the thread that logs an item that does not decode."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.released = threading.Event(), threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "does not decode" in record.getMessage():
            self.entered.set()
            self.released.wait()


def test_a_log_that_is_held_up_holds_up_no_iterator(tmp_path: Path) -> None:
    path, view, held = f"{tmp_path}/s", innet.NStep(stack=1, n=1, observation="frame"), Held()
    logger = logging.getLogger("innet_drl")
    logger.addHandler(held)
    # The test's own time limit is a thread that needs the interpreter.
    faulthandler.dump_traceback_later(60, exit=True)
    try:
        with innet.Memory([table(priority_exponent=1.0)]) as memory, memory.serve(f"unix://{path}"):
            fill(memory, 20, view=view, priority=0.001)
            push_a_bad_blob(path, writer=1, name="careless", priority=1e6)
            batches = memory.batches("t", 4, view, prefetch=2, timeout=None)
            assert held.entered.wait(30)
            assert len(next(batches)) == 4
            batches.close()
            held.released.set()
    finally:
        held.released.set()
        faulthandler.cancel_dump_traceback_later()
        logger.removeHandler(held)


def test_a_blob_that_does_not_decode_is_left_out_and_its_writer_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = f"{tmp_path}/s"
    view = innet.NStep(stack=1, n=1, observation="frame")
    with innet.Memory([table()]) as memory, memory.serve(f"unix://{path}") as server:
        push_a_bad_blob(path, writer=5, name="careless", priority=50.0)
        for replay in (memory, innet.connect(server.addresses[0])):
            fill(replay, 20, view=view, priority=1.0)
        with caplog.at_level(logging.WARNING, logger="innet_drl"):
            batch = memory.sample("t", 64, view, timeout=10)
        # The bad item was sampled (its mass makes it certain but for 1 in 10^20), and left out.
        assert 0 < len(batch) < 64
        assert all(len(array) == len(batch) for array in batch.as_dict().values())
        assert "careless" in caplog.text
        assert 'column "frame"' in caplog.text
        # It is gone.
        assert len(memory.sample("t", 64, view, timeout=10)) == 64


def test_a_writer_that_was_taken_over_is_told(tmp_path: Path) -> None:
    path = f"{tmp_path}/s"
    with innet.Memory([table()]) as memory, memory.serve(f"unix://{path}"), WireClient(path, table="t") as client:
        names = {"writer": 9, "streams": 1, "windowBefore": 0, "windowAfter": 1}
        client.call(openWriter=SCHEMA.OpenWriter.new_message(name="first", **names))
        with WireClient(path, table="t") as second:
            assert second.call(openWriter=SCHEMA.OpenWriter.new_message(name="second", **names))[0].writer.epoch == 2
            push = SCHEMA.Push.new_message(writer=9, epoch=1, sequence=1)
            with pytest.raises(ServerError, match="a newer connection of the same writer took over") as caught:
                client.call(push=push)
        assert caught.value.code == "fenced"
