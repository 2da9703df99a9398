"""Queues and leases: pushes wait, no item is lost, and the items of a reader that is gone come again."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import SERVER_CLI, Server, served_memories, until

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

VIEW = innet.Window(0, 0)
NO_END: dict[str, Any] = {"acknowledge": True, "timeout": 10}


def queue(size: int = 100, **settings: Any) -> innet.Table:
    return innet.Table.queue("q", {"number": "int64"}, size, view=VIEW, **settings)


def append(writer: innet.Writer, *numbers: int) -> None:
    for number in numbers:
        writer.append(number=[number], terminated=[False], truncated=[False])


def fill(replay: innet.Replay, count: int) -> None:
    with replay.writer("q", 1, chunk_steps=4) as writer:
        append(writer, *range(count))


def numbers(batch: Any) -> list[int]:
    return [int(number) for number in np.asarray(batch.number)[:, 0]]


def stats(replay: innet.Replay) -> dict[str, Any]:
    found: dict[str, Any] = replay.stats()["tables"]["q"]
    return found


@pytest.mark.parametrize("end", [innet.Writer.flush, innet.Writer.close])
def test_a_push_to_a_full_queue_waits_and_says_why(make_replay: MakeReplay, end: Callable[..., None]) -> None:
    replay = make_replay([queue(4)])
    writer = replay.writer("q", 1, chunk_steps=2)
    append(writer, 0, 1, 2, 3)
    writer.flush()
    append(writer, 4)
    with pytest.raises(errors.DeadlineError, match=r'table "q" is full: 4 of its items .* queue_size is 4'):
        end(writer, timeout=0.3)
    with replay.batches("q", 2, **NO_END, prefetch=0) as batches:
        first = next(batches)
        # Read, and not acknowledged.
        with pytest.raises(errors.DeadlineError, match=r"reader .* has 2 leased, for"):
            end(writer, timeout=0.3)
        first.acknowledge()
        end(writer, timeout=10)
    assert numbers(first) == [0, 1]
    assert numbers(replay.sample("q", 3, timeout=10)) == [2, 3, 4]
    assert stats(replay)["evicted_unread_items"] == 0


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_a_batch_belongs_to_its_reader_until_it_is_acknowledged(make_replay: MakeReplay, prefetch: int) -> None:
    replay = make_replay([queue()])
    fill(replay, 60)
    with replay.batches("q", 5, **NO_END, lease=600, prefetch=prefetch) as batches:
        first, second = next(batches), next(batches)
        assert (numbers(first), numbers(second)) == ([*range(5)], [*range(5, 10)])
        until(lambda: len(stats(replay)["leases"]) >= 2 + prefetch)
        now = stats(replay)
        assert (now["items"], now["leased_items"]) == (60, 10)
        begun = [lease for lease in now["leases"] if lease["since_s"] is not None]
        assert [lease["items"] for lease in begun] == [5, 5]
        assert all(lease["reader"] and lease["since_s"] >= 0 for lease in begun)
        second.acknowledge()
        assert (stats(replay)["items"], stats(replay)["leased_items"]) == (55, 5)
    until(lambda: stats(replay)["leases"] == [])
    # What the first reader did not acknowledge, or had ahead, is where it was.
    with replay.batches("q", 5, **NO_END, prefetch=prefetch) as batches:
        rest = []
        for _ in range(11):
            batch = next(batches)
            rest += numbers(batch)
            batch.acknowledge()
    assert rest == [*range(5), *range(10, 60)]
    assert (stats(replay)["items"], stats(replay)["evicted_items"]) == (0, 0)


def test_an_acknowledgement_that_comes_twice_or_late_is_refused(make_replay: MakeReplay) -> None:
    replay = make_replay([queue()])
    fill(replay, 8)
    with replay.batches("q", 4, **NO_END, prefetch=0) as batches:
        done, late = next(batches), next(batches)
        done.acknowledge()
        with pytest.raises(errors.LeaseError, match='table "q" has no lease: it was acknowledged before'):
            done.acknowledge()
        for part in (late[:4], late[1:]):
            with pytest.raises(errors.ConfigError, match="no lease"):
                part.acknowledge()
    until(lambda: stats(replay)["leased_items"] == 0)
    for _ in range(2):
        with pytest.raises(errors.LeaseError, match='table "q" has no lease'):
            late.acknowledge()
    assert numbers(replay.sample("q", 4, timeout=10)) == [4, 5, 6, 7]


def test_a_lease_ends_after_its_seconds(make_replay: MakeReplay) -> None:
    replay = make_replay([queue()])
    fill(replay, 8)
    with replay.batches("q", 4, **NO_END, lease=0.05, prefetch=1) as batches:
        late = next(batches)
        until(lambda: stats(replay)["leased_items"] == 0)
        with pytest.raises(errors.LeaseError):
            late.acknowledge()
        # Those ahead of their caller have no lease that could be over.
        assert numbers(next(batches)) == [4, 5, 6, 7]
        again = next(batches)
        assert numbers(again) == [0, 1, 2, 3]


def test_leases_are_for_tables_whose_items_end_and_for_whole_batches(make_replay: MakeReplay) -> None:
    replay = make_replay([innet.Table("endless", {"number": "int64"}, 100, view=VIEW), queue()])
    fill(replay, 4)
    with replay.batches("endless", 1, **NO_END) as batches, replay.writer("endless", 1) as writer:
        append(writer, 1)
        writer.flush()
        with pytest.raises(errors.ConfigError, match="max_times_sampled"):
            next(batches)
    with replay.batches("q", 4, timeout=10) as batches, pytest.raises(errors.ConfigError, match="no lease"):
        next(batches).acknowledge()
    mix = innet.Mix({"q": 0.5, "endless": 0.5})
    wrong: list[tuple[Any, dict[str, Any]]] = [(mix, NO_END), ("q", {"lease": 5.0}), ("q", {**NO_END, "lease": 0.0})]
    for table, arguments in wrong:
        with pytest.raises(errors.ConfigError, match="acknowledge=True"):
            replay.batches(table, 2, **arguments)


def test_a_batch_of_tensors_is_acknowledged(make_replay: MakeReplay) -> None:
    pytest.importorskip("torch")
    replay = make_replay([queue()])
    fill(replay, 4)
    with replay.batches("q", 4, **NO_END, device="cpu") as batches:
        batch = next(batches)
        with pytest.raises(errors.ConfigError, match="no lease"):
            batch[:2].acknowledge()
        batch.acknowledge()
        with pytest.raises(errors.LeaseError):
            batch.acknowledge()
    assert stats(replay)["items"] == 0


def test_the_definition_of_a_queue() -> None:
    table = queue(10)
    assert (table.sampler, table.max_times_sampled, table.queue_size, table.capacity) == ("fifo", 1, 10, 4096)
    assert queue(1 << 20).capacity == 1 << 24
    assert queue(10, capacity=20, max_times_sampled=3).capacity == 20
    for wrong, reason in (
        ({"size": 0}, "1 to 2"),
        ({"size": 30, "capacity": 20}, "queue_size"),
        ({"size": 5, "samples_per_insert": 1.0}, "queue_size"),
        ({"size": 5, "min_size": 6}, "queue_size"),
    ):
        with pytest.raises(errors.TableError, match=reason):
            queue(**wrong)


def test_several_servers_share_no_queue(tmp_path: Path) -> None:
    with served_memories(tmp_path, 2) as address, innet.connect(address) as replay:
        with pytest.raises(errors.ConfigError, match="is a queue, whose order several servers do not share"):
            replay.create_table(queue())


READER = """
import sys, innet_drl as innet
with innet.connect(sys.argv[1]) as replay, replay.batches("q", 8, acknowledge=True, prefetch=4) as batches:
    for number, batch in enumerate(batches):
        print(*batch.number[:, 0], flush=True)
        if number < 3:
            batch.acknowledge()
        if number == 4:
            sys.stdin.read()
"""


def test_the_items_of_a_killed_reader_come_again() -> None:
    """Three batches are acknowledged, two are not, and others are on their way when it is killed."""
    with Server("innet://127.0.0.1:0") as server, innet.connect(server.address, tables=[queue(200)]) as replay:
        fill(replay, 120)
        command = [sys.executable, "-c", READER, server.address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout is not None
            seen = [[int(number) for number in reader.stdout.readline().split()] for _ in range(5)]
            assert [number for batch in seen for number in batch] == [*range(40)]
            # Without an end, batches ahead are leased, too.
            until(lambda: stats(replay)["leased_items"] >= 16 + 4 * 8)
            reader.send_signal(signal.SIGKILL)
        until(lambda: stats(replay)["leases"] == [])
        with replay.batches("q", 8, **NO_END) as batches:
            rest = []
            for _ in range(12):
                batch = next(batches)
                rest += numbers(batch)
                batch.acknowledge()
        assert rest == [*range(24, 120)]
        assert (stats(replay)["items"], stats(replay)["evicted_items"]) == (0, 0)


def test_a_restarted_server_has_leased_items_as_unread(tmp_path: Path) -> None:
    with Server(f"unix://{tmp_path}/socket", "--snapshot", str(tmp_path / "saved")) as server:
        with innet.connect(server.address, tables=[queue()], reconnect_for=60) as replay:
            fill(replay, 20)
            with replay.batches("q", 5, **NO_END, prefetch=2) as batches:
                done, kept = next(batches), next(batches)
                done.acknowledge()
                subprocess.run([*SERVER_CLI, "snapshot", server.address], check=True, stdout=subprocess.DEVNULL)
                server.kill()
                server.start()
                with pytest.raises(errors.LeaseError):
                    kept.acknowledge()
                rest = []
                for _ in range(3):
                    batch = next(batches)
                    rest += numbers(batch)
                    batch.acknowledge()
            assert rest == [*range(5, 20)]
            assert stats(replay)["items"] == 0
