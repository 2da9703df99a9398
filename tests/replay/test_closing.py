"""Calls that wait while another thread closes what they use, or while their server dies: they end, and say why."""

from __future__ import annotations

import functools
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from calls import Call, Lines, limited, write_until_blocked
from recording_relay import RecordingRelay
from serving import Server, until
from steps import VIEW, fill, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

ENDS = pytest.mark.timeout(45)
"""Less than the 60 s for which a client waits for a server that is away."""

FOREVER = 2**32 - 1
"""The deadline of a request that has none."""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(f"unix://{tmp_path}/s") as serving:
        yield serving


@ENDS
@pytest.mark.parametrize("call", ["sample", "next"])
def test_close_ends_a_sample_that_waits(make_replay: MakeReplay, call: str) -> None:
    replay = make_replay([limited()])
    batches = replay.batches("t", 4, VIEW)
    sample = {"sample": lambda: replay.sample("t", 4, VIEW), "next": lambda: next(batches)}[call]
    sampling = Call(sample)
    until(lambda: replay.stats()["tables"]["t"]["blocked_samples"] > 0)
    replay.close()
    error = sampling.ended()
    assert isinstance(error, errors.ClosedError)
    assert str(error) == "this replay is closed"
    with pytest.raises(errors.ClosedError, match="this replay is closed"):
        next(batches)


@ENDS
def test_closing_an_iterator_ends_its_next(make_replay: MakeReplay) -> None:
    replay = make_replay([limited()])
    for prefetch in (0, 4):
        batches = replay.batches("t", 4, VIEW, prefetch=prefetch)
        sampling = Call(functools.partial(next, batches))
        until(lambda: replay.stats()["tables"]["t"]["blocked_samples"] > 0)
        batches.close()
        assert isinstance(sampling.ended(), errors.ClosedError)
        replay.drop_table("t")
        replay.create_table(limited())


@ENDS
def test_close_of_the_replay_ends_a_push_that_waits(make_replay: MakeReplay) -> None:
    replay = make_replay([limited()])
    writer, writing = write_until_blocked(replay)
    replay.close()
    error = writing.ended()
    assert isinstance(error, errors.ClosedError)
    assert str(error) == "this replay is closed"
    with pytest.raises(errors.ClosedError):
        writer.append(**step(0))


@ENDS
def test_close_of_the_writer_ends_a_push_that_waits(make_replay: MakeReplay) -> None:
    replay = make_replay([limited()])
    writer, writing = write_until_blocked(replay)
    with pytest.raises(errors.DeadlineError):
        writer.close(timeout=0)
    assert isinstance(writing.ended(), errors.ClosedError)


@ENDS
@pytest.mark.parametrize("address", ["unix://{}/s", "innet://127.0.0.1:0"])
def test_close_of_the_server_ends_calls_of_its_clients(tmp_path: Path, address: str) -> None:
    with innet.Memory([limited(), limited("full")]) as memory:
        server = memory.serve(address.format(tmp_path))
        with innet.connect(server.addresses[0]) as client, innet.connect(server.addresses[0]) as idle:
            batches = client.batches("t", 4, VIEW)
            _, writing = write_until_blocked(client, "full")
            calls = [Call(lambda: client.sample("t", 4, VIEW)), Call(lambda: next(batches)), writing]
            # The iterator keeps two samples in flight.
            until(lambda: memory.stats()["tables"]["t"]["blocked_samples"] >= 3)
            server.close()
            for call in calls:
                error = call.ended()
                assert isinstance(error, errors.ClosedError), error
            for _ in range(2):
                with pytest.raises(errors.ClosedError, match=r"the server .*is closed"):
                    idle.sample("t", 4, VIEW)


@ENDS
def test_a_server_at_the_address_of_a_closed_one_is_used(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    with innet.Memory([table()]) as memory:
        server = memory.serve(address)
        with innet.connect(address) as client:
            server.close()
            with pytest.raises(errors.ClosedError):
                client.stats()
            with memory.serve(address):
                fill(client, 20)
                assert len(client.sample("t", 4, VIEW)) == 4


def test_a_block_without_an_exception_ends_when_its_steps_are_stored(tmp_path: Path) -> None:
    """The requests of its end have no deadline."""
    server, relayed = tmp_path / "server", tmp_path / "relay"
    with (
        innet.Memory([table()]) as memory,
        memory.serve(f"unix://{server}"),
        RecordingRelay(relayed, server) as relay,
        innet.connect(relay.address) as client,
    ):
        with client.writer("t", 1, VIEW) as writer:
            for t in range(10):
                writer.append(**step(t))
        deadlines = {kind: deadline for kind, deadline in relay.requests() if kind in ("push", "closeWriter")}
        assert deadlines == {"push": FOREVER, "closeWriter": FOREVER}
        assert memory.stats()["tables"]["t"]["steps"] == 10


def test_what_a_block_that_raised_has_closed_is_closed_again(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    fill(replay, 20)
    for handle in (replay.writer("t", 1, VIEW), replay.batches("t", 4, VIEW), replay):
        with pytest.raises(OSError, match="of the block"), handle:
            raise OSError("of the block")
        handle.close()


@ENDS
def test_a_writers_own_deadline_is_not_followed_by_another_wait(make_replay: MakeReplay) -> None:
    """The block ends without a flush: the memory is asked no more."""
    replay = make_replay([limited()])
    before = 0

    def write() -> None:
        nonlocal before
        with replay.writer("t", 1, VIEW, chunk_steps=1) as writer:
            for t in range(10_000):
                try:
                    writer.append(**step(t), timeout=0)
                    writer.flush(timeout=0)
                except errors.DeadlineError:
                    before = replay.stats()["tables"]["t"]["blocked_pushes"]
                    raise

    with pytest.raises(errors.DeadlineError):
        write()
    assert replay.stats()["tables"]["t"]["blocked_pushes"] == before


def test_an_array_that_a_sum_writes_to_is_not_read() -> None:
    values = np.zeros(1000, np.float32)
    with innet.Memory([]) as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as client, client.join_gradients("job", 0, 2, deadline=30) as worker:
            summing = Call(lambda: worker.sum(values))

            def is_refused() -> bool:
                try:
                    memory.put_parameters("p", {"w": values})
                except errors.ParametersError as error:
                    return "another call is writing to this array" in str(error)
                return False

            until(is_refused)
            worker.leave()
            assert isinstance(summing.ended(), errors.ClosedError)
            memory.put_parameters("p", {"w": values})


@ENDS
def test_who_is_waited_for_is_in_the_log_once(server: Server, log: Lines) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        writer = replay.writer("t", 1, VIEW, chunk_steps=1)
        server.kill()

        def write() -> None:
            for t in range(100):
                writer.append(**step(t))

        writing = Call(write)
        log.wait_for(f"waiting up to 60s for a server: cannot connect to {server.address}")
        replay.close()
        assert isinstance(writing.ended(), errors.ClosedError)
    assert len(log.lines) == 1, log.lines


@ENDS
def test_the_time_to_give_up_is_a_setting(server: Server) -> None:
    with innet.connect(server.address, tables=[table()], reconnect_for=0.2) as replay:
        server.kill()
        with pytest.raises(errors.ConnectError, match=r"cannot connect to unix://"):
            replay.sample("t", 4, VIEW)
    with pytest.raises(errors.ConfigError, match="reconnect_for is in seconds"):
        innet.connect(server.address, reconnect_for=-1)


@ENDS
def test_an_empty_server_gets_the_tables_of_its_client_again(server: Server, log: Lines) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        replay.create_table(table("dropped"))
        replay.drop_table("dropped")
        fill(replay, 20)
        batches = replay.batches("t", 4, VIEW)
        old = next(batches)
        server.kill()
        server.start()
        assert list(replay.tables()) == ["t"]
        assert replay.update_priorities("t", old.ids, np.ones(4)).stale == 4
        fill(replay, 20)
        assert len(next(batches)) == 4
        batches.close()


@ENDS
def test_a_writer_of_a_server_that_forgot_it_says_so(server: Server) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        writer = replay.writer("t", 1, VIEW)
        writer.append(**step(0))
        writer.flush()
        server.kill()
        server.start()
        writer.append(**step(1))
        with pytest.raises(errors.ExpiredError, match="open a new writer"):
            writer.flush()


@ENDS
def test_a_stopped_server_is_named_at_the_deadline(server: Server) -> None:
    with innet.connect(server.address, tables=[table()], grace=0.1) as replay:
        server.send(signal.SIGSTOP)
        try:
            with pytest.raises(errors.DeadlineError, match=f"{server.address} did not answer"):
                replay.sample("t", 4, VIEW, timeout=0.1)
        finally:
            server.send(signal.SIGCONT)
        fill(replay, 20)
        assert len(replay.sample("t", 4, VIEW)) == 4


@ENDS
def test_leaving_an_asynchronous_job_ends_waits(log: Lines) -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as client:
            updates = client.follow_gradients("job", 0, 2, values=4, threshold=2, deadline=60.0)
            # The second worker's gradient is missing: there is no mean, and no room for another gradient.
            assert updates.offer(np.zeros(4, np.float32), 0)
            calls = [Call(updates.wait), Call(lambda: updates.wait(for_gradient=True))]
            log.wait_for_lines(len(calls))
            assert all("the mean of update 1 is not complete" in line for line in log.lines)
            updates.leave()
            for call in calls:
                error = call.ended()
                assert isinstance(error, errors.ClosedError)
                assert str(error) == "this asynchronous gradient worker is closed"


@ENDS
def test_a_quick_start_of_a_client_before_its_server_is_not_in_the_log(tmp_path: Path, log: Lines) -> None:
    path = tmp_path / "s"
    connecting: list[innet.Replay] = []
    with socket.socket(socket.AF_UNIX) as starting:
        starting.bind(str(path))
        starting.listen()
        call = Call(lambda: connecting.append(innet.connect(f"unix://{path}", timeout=30)))
        for _ in range(3):  # it pauses before the third try
            starting.accept()[0].close()
    path.unlink()
    with innet.Memory() as memory, memory.serve(f"unix://{path}"):
        assert call.ended() is None
        connecting[0].close()
    assert log.lines == []


@ENDS
def test_connect_waits_for_a_server_that_is_not_up_yet(server: Server, log: Lines) -> None:
    server.kill()
    connecting: list[innet.Replay] = []
    call = Call(lambda: connecting.append(innet.connect(server.address, timeout=30)))
    log.wait_for(f"cannot connect to {server.address}")
    server.start()
    assert call.ended() is None
    assert connecting[0].tables() == {}
    connecting[0].close()


ADDRESSES = pytest.mark.parametrize("address", ["unix://{}/s", "innet://127.0.0.1:0"])


@ENDS
@ADDRESSES
def test_close_of_the_memory_ends_its_servers(tmp_path: Path, address: str) -> None:
    memory = innet.Memory([limited()])
    server = memory.serve(address.format(tmp_path), snapshot=tmp_path / "snapshots")
    with innet.connect(server.addresses[0]) as client, innet.connect(server.addresses[0]) as idle:
        _, writing = write_until_blocked(client)
        steps = memory.stats()["tables"]["t"]["steps"]
        memory.close()
        assert isinstance(writing.ended(), errors.ClosedError)
        with pytest.raises(errors.ClosedError, match=r"the server .*is closed"):
            idle.stats()
    assert ", closed>" in repr(server)
    server.close()
    with innet.Memory([limited()]) as again, again.serve("innet://127.0.0.1:0", snapshot=tmp_path / "snapshots"):
        assert again.stats()["tables"]["t"]["steps"] == steps


def is_given_up(memory: innet.Memory) -> bool:
    """Whether the table's line becomes empty, and an unlimited table would have no more steps."""
    until(lambda: memory.stats()["tables"]["t"]["waiting_pushes"] == 0)
    steps = memory.stats()["tables"]["t"]["steps"]
    # Lets a push through.
    memory.sample("t", 10, VIEW)
    fill(memory, 1)
    return bool(memory.stats()["tables"]["t"]["steps"] == steps + 1)


@ENDS
@ADDRESSES
def test_a_push_of_a_closed_client_leaves_the_line(tmp_path: Path, address: str) -> None:
    with innet.Memory([limited()]) as memory, memory.serve(address.format(tmp_path)) as server:
        client = innet.connect(server.addresses[0])
        writer, writing = write_until_blocked(client)
        client.close()
        assert isinstance(writing.ended(), errors.ClosedError)
        assert is_given_up(memory)
        with pytest.raises(errors.ClosedError):
            writer.flush()


@ENDS
@ADDRESSES
def test_samples_of_a_closed_client_leave_the_line(tmp_path: Path, address: str) -> None:
    with innet.Memory([limited()]) as memory, memory.serve(address.format(tmp_path)) as server:
        client = innet.connect(server.addresses[0])
        iterators = [client.batches("t", 4, VIEW, prefetch=prefetch) for prefetch in (0, 4)]
        calls = [Call(functools.partial(next, batches)) for batches in iterators]
        calls.append(Call(lambda: client.sample("t", 4, VIEW)))
        until(lambda: memory.stats()["tables"]["t"]["waiting_samples"] >= 4)
        client.close()
        until(lambda: memory.stats()["tables"]["t"]["waiting_samples"] == 0)
        assert all(isinstance(call.ended(), errors.ClosedError) for call in calls)
        del iterators


@ENDS
def test_a_push_leaves_the_line_when_its_writers_close_fails(tmp_path: Path) -> None:
    with (
        innet.Memory([limited()]) as memory,
        memory.serve(f"unix://{tmp_path}/s") as server,
        innet.connect(server.addresses[0]) as client,
    ):
        writer, writing = write_until_blocked(client)
        with pytest.raises(errors.DeadlineError):
            writer.close(timeout=0)
        assert isinstance(writing.ended(), errors.ClosedError)
        until(lambda: memory.stats()["tables"]["t"]["waiting_pushes"] == 0)
        steps = memory.stats()["tables"]["t"]["steps"]
        memory.sample("t", 10, VIEW)
        # The writer has kept the push, which applies once.
        writer.close()
        assert memory.stats()["tables"]["t"]["steps"] == steps + 1


@ENDS
def test_a_push_leaves_the_line_when_its_writers_block_fails(tmp_path: Path) -> None:
    with (
        innet.Memory([limited()]) as memory,
        memory.serve(f"unix://{tmp_path}/s") as server,
        innet.connect(server.addresses[0]) as client,
    ):
        with pytest.raises(errors.DeadlineError), client.writer("t", 1, VIEW, chunk_steps=1) as writer:
            # Several pushes may be on their way to the server.
            for t in range(20):
                writer.append(**step(t), timeout=None)
            until(lambda: memory.stats()["tables"]["t"]["waiting_pushes"] == 1)
            writer.flush(timeout=0)
        assert is_given_up(memory)
        with pytest.raises(errors.ClosedError, match="this writer is closed"):
            writer.flush()
