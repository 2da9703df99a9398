"""A table that is dropped and made again is a new table: iterators, writers and ids of the old one end."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from calls import Call
from serving import until
from steps import VIEW, fill, step, still_works, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

pytestmark = pytest.mark.timeout(60)

DROPPED = 'there is no table "t"; it was dropped'


@pytest.fixture(params=["process", "server", "servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    """A replay with a table: in this process, of a server, of two servers."""
    with ExitStack() as stack:
        if request.param == "process":
            yield stack.enter_context(innet.Memory([table()]))
            return
        names = ["a"] if request.param == "server" else ["a", "b"]
        servers = [
            stack.enter_context(stack.enter_context(innet.Memory()).serve(f"unix://{tmp_path}/{name}"))
            for name in names
        ]
        addresses = ",".join(server.addresses[0] for server in servers)
        yield stack.enter_context(innet.connect(addresses, tables=[table()]))


def fill_all(replay: innet.Replay) -> None:
    """Steps at every server."""
    for number in range(2):
        with replay.writer("t", 1, VIEW, server=number) as writer:
            for t in range(20):
                writer.append(**step(t))


def make_again(replay: innet.Replay) -> None:
    replay.drop_table("t")
    replay.create_table(table())


@pytest.mark.parametrize("allow_short", [False, True])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_ends_with_its_table(replay: innet.Replay, prefetch: int, allow_short: bool) -> None:
    fill_all(replay)
    with replay.batches("t", 4, VIEW, prefetch=prefetch, allow_short=allow_short, timeout=20) as batches:
        old = next(batches)
        make_again(replay)
        fill_all(replay)
        # Some were sampled ahead.
        with pytest.raises(errors.UnknownTableError) as raised:
            for _ in range(20):
                next(batches)
        assert DROPPED in str(raised.value)
        # It does not begin again.
        with pytest.raises((errors.UnknownTableError, errors.ClosedError)):
            next(batches)
    # What is asked for by name is of the new table.
    receipt = replay.update_priorities("t", old.ids, np.ones(4))
    assert (receipt.applied, receipt.stale) == (0, 4)
    assert len(replay.sample("t", 4, VIEW, timeout=10)) == 4
    with replay.batches("t", 4, VIEW, prefetch=prefetch, allow_short=allow_short, timeout=20) as batches:
        for _ in range(5):
            assert len(next(batches)) == 4


def test_updates_after_the_drop_are_stale(replay: innet.Replay) -> None:
    """Updates that nobody waits for, too: their connection has a number for the old table."""
    fill_all(replay)
    ids = replay.sample("t", 4, VIEW, timeout=10).ids
    for _ in range(3):
        receipts = [replay.update_priorities("t", ids, np.ones(4), wait=False) for _ in range(2)]
        receipts.append(replay.update_priorities("t", ids, np.ones(4)))
        expected = 12 if replay.stats()["tables"]["t"]["items"] else 0
        assert sum(receipt.applied for receipt in receipts) == expected
        assert sum(receipt.stale for receipt in receipts) == 12 - expected
        make_again(replay)


def is_asked(replay: innet.Replay) -> bool:
    """Whether a sample has reached the table. A client of several servers asks them again and again."""
    stats = replay.stats()
    answered = stats.get("server", {}).get("latency_s", {}).get("sample", {}).get("count", 0)
    return bool(stats["tables"]["t"]["waiting_samples"] or answered > 10)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_that_waits_ends_with_its_table(replay: innet.Replay, prefetch: int) -> None:
    with replay.batches("t", 4, VIEW, prefetch=prefetch, timeout=None) as batches:
        waiting = Call(functools.partial(next, batches))
        until(lambda: is_asked(replay))
        make_again(replay)
        assert isinstance(waiting.ended(), errors.UnknownTableError)


def test_a_sample_that_waits_ends_with_its_table(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    waiting = Call(lambda: replay.sample("t", 4, VIEW, timeout=None))
    until(lambda: is_asked(replay))
    make_again(replay)
    error = waiting.ended()
    assert isinstance(error, errors.UnknownTableError)
    assert DROPPED in str(error)


def test_a_writer_ends_with_its_table(replay: innet.Replay) -> None:
    writer = replay.writer("t", 1, VIEW)
    without_steps = replay.writer("t", 1, VIEW)
    writer.append(**step(0))
    writer.flush()
    make_again(replay)
    with pytest.raises(errors.UnknownTableError) as raised:
        for t in itertools.count(1):
            writer.append(**step(t))
            writer.flush()
    assert DROPPED in str(raised.value)
    # It has nothing to lose.
    without_steps.close()
    assert replay.stats()["tables"]["t"]["steps"] == 0
    assert still_works(replay)


def test_calls_on_a_table_that_is_gone_say_that_it_was_dropped(replay: innet.Replay) -> None:
    fill_all(replay)
    writer = replay.writer("t", 1, VIEW)
    without_steps = replay.writer("t", 1, VIEW)
    with replay.batches("t", 4, VIEW, prefetch=0) as batches:
        next(batches)
        replay.drop_table("t")
        with pytest.raises(errors.UnknownTableError, match="it was dropped"):
            for _ in range(20):
                next(batches)
    with pytest.raises(errors.UnknownTableError, match="it was dropped"):
        for t in itertools.count():
            writer.append(**step(t))
            writer.flush()
    without_steps.close()
    with pytest.raises(errors.UnknownTableError):
        replay.sample("t", 4, VIEW)


def test_an_emptied_table_is_the_same_table(replay: innet.Replay) -> None:
    fill_all(replay)
    writer = replay.writer("t", 1, VIEW)
    writer.append(**step(0))
    with replay.batches("t", 4, VIEW, timeout=20) as batches:
        next(batches)
        replay.empty_table("t")
        for t in range(1, 20):
            writer.append(**step(t))
        writer.close()
        fill(replay, 20)
        for _ in range(20):
            next(batches)
