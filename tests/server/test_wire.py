"""The wire is a contract: a client written from the schema file alone uses every call of a real server."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from wire_client import (
    DIFFERENCE,
    FINAL,
    FIRST,
    MARK,
    REFERENCE,
    SCHEMA,
    TERMINATED,
    ServerError,
    WireClient,
    apply_difference,
    lz4_run,
    running_server,
)

import innet_drl as innet

FRAME = 1000
STEPS = 20


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with running_server(f"unix://{tmp_path}/replay.sock") as address:
        yield address.removeprefix("unix://")


@pytest.fixture
def client(server: str) -> Iterator[WireClient]:
    with WireClient(server) as client:
        yield client


def table(name: str = "steps", **options: Any) -> str:
    columns = [
        {"name": "frame", "dtype": "uint8", "shape": [FRAME], "codec": "lz4"},
        {"name": "action", "dtype": "int32", "shape": [], "codec": "none"},
        {"name": "reward", "dtype": "float32", "shape": [], "codec": "none"},
    ]
    fields = {"name": name, "columns": columns, "capacity": 1000, "priority_exponent": 1.0}
    return json.dumps(fields | options)


def row(step: int) -> tuple[bytes, bytes]:
    """The packed row of a step, and its blob: raw for odd steps, an LZ4 block for even ones."""
    blob = bytes((step + i) % 256 for i in range(FRAME)) if step % 2 else lz4_run(step, FRAME)
    flags = (FIRST if step == 0 else 0) | (TERMINATED if step == STEPS - 1 else 0)
    return struct.pack("<BifI", flags, -step, step / 2, len(blob)), blob


def chunk(first: int, rows: int) -> bytes:
    packed = [row(step) for step in range(first, first + rows)]
    return b"".join(head for head, _ in packed) + b"".join(blob for _, blob in packed)


def open_writer(client: WireClient, writer: int = 7, *, resume: bool = False) -> Any:
    fields = {"writer": writer, "name": "python", "streams": 1, "resume": resume}
    window = {"windowBefore": 1, "windowAfter": 1}
    return client.call(openWriter=SCHEMA.OpenWriter.new_message(**fields, **window))[0].writer


def push(epoch: int, sequence: int, first: int, rows: int, **changes: Any) -> tuple[Any, bytes]:
    """Steps `first..first + rows`, with an item at each whose window these steps complete."""
    payload = chunk(first, rows)
    last = first + rows - 1
    anchors = range(max(first - 1, 0), last + 1 if last == STEPS - 1 else last)
    items = [
        {
            "anchor": anchor,
            "stream": 0,
            "before": min(anchor, 1),
            "after": 0 if anchor == STEPS - 1 else 1,
            "priority": 1 + anchor,
        }
        for anchor in anchors
    ]
    head = {"stream": 0, "rows": rows, "firstStep": first, "bytes": len(payload)}
    fields = {"writer": 7, "epoch": epoch, "sequence": sequence} | changes
    return SCHEMA.Push.new_message(chunks=[head], items=items, **fields), payload


def fill(client: WireClient) -> None:
    client.call(createTable=table())
    opened = open_writer(client)
    assert (opened.epoch, opened.lastSequence) == (1, 0)
    for sequence, first in enumerate(range(0, STEPS, 5), start=1):
        message, payload = push(1, sequence, first, 5)
        reply = client.call(payload, push=message)[0]
        assert reply.pushed.steps == first + 5


def sample(client: WireClient, count: int, before: int = 1, after: int = 1) -> tuple[Any, bytes]:
    fields = {"count": count, "before": before, "after": after}
    reply, payload = client.call(sample=SCHEMA.Sample.new_message(**fields, minProbability=True))
    return reply.sampled, payload


def windows(sampled: Any, payload: bytes) -> list[list[tuple[int, bytes, bytes]]]:
    """The rows of each item as (step number, packed row, blob)."""
    size = struct.calcsize("<BifI")
    blobs = sampled.rowBytes
    out, at = [], 0
    for before, after in zip(sampled.before, sampled.after, strict=True):
        window = []
        for _ in range(before + 1 + after):
            head = payload[at : at + size]
            _, action, _, length = struct.unpack("<BifI", head)
            window.append((-action, head, payload[blobs : blobs + length]))
            at, blobs = at + size, blobs + length
        out.append(window)
    assert (at, blobs) == (sampled.rowBytes, len(payload))
    return out


def test_windows_come_back_byte_for_byte(client: WireClient) -> None:
    fill(client)
    sampled, payload = sample(client, 64)
    assert sampled.items == STEPS
    mass = sum(range(1, STEPS + 1))
    for window, probability, before in zip(
        windows(sampled, payload), sampled.probabilities, sampled.before, strict=True
    ):
        anchor = window[before][0]
        assert [step for step, _, _ in window] == list(range(max(anchor - 1, 0), min(anchor + 2, STEPS)))
        assert all((head, blob) == row(step) for step, head, blob in window)
        assert probability == pytest.approx((1 + anchor) / mass, rel=1e-5)
    assert sampled.minProbability == pytest.approx(1 / mass, rel=1e-5)
    assert all(times >= 1 for times in sampled.timesSampled)


def unpacked(sampled: Any, payload: bytes) -> list[dict[int, bytes]]:
    """The frames of each item by step number, of key rows that are raw and differences to them."""
    size = struct.calcsize("<BifI")
    heads, blobs, key = iter(range(0, sampled.rowBytes, size)), sampled.rowBytes, b""
    out: list[dict[int, bytes]] = []
    for before, after in zip(sampled.before, sampled.after, strict=True):
        window: dict[int, bytes] = {}
        while len(window) < before + 1 + after:
            flags, action, _, length = struct.unpack_from("<BifI", payload, next(heads))
            bytes_of_it = length & ~MARK
            blob, blobs = payload[blobs : blobs + bytes_of_it], blobs + bytes_of_it
            assert bool(flags & DIFFERENCE) == bool(length & MARK)
            if not length & MARK:
                assert length == FRAME
                key = blob
            if not flags & REFERENCE:
                window[-action] = apply_difference(blob, key) if length & MARK else blob
        out.append(window)
    assert (next(heads, None), blobs) == (None, len(payload))
    return out


def test_differences_of_the_real_writer_are_as_the_schema_says(server: str, client: WireClient) -> None:
    client.call(createTable=table())
    frames = np.random.default_rng(1).integers(0, 256, (1, FRAME), np.uint8).repeat(40, axis=0)
    for step in range(40):
        frames[step, 10 * step : 10 * step + step % 7] += 1
        frames[step, -1] = step
    with innet.connect(f"unix://{server}") as replay, replay.writer("steps", 1, innet.Window(1, 1)) as writer:
        for step in range(40):
            writer.append(
                frame=frames[step : step + 1],
                action=np.array([-step], np.int32),
                reward=np.zeros(1, np.float32),
                terminated=[step == 39],
                truncated=[False],
                first=[step == 0],
                priority=[1.0],
            )
    sampled, payload = sample(client, 64)
    windows = unpacked(sampled, payload)
    assert len(payload) < sampled.rowBytes + 64 * (FRAME + 3 * 20), "differences are small"
    assert {step for window in windows for step in window} == set(range(40))
    for window in windows:
        assert all(frame == frames[step].tobytes() for step, frame in window.items())


def test_differences_of_another_client_reach_the_real_reader(server: str, client: WireClient) -> None:
    client.call(createTable=table())
    epoch = open_writer(client).epoch
    key = bytes(i % 251 for i in range(FRAME))
    blobs = [key, b"", b"\x03\x02\x07\x08\xe2\x07\x01\x09"]
    flags = [FIRST, DIFFERENCE, DIFFERENCE | TERMINATED]
    marks = [0, MARK, MARK]
    heads = [struct.pack("<BifI", flags[i], -i, 0.0, len(blobs[i]) | marks[i]) for i in range(3)]
    payload = b"".join(heads + blobs)
    chunks = [{"stream": 0, "rows": 3, "firstStep": 0, "bytes": len(payload)}]
    items = [{"anchor": 2, "stream": 0, "before": 1, "after": 0, "priority": 1}]
    message = SCHEMA.Push.new_message(writer=7, epoch=epoch, sequence=1, chunks=chunks, items=items)
    client.call(payload, push=message)
    with innet.connect(f"unix://{server}") as replay:
        frames = replay.sample("steps", 1, innet.Window(1, 0)).frame[0]
    expected = bytearray(key)
    expected[3:5] = b"\x07\x08"
    expected[5 + 994] = 9
    assert [frame.tobytes() for frame in frames] == [key, bytes(expected)]


@pytest.mark.parametrize(
    ("flags", "lengths", "reason"),
    [
        ([DIFFERENCE], [MARK], "no key row"),
        ([FIRST], [MARK], "and is a key row"),
        ([FIRST, REFERENCE], [FRAME, FRAME], "unknown flags"),
        ([FIRST, DIFFERENCE], [FRAME, MARK | FRAME + 1], "0 to 1000"),
        ([FIRST, DIFFERENCE], [FRAME, 0], "1 to 1000"),
        ([FIRST], [0], "1 to 1000"),
    ],
)
def test_a_bad_difference_is_refused(client: WireClient, flags: list[int], lengths: list[int], reason: str) -> None:
    client.call(createTable=table())
    epoch = open_writer(client).epoch
    heads = [struct.pack("<BifI", flag, 0, 0.0, length) for flag, length in zip(flags, lengths, strict=True)]
    payload = b"".join(heads) + bytes(sum(length & ~MARK for length in lengths))
    chunks = [{"stream": 0, "rows": len(flags), "firstStep": 0, "bytes": len(payload)}]
    message = SCHEMA.Push.new_message(writer=7, epoch=epoch, sequence=1, chunks=chunks)
    with pytest.raises(ServerError, match=reason):
        client.call(payload, push=message)


def test_a_narrower_window_may_be_asked_for_and_a_wider_one_not(client: WireClient) -> None:
    fill(client)
    sampled, payload = sample(client, 8, before=0, after=0)
    assert list(sampled.before) == list(sampled.after) == [0] * 8
    assert all(len(window) == 1 for window in windows(sampled, payload))
    with pytest.raises(ServerError) as refused:
        sample(client, 8, before=2)
    assert refused.value.code == "view"


def test_priorities_are_updated_and_old_keys_are_stale(client: WireClient) -> None:
    fill(client)
    sampled, _ = sample(client, 64)
    ids = sorted(set(sampled.ids))

    def update(ids: list[int], priorities: list[float]) -> tuple[int, int]:
        message = SCHEMA.UpdatePriorities.new_message(ids=ids, priorities=priorities)
        updated = client.call(updatePriorities=message)[0].updated
        return updated.applied, updated.stale

    assert update(ids, [0.0] * len(ids)) == (len(ids), 0)
    again, _ = sample(client, 64)
    assert not set(again.ids) & set(ids)
    with pytest.raises(ServerError) as refused:
        update(ids, [float("nan")] * len(ids))
    assert refused.value.code == "priority"

    report = SCHEMA.ReportCorrupt.new_message(id=ids[0], reason="a test")
    assert client.call(reportCorrupt=report)[0].corrupt == "python"
    assert client.call(reportCorrupt=report)[0].corrupt == ""
    assert update(ids[:1], [1.0]) == (0, 1)
    client.call(emptyTable="steps")
    assert update(ids, [1.0] * len(ids)) == (0, len(ids))


def test_stored_steps_are_read_in_parts(client: WireClient) -> None:
    fill(client)
    position = {"number": 0, "next": 0, "end": 0}
    read, writers = b"", set()
    for number in range(1, 5):
        # One byte: an answer has one chunk.
        message = SCHEMA.ReadSteps.new_message(bytes=1, **{"from": position})
        reply, payload = client.call(readSteps=message)
        (head,) = reply.stepsRead.chunks
        assert (head.stream, head.rows, head.firstStep, head.bytes) == (0, 5, 5 * (number - 1), len(payload))
        writers |= set(reply.stepsRead.writers)
        read += payload
        # It is null at the end.
        assert reply.stepsRead._has("next") == (number < 4)
        position = {name: getattr(reply.stepsRead.next, name) for name in position}
    assert read == b"".join(chunk(first, 5) for first in range(0, STEPS, 5))
    assert len(writers) == 1
    empty = SCHEMA.ReadSteps.new_message(bytes=1, **{"from": {"number": 9, "next": 0, "end": 4}})
    with pytest.raises(ServerError, match="it was dropped"):
        client.call(readSteps=empty)


def test_a_push_is_applied_once(client: WireClient, server: str) -> None:
    client.call(createTable=table())
    open_writer(client)
    message, payload = push(1, 1, 0, 5)
    for _ in range(2):
        assert client.call(payload, push=message)[0].pushed.steps == 5
    with WireClient(server) as second:
        opened = open_writer(second, resume=True)
        assert (opened.epoch, opened.lastSequence) == (2, 1)
        message, payload = push(2, 2, 5, 5)
        assert second.call(payload, push=message)[0].pushed.steps == 10
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"epoch": 1, "sequence": 3}, "fenced"),
        ({"epoch": 2, "sequence": 4}, "protocol"),
        ({"epoch": 1, "sequence": 1, "writer": 8}, "expired"),
    ]
    for changes, code in refusals:
        message, payload = push(first=10, rows=5, **changes)
        with pytest.raises(ServerError) as refused:
            client.call(payload, push=message)
        assert refused.value.code == code
    close = SCHEMA.CloseWriter.new_message(writer=7, epoch=2)
    assert client.call(closeWriter=close)[0].which() == "done"
    # Nobody knows what it has pushed: it is not opened anew.
    with pytest.raises(ServerError) as refused:
        open_writer(client, resume=True)
    assert refused.value.code == "expired"
    assert open_writer(client).epoch == 1


@pytest.mark.parametrize("cut", ["rows", "lengths", "payload"])
def test_chunks_that_do_not_add_up_are_refused(client: WireClient, cut: str) -> None:
    client.call(createTable=table())
    open_writer(client)
    message, payload = push(1, 1, 0, 5)
    if cut == "rows":
        message.chunks[0].rows = 6
    elif cut == "lengths":
        payload = payload[:9] + struct.pack("<I", FRAME + 1) + payload[13:]
    else:
        payload = payload[:-1]
    with pytest.raises(ServerError) as refused:
        client.call(payload, push=message)
    assert refused.value.code == "schema"
    message, payload = push(1, 1, 0, 5)
    assert client.call(payload, push=message)[0].pushed.steps == 5


def test_final_rows_are_kept_as_the_last_of_a_truncated_episode(client: WireClient) -> None:
    client.call(createTable=table())
    open_writer(client)
    raw = bytes(FRAME)
    rows = b"".join(struct.pack("<BifI", flags, 0, 0, FRAME) for flags in (FIRST, 4, FINAL))
    payload = rows + 3 * raw
    head = {"stream": 0, "rows": 3, "firstStep": 0, "bytes": len(payload)}
    item = {"anchor": 1, "stream": 0, "before": 1, "after": 1}
    message = SCHEMA.Push.new_message(writer=7, epoch=1, sequence=1, chunks=[head], items=[item])
    assert client.call(payload, push=message)[0].which() == "pushed"
    sampled, content = sample(client, 1)
    assert content == payload
    assert list(sampled.probabilities) == [1.0]


def test_parameters_are_whole_versions(client: WireClient) -> None:
    header = b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
    file = struct.pack("<Q", len(header)) + header + struct.pack("<2f", 1.5, -2.5)
    get = SCHEMA.GetParameters.new_message(name="policy", newerThan=0)
    reply, payload = client.call(getParameters=get)
    assert (reply.parameters.version, payload) == (0, b"")
    assert client.call(file, putParameters={"name": "policy"})[0].parameters.version == 1
    reply, payload = client.call(getParameters=get)
    assert (reply.parameters.version, payload) == (1, file)
    get.newerThan = 1
    reply, payload = client.call(getParameters=get)
    assert (reply.parameters.version, payload) == (0, b"")
    with pytest.raises(ServerError) as refused:
        client.call(b"no safetensors file", putParameters={"name": "policy"})
    client.call(dropParameters="policy")
    assert client.call(getParameters={"name": "policy"})[0].parameters.version == 0
    assert refused.value.code == "parameters"


def test_tables_are_described_and_dropped(client: WireClient) -> None:
    client.call(createTable=table())
    described = client.call(describeTable="steps")[0].table
    described_columns = [column | {"finite": True} for column in json.loads(table())["columns"]]
    assert json.loads(described)["columns"] == described_columns
    with pytest.raises(ServerError) as refused:
        client.call(createTable=table(capacity=999))
    assert refused.value.code == "tableDiffers"
    stats = json.loads(client.call(stats=None)[0].stats)
    assert "steps" in stats["tables"]
    client.call(dropTable="steps")
    with pytest.raises(ServerError) as refused:
        client.call(describeTable="steps")
    assert refused.value.code == "unknownTable"


def test_requests_are_pipelined_and_a_sample_that_waits_holds_up_nobody(client: WireClient) -> None:
    client.call(createTable=table())
    open_writer(client)
    sample = SCHEMA.Sample.new_message(count=3, before=0, after=0)
    waiting = client.send(sample=sample, deadline_ms=60_000)
    described = client.send(describeTable="steps")
    assert client.receive()[0].id == described
    message, payload = push(1, 1, 0, 5)
    pushed = client.send(payload, push=message)
    replies = {reply.id: reply.which() for reply, _ in (client.receive(), client.receive())}
    assert replies == {waiting: "sampled", pushed: "pushed"}


def test_a_sample_from_nothing_ends_at_its_deadline(client: WireClient) -> None:
    client.call(createTable=table())
    for deadline_ms in (0, 20):
        sample = SCHEMA.Sample.new_message(count=3, before=0, after=0)
        client.send(sample=sample, deadline_ms=deadline_ms)
        error = client.receive()[0].error
        assert (str(error.code), error.message) == ("deadline", "")
        waited = json.loads(error.waitedFor)
        assert waited["awaited_table"] == "steps"
        assert "holds 0 items of the 1 that min_size asks for" in waited["sentence"]


def test_the_token_is_proved_and_never_sent() -> None:
    with running_server("innet://127.0.0.1:0", token="secret of the tests") as address:
        host, port = address.removeprefix("innet://").split(":")
        with WireClient((host, int(port)), token="secret of the tests") as client:
            assert client.incarnation != 0
            assert client.call(stats=None)[0].which() == "stats"
        with pytest.raises(ServerError) as refused:
            WireClient((host, int(port)))
        assert refused.value.code == "authentication"


def test_an_actor_reaches_no_writer_of_another_client(tmp_path: Path) -> None:
    """A writer is known by the random number that its client has chosen, which no reply has."""
    number = 0x5DEECE66D1234567
    of_learner, of_actor, path = "token of the learners", "token of the actors", f"{tmp_path}/s"
    with innet.Memory() as memory, memory.serve(f"unix://{path}", learner_token=of_learner, actor_token=of_actor):
        with WireClient(path, of_learner) as learner:
            learner.call(createTable=table())
        with WireClient(path, of_actor) as owner, WireClient(path, of_actor) as other:
            open_writer(owner, number)
            message, payload = push(1, 1, 0, 5, writer=number)
            assert owner.call(payload, push=message)[0].pushed.steps == 5
            for request in ({"stats": None}, {"list": None}, {"describeTable": "steps"}):
                assert str(number) not in str(other.call(**request)[0])
            stats = json.loads(other.call(stats=None)[0].stats)
            assert [writer["name"] for writer in stats["tables"]["steps"]["by_writer"]] == ["python"]
            open_writer(other, number + 1)
            for guess in (number - 1, number + 2, 0):
                close = SCHEMA.CloseWriter.new_message(writer=guess, epoch=1)
                assert other.call(closeWriter=close)[0].which() == "done"
                message, payload = push(1, 2, 5, 5, writer=guess)
                with pytest.raises(ServerError) as refused:
                    other.call(payload, push=message)
                assert refused.value.code == "expired"
                with pytest.raises(ServerError) as refused:
                    open_writer(other, guess, resume=True)
                assert refused.value.code == "expired"
            message, payload = push(1, 2, 5, 5, writer=number)
            assert owner.call(payload, push=message)[0].pushed.steps == 10


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<II", 12, 0),
        struct.pack("<II", 1 << 31, 0),
        struct.pack("<II", 16, 0) + b"\xff" * 16,
    ],
    ids=["no multiple of 8", "over the limit", "no message"],
)
def test_a_bad_frame_ends_its_own_connection_alone(client: WireClient, server: str, sent: bytes) -> None:
    with WireClient(server) as bad:
        bad.socket.sendall(sent)
        reply, _ = bad.receive()
        assert (reply.id, reply.which()) == (0, "error")
        with pytest.raises(ConnectionError):
            bad.receive()
    client.call(stats=None)


def test_anything_before_the_handshake_ends_the_connection(server: str) -> None:
    with WireClient(server, handshake=False) as client:
        with pytest.raises(ServerError) as refused:
            client.call(stats=None)
        assert refused.value.code == "protocol"
        with pytest.raises(ConnectionError):
            client.receive()


def test_another_protocol_version_is_named_by_both_ends(server: str) -> None:
    with WireClient(server, handshake=False) as client:
        hello = SCHEMA.Hello.new_message(protocol=9, release="9.9.9", nonce=bytes(32))
        with pytest.raises(ServerError, match=r"\b1\b.*\b9\b.*9\.9\.9") as refused:
            client.call(hello=hello)
        assert refused.value.code == "version"
