"""Calls that wait: after five seconds the log has the reason, once for each; calls that do not wait log nothing."""

from __future__ import annotations

import functools
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, Lines, limited, write_until_blocked
from serving import Server, until
from steps import VIEW, fill, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

TERMINAL = innet.NStep(n=1, observation="frame")
"""A view in which each step of an episode of one step is an item."""
IN_PROCESS_AND_REMOTE = pytest.mark.parametrize("make_replay", ["process", "unix"], indirect=True)


@IN_PROCESS_AND_REMOTE
def test_every_call_that_waits_says_once_what_for(make_replay: MakeReplay, log: Lines) -> None:
    names = ("sample", "ahead", "next", "short", "unsent", "append", "flush")
    replay = make_replay([limited(name) for name in names])
    empty = 'table "{}" holds 0 items of the 5 that min_size asks for; waiting for writers'
    full = 'table "{}" has 0 items sampled for '
    ahead, direct = replay.batches("ahead", 4, VIEW), replay.batches("next", 4, VIEW, prefetch=0)
    short = replay.batches("short", 4, VIEW, allow_short=True)

    unsent = replay.writer("unsent", 1, VIEW)
    for t in range(3):
        unsent.append(**step(t))

    def append() -> None:
        writer = replay.writer("append", 1, VIEW, chunk_steps=1)
        for t in range(10_000):
            writer.append(**step(t), timeout=None)

    calls = {
        empty.format("sample"): Call(lambda: replay.sample("sample", 4, VIEW)),
        empty.format("ahead"): Call(lambda: next(ahead)),
        empty.format("next"): Call(lambda: next(direct)),
        empty.format("short"): Call(lambda: next(short)),
        empty.format("unsent"): Call(lambda: replay.sample("unsent", 4, VIEW)),
        full.format("append"): Call(append),
        full.format("flush"): write_until_blocked(replay, "flush")[1],
    }
    for reason in calls:
        log.wait_for(reason)
    replay.close()
    for call in calls.values():
        assert isinstance(call.ended(), errors.ClosedError)
    for reason in calls:
        (line,) = [line for line in log.lines if reason in line]
        more = "without a timeout" if "append" in reason else r"for up to \d+ s more"
        assert re.match(rf"still waiting after \d+ s, {more}", line), line
    # A closed replay also names the writers whose pushes were not acknowledged.
    assert sum("still waiting" in line for line in log.lines) == len(calls)


def test_calls_that_do_not_wait_log_nothing(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table()])
    fill(replay, 100)
    with replay.batches("t", 8, VIEW) as batches:
        for _ in range(20):
            batch = next(batches)
            assert replay.update_priorities("t", batch.ids, np.ones(8)).stale == 0
    replay.sample("t", 8, VIEW, timeout=0)
    replay.put_parameters("p", {"w": np.ones(3)})
    assert replay.get_parameters("p") is not None
    with pytest.raises(errors.DeadlineError):
        replay.create_table(limited("empty"))
        replay.sample("empty", 8, VIEW, timeout=0.01)
    replay.close()
    assert not [line for line in log.lines if "waiting" in line]


@IN_PROCESS_AND_REMOTE
def test_ctrl_c_ends_a_wait_that_is_in_the_log(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([limited()])

    def interrupt() -> None:
        log.wait_for('table "t" holds 0 items')
        os.kill(os.getpid(), signal.SIGINT)

    interrupting = Call(interrupt)
    with pytest.raises(KeyboardInterrupt):
        replay.sample("t", 4, VIEW)
    assert interrupting.ended() is None
    assert len(log.lines) == 1


def test_a_server_that_does_not_answer_is_in_the_log(tmp_path: Path, log: Lines) -> None:
    with Server(f"unix://{tmp_path}/s") as server, innet.connect(server.address) as replay:
        server.send(signal.SIGSTOP)
        connected: list[innet.Replay] = []
        calls = [
            Call(replay.stats),
            Call(lambda: connected.append(innet.connect(server.address, timeout=60))),
        ]
        try:
            log.wait_for(f" s more: {server.address} has not answered")
            log.wait_for_lines(len(calls))
        finally:
            server.send(signal.SIGCONT)
        assert [call.ended() for call in calls] == [None, None]
        connected[0].close()
    assert len(log.lines) == len(calls)


@IN_PROCESS_AND_REMOTE
def test_a_sample_that_waits_counts_once(make_replay: MakeReplay) -> None:
    replay = make_replay([table(name) for name in ("sample", "ahead", "next")])
    # With open writers a sample is first tried without a wait.
    writers = [replay.writer(name, 1, VIEW) for name in ("sample", "ahead", "next")]
    with pytest.raises(errors.DeadlineError):
        replay.sample("sample", 4, VIEW, timeout=0)
    ahead, direct = replay.batches("ahead", 4, VIEW, prefetch=1), replay.batches("next", 4, VIEW, prefetch=0)
    calls = [Call(lambda: replay.sample("sample", 4, VIEW)), Call(lambda: next(ahead)), Call(lambda: next(direct))]

    def are_counted_once() -> bool:
        tables = replay.stats()["tables"].values()
        return all(table["blocked_samples"] == table["waiting_samples"] > 0 for table in tables)

    until(are_counted_once)
    for writer in writers:
        for t in range(10):
            writer.append(**step(t))
    assert [call.ended() for call in calls] == [None] * 3


def test_a_batch_that_is_asked_for_again_counts_once() -> None:
    # As an iterator that decodes ahead asks, five times a second.
    with innet.Memory([table()]) as replay, replay.batches("t", 4, VIEW, prefetch=0, timeout=0.01) as batches:
        for _ in range(3):
            with pytest.raises(errors.DeadlineError):
                next(batches)
        assert replay.stats()["tables"]["t"]["blocked_samples"] == 1


def waits_of_this_thread() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


@IN_PROCESS_AND_REMOTE
@pytest.mark.parametrize("how", ["sample", "batches"])
@pytest.mark.parametrize("count", [40, 80])
def test_writers_that_are_held_do_not_hold_up_a_sample(make_replay: MakeReplay, how: str, count: int) -> None:
    replay = make_replay([table(max_version_lag=1)])
    held = [replay.writer("t", 1, VIEW) for _ in range(count)]
    ready = replay.writer("t", 1, VIEW)
    for _ in range(3):
        replay.put_parameters("policy", {"w": np.ones(3)})
    assert replay.get_parameters("policy", writer=ready) is not None
    for writer in held:
        writer.append(**step(0))
    for t in range(10):
        ready.append(**step(t))
    began, waits = time.monotonic(), waits_of_this_thread()
    batch = replay.sample("t", 4, VIEW) if how == "sample" else next(replay.batches("t", 4, VIEW))
    # Each of them once took 0.2 s.
    assert time.monotonic() - began < 6
    # Of a server each of them asks once.
    if how == "sample" and isinstance(replay, innet.Memory):
        assert waits_of_this_thread() - waits < count / 2
    assert len(batch) == 4
    assert replay.stats()["tables"]["t"]["blocked_pushes"] == 0


@IN_PROCESS_AND_REMOTE
def test_a_sample_gets_the_steps_of_a_writer_that_was_held(make_replay: MakeReplay) -> None:
    replay = make_replay([table(max_version_lag=1)])
    held = replay.writer("t", 1, VIEW)
    for _ in range(3):
        replay.put_parameters("policy", {"w": np.ones(3)})
    for t in range(10):
        held.append(**step(t))
    sampling = Call(lambda: replay.sample("t", 4, VIEW, timeout=30))
    until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] > 0)
    # No call of the writer follows: the sample sends its steps.
    assert replay.get_parameters("policy", writer=held) is not None
    assert sampling.ended() is None


LARGE: dict[str, Any] = {"observation": innet.Column("uint8", (20_000,), codec="none"), "reward": "float32"}
LARGE_ROW: dict[str, Any] = {
    "observation": np.zeros((1, 20_000), np.uint8),
    "reward": np.zeros(1, np.float32),
    "terminated": [False],
    "truncated": [False],
}


def large_table(name: str, **options: Any) -> innet.Table:
    return innet.Table(name, LARGE, 1000, view=innet.Window(0, 0), **options)


def write(writer: innet.Writer) -> None:
    for _ in range(100):
        writer.append(**LARGE_ROW)
    writer.flush()


def test_full_receive_memory_of_a_server_is_in_the_log(tmp_path: Path, log: Lines) -> None:
    held = large_table("t", min_size=1, samples_per_insert=1.0, slack=2.0)

    with Server(f"unix://{tmp_path}/s", "--max-frame-bytes", "65536") as server:
        with innet.connect(server.address, tables=held) as replay:
            first = Call(lambda: write(replay.writer("t", 1, chunk_steps=1)))
            # Its next frame waits for memory, and the other writer's behind it.
            until(lambda: replay.stats()["tables"]["t"]["waiting_pushes"] > 0)
            calls = [first, Call(lambda: write(replay.writer("t", 1, chunk_steps=1)))]
            log.wait_for("more: the server's receive memory is full of pushes that wait")
            log.wait_for('more: table "t" has 0 items sampled')
            replay.close()
            assert all(isinstance(call.ended(), errors.ClosedError) for call in calls)


def test_pushes_that_wait_leave_receive_memory_for_another_table(tmp_path: Path) -> None:
    held = large_table("held", min_size=1, samples_per_insert=1.0, slack=2.0)
    with Server(f"unix://{tmp_path}/s", "--max-frame-bytes=1MiB") as server:
        with innet.connect(server.address, tables=[held, large_table("free")]) as replay:
            held_back = [Call(functools.partial(write, replay.writer("held", 1, chunk_steps=1))) for _ in range(4)]
            seen = [0]

            def settled() -> bool:
                """Whether they hold what they may."""
                seen.append(replay.stats()["receive_bytes"])
                return seen[-1] > 100_000 and seen[-10:] == seen[-1:] * 10

            until(settled)
            with replay.writer("free", 1, chunk_steps=1) as writer:
                for _ in range(100):
                    writer.append(**LARGE_ROW, timeout=10)
                writer.flush(timeout=10)
            assert replay.stats()["tables"]["free"]["steps"] == 100
            assert replay.stats()["tables"]["held"]["waiting_pushes"] > 0
            replay.close()
            assert all(isinstance(call.ended(), errors.ClosedError) for call in held_back)


def test_a_gradient_worker_says_who_is_missing(log: Lines) -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as client:
            worker = client.join_gradients("job", worker=0, workers=2, name="first", deadline=60.0)
            summing = Call(lambda: worker.sum(np.ones(1000, np.float32)))
            log.wait_for("worker 1")
            worker.leave()
            assert isinstance(summing.ended(), errors.ClosedError)
    (line,) = log.lines
    assert re.match(r"still waiting after \d+ s, for up to \d+ s more", line), line


@pytest.fixture(params=["process", "unix", "four I/O threads"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[innet.Replay]]:
    """Five clients of one table, in which one sample makes room for one step, and one step for one sample."""
    tables = [table(min_size=1, samples_per_insert=1.0, slack=4.0)]
    with ExitStack() as stack:
        if request.param == "process":
            yield [stack.enter_context(innet.Memory(tables))] * 5
            return
        address = f"unix://{tmp_path}/s" if request.param == "unix" else "innet://127.0.0.1:0"
        flags = [] if request.param == "unix" else ["--io-threads", "4"]
        server = stack.enter_context(Server(address, *flags))
        yield [stack.enter_context(innet.connect(server.address, tables=tables)) for _ in range(5)]


def served_in_rounds(
    waiting: Callable[[], int], calls: list[Callable[[], object]], let_one_pass: Callable[[], object]
) -> None:
    """Checks the order of calls that wait: each is made again once it has returned, behind the others.

    Args:
        waiting: Number of calls that wait.
        calls: Calls that wait.
        let_one_pass: Makes room for one of them.
    """
    rounds, passed = 5, 0
    expected = list(range(len(calls))) * rounds
    returned: list[int] = []

    def repeat(number: int) -> None:
        for _ in range(rounds):
            calls[number]()
            returned.append(number)

    def one_passed() -> bool:
        return len(returned) == passed

    def all_wait() -> bool:
        return waiting() == min(len(expected) - passed, len(calls))

    repeating = []
    for number in range(len(calls)):
        repeating.append(Call(functools.partial(repeat, number)))
        until(lambda: waiting() == len(repeating))
    while passed < len(expected):
        passed += 1
        let_one_pass()
        until(one_passed)
        assert returned == expected[:passed]
        until(all_wait)
    assert [call.ended() for call in repeating] == [None] * len(calls)


def write_one(writer: innet.Writer) -> None:
    writer.append(**step(0, episode=1))
    writer.flush()


def test_pushes_that_wait_are_served_in_the_order_in_which_they_began(clients: list[innet.Replay]) -> None:
    reader, *others = clients
    with ExitStack() as stack:
        writers = [stack.enter_context(each.writer("t", 1, TERMINAL, chunk_steps=1)) for each in others]
        for _ in range(5):  # slack and min_size
            write_one(writers[0])
        served_in_rounds(
            lambda: int(reader.stats()["tables"]["t"]["waiting_pushes"]),
            [functools.partial(write_one, writer) for writer in writers],
            lambda: reader.sample("t", 1, TERMINAL),
        )


def test_samples_that_wait_are_served_in_the_order_in_which_they_began(clients: list[innet.Replay]) -> None:
    source, *readers = clients
    with source.writer("t", 1, TERMINAL, chunk_steps=1) as writer:
        write_one(writer)
        for _ in range(4):  # slack
            source.sample("t", 1, TERMINAL)
        served_in_rounds(
            lambda: int(source.stats()["tables"]["t"]["waiting_samples"]),
            [functools.partial(reader.sample, "t", 1, TERMINAL) for reader in readers],
            lambda: write_one(writer),
        )
