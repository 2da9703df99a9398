"""One memory over several servers, where one of them stops, runs out or says nothing, or a reader pauses."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from calls import Call, Lines
from serving import Server
from steps import VIEW, fill, step, table

import innet_drl as innet

pytestmark = pytest.mark.timeout(110)


def write(replay: innet.Replay, server: int, actions: range, priority: float = 1.0) -> None:
    """Writes steps with these numbers to one of the servers."""
    with replay.writer("t", 1, VIEW, server=server) as one:
        for t, action in enumerate(actions):
            one.append(**{**step(t, priority=np.array([priority])), "action": np.array([action])})


def in_process(stack: ExitStack, tmp_path: Path, name: str) -> str:
    """The address of a server in this process."""
    memory = stack.enter_context(innet.Memory())
    return stack.enter_context(memory.serve(f"unix://{tmp_path}/{name}")).addresses[0]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[str]]:
    """Addresses of two servers in this process."""
    with ExitStack() as stack:
        yield [in_process(stack, tmp_path, name) for name in "ab"]


@pytest.fixture
def silent() -> Iterator[str]:
    """An address that accepts connections and never answers them, like a host that drops packets."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        yield f"innet://127.0.0.1:{listening.getsockname()[1]}"


def test_batches_are_whole_where_a_server_loses_its_table(pair: list[str], log: Lines) -> None:
    with innet.connect(",".join(pair), tables=[table(capacity=2000)]) as shards:
        write(shards, 0, range(100))
        write(shards, 1, range(200, 300))
        with shards.batches("t", 32, VIEW, timeout=30, prefetch=8) as batches:
            next(batches)
            with innet.connect(pair[1]) as one:
                one.drop_table("t")
            found = [next(batches) for _ in range(40)]
        assert {len(batch) for batch in found} == {32}
        assert (found[-1].action < 200).all()


@pytest.mark.parametrize("sampler", ["prioritized", "uniform"])
def test_a_server_with_fewer_samples_left_than_its_share_gives_those(pair: list[str], sampler: str) -> None:
    once = table(capacity=2000, sampler=sampler, max_times_sampled=1)  # type: ignore[arg-type]
    with innet.connect(",".join(pair), tables=[once]) as shards:
        write(shards, 0, range(120), priority=0.01)
        write(shards, 1, range(200, 210), priority=1000.0)
        live = shards.stats()["tables"]["t"]["items"]
        drawn: list[int] = []
        while len(drawn) + 16 <= live:
            batch = shards.sample("t", 16, VIEW, timeout=30)
            assert len(batch) == 16
            drawn += batch.action.tolist()
        assert len(set(drawn)) == len(drawn)
        assert len(shards.sample("t", 16, VIEW, timeout=2, allow_short=True)) == live - len(drawn)


def test_a_call_at_its_deadline_uses_up_no_samples(pair: list[str]) -> None:
    with innet.connect(",".join(pair), tables=[table(capacity=2000, max_times_sampled=1)]) as shards:
        write(shards, 0, range(20))
        write(shards, 1, range(200, 220))
        live = shards.stats()["tables"]["t"]["items"]
        with pytest.raises(
            innet.errors.DeadlineError, match=f"{live} items, each for 1 samples at most and fewer than 64"
        ):
            shards.sample("t", 64, VIEW, timeout=0.2)
        assert shards.stats()["tables"]["t"]["items"] == live
        write(shards, 0, range(20, 100))
        assert len(shards.sample("t", 64, VIEW, timeout=30)) == 64


def test_a_server_is_not_away_after_a_pause_of_the_reader(pair: list[str], log: Lines) -> None:
    pixels = innet.Table("t", {"frame": ("uint8", (512, 512))}, 400)
    view = innet.Window(0, 0)
    with innet.connect(",".join(pair), tables=[pixels], grace=0.2) as shards:
        noise = np.random.default_rng(0).integers(0, 256, (1, 512, 512), np.uint8)
        for server in range(2):
            with shards.writer("t", 1, view, server=server) as writer:
                for _ in range(40):
                    writer.append(frame=noise, terminated=[False], truncated=[False], first=[False])
        with shards.batches("t", 32, view, timeout=30, prefetch=4) as batches:
            for _ in range(3):
                next(batches)
                # Longer than the servers hold a part, with the grace.
                time.sleep(0.6)
                assert len(next(batches)) == 32
    assert not [line for line in log.lines if "is away" in line]


@pytest.mark.parametrize("wait", [True, False])
def test_updates_do_not_wait_for_a_server_that_says_nothing(tmp_path: Path, log: Lines, wait: bool) -> None:
    with Server(f"unix://{tmp_path}/a") as first, Server(f"unix://{tmp_path}/b") as second:
        to = f"{first.address},{second.address}"
        with innet.connect(to, tables=[table(capacity=2000)], grace=0.3) as shards:
            write(shards, 0, range(100))
            write(shards, 1, range(200, 300))
            batch = shards.sample("t", 64, VIEW)
            second.send(signal.SIGSTOP)
            receipts = [shards.update_priorities("t", batch.ids, np.ones(64), wait=wait, timeout=None)]
            receipts.append(shards.update_priorities("t", [], []))
            at_second = int((batch.action >= 200).sum())
            assert (sum(one.applied for one in receipts), sum(one.stale for one in receipts)) == (
                64 - at_second,
                at_second,
            )
            assert any("is away" in line for line in log.lines)
            second.kill()


def actions_of(replay: innet.Replay) -> list[int]:
    """The actions of all items, sorted; of an item that is there twice, two."""
    found: dict[int, int] = {}
    while len(found) < replay.stats()["tables"]["t"]["items"]:
        batch = replay.sample("t", 64, VIEW)
        found |= dict(zip(batch.ids.tolist(), batch.action.tolist(), strict=True))
    return sorted(found.values())


def test_a_table_that_is_dropped_while_a_server_returns_stays_dropped(tmp_path: Path, log: Lines) -> None:
    with (
        Server(f"unix://{tmp_path}/a") as first,
        Server(f"unix://{tmp_path}/b") as second,
        innet.connect(f"{first.address},{second.address}", tables=[table(capacity=2000)]) as shards,
        innet.connect(f"{first.address},{second.address}") as other,
    ):
        write(shards, 0, range(20))
        shards.close()
        second.kill()
        second.start()
        other.sample("t", 4, VIEW)
        with innet.connect(second.address) as returned, innet.connect(first.address) as left:
            # From here on the other client knows which tables the server lacks.
            while "list" not in returned.stats()["server"]["latency_s"]:
                time.sleep(0.01)
            left.drop_table("t")
            log.wait_for("is sampled again")
            assert list(returned.tables()) == []


@pytest.mark.parametrize("how", ["stopped", "restarted", "emptied"])
def test_an_open_writer_waits_for_its_server_and_the_others_write_on(tmp_path: Path, log: Lines, how: str) -> None:
    snapshots = [] if how == "emptied" else [f"--snapshot={tmp_path}/snapshots"]
    with (
        Server(f"unix://{tmp_path}/a") as first,
        Server(f"unix://{tmp_path}/b", *snapshots) as second,
        innet.connect(f"{first.address},{second.address}", tables=[table(capacity=2000)], grace=0.3) as shards,
    ):
        writers = [shards.writer("t", 1, VIEW, name=f"w {number}", server=number) for number in range(2)]

        def play(number: int, steps: range) -> None:
            """Episodes of ten steps, whose actions are of this writer alone."""
            for t in steps:
                writers[number].append(**{**step(t), "action": np.array([1000 * number + t])})
            writers[number].flush()

        play(0, range(45))
        play(1, range(45))
        if how == "stopped":
            second.send(signal.SIGSTOP)
        else:
            second.send(signal.SIGTERM if how == "restarted" else signal.SIGKILL)
            second.wait()
        waiting = Call(lambda: play(1, range(45, 100)))
        play(0, range(45, 100))
        assert (shards.sample("t", 64, VIEW).action < 1000).all()
        assert waiting.is_alive()
        if how == "stopped":
            second.send(signal.SIGCONT)
        else:
            second.start()
        error = waiting.ended()
        log.wait_for("is sampled again")
        if how == "emptied":
            assert isinstance(error, innet.errors.ExpiredError)
            assert "w 1" in str(error)
            writers[1] = shards.writer("t", 1, VIEW, name="w 1", server=1)
            play(1, range(100))
        else:
            assert error is None
        for writer in writers:
            writer.close()
        assert actions_of(shards) == [*range(100), *range(1000, 1100)]
        assert len([line for line in log.lines if f"{second.address} is away" in line]) == 1


@pytest.mark.parametrize("order", ["silent first", "silent last"])
def test_connecting_leaves_out_a_server_that_says_nothing(pair: list[str], silent: str, log: Lines, order: str) -> None:
    to = [silent, *pair] if order == "silent first" else [*pair, silent]
    with innet.connect(",".join(to), tables=[table(capacity=2000)], timeout=3.0) as shards:
        fill(shards, 20)
        assert len(shards.sample("t", 8, VIEW)) == 8
    assert [line for line in log.lines if f"{silent} is away" in line]


def test_settings_are_no_sums(pair: list[str]) -> None:
    with innet.connect(",".join(pair), tables=[table(max_version_lag=2)]) as shards:
        found = shards.stats()["tables"]["t"]
    assert (found["max_version_lag"], found["min_size"]) == (2, 1)
