"""`max_version_lag`: writers whose parameters are too old wait until they get newer ones."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from calls import Call, Lines
from serving import until
from steps import VIEW, fill, step, table
from training import small

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors, train

IN_PROCESS_AND_REMOTE = pytest.mark.parametrize("make_replay", ["process", "unix"], indirect=True)
LAG = 2


def publish(replay: innet.Replay, versions: int, name: str = "policy") -> None:
    for _ in range(versions):
        replay.put_parameters(name, {"w": np.ones(3, np.float32)})


def stats(replay: innet.Replay, name: str = "t") -> dict[str, Any]:
    found: dict[str, Any] = replay.stats()["tables"][name]
    return found


def lags_above(histogram: dict[str, Any], most: int) -> int:
    """Pushes of writers that were further behind; `most` is a power of two."""
    return sum(count for bound, count in histogram["buckets"] if bound is None or bound > most)


def write(writer: innet.Writer, steps: int = 1) -> Call:
    def call() -> None:
        for t in range(steps):
            writer.append(**step(t))
        writer.flush(timeout=None)

    return Call(call)


@IN_PROCESS_AND_REMOTE
def test_a_writer_of_a_table_that_was_made_again_gets_parameters(make_replay: MakeReplay) -> None:
    definition = table(max_version_lag=LAG)
    replay = make_replay([definition])
    publish(replay, 1 + 2 * LAG)
    for _ in range(2):
        with replay.writer("t", 1, VIEW) as writer:
            assert replay.get_parameters("policy", writer=writer) is not None
            assert write(writer).ended() is None
        replay.drop_table("t")
        replay.create_table(definition)


@IN_PROCESS_AND_REMOTE
def test_a_writer_with_old_parameters_waits_until_it_gets_newer_ones(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table(max_version_lag=LAG)])
    slow = replay.writer("t", 1, VIEW, name="slow")
    publish(replay, 1)
    assert replay.get_parameters("policy", writer=slow) is not None
    publish(replay, LAG)
    assert write(slow).ended() is None
    publish(replay, 1)
    writing = write(slow, 5)
    log.wait_for(
        'writer "slow" of table "t" makes its steps with version 1 of "policy", and version 4 is the newest: with'
    )
    now = stats(replay)
    assert (now["max_version_lag"], now["outdated_pushes"], now["waiting_pushes"]) == (LAG, 1, 1)
    assert "max_version_lag 2" in now["pushes_wait_for"]

    # Others pass it.
    with replay.writer("t", 1, VIEW) as other:
        assert replay.get_parameters("policy", writer=other) is not None
        assert write(other, 20).ended() is None
    assert stats(replay)["inserted_steps"] == 1 + 20
    assert writing.is_alive()

    newer = replay.get_parameters("policy", newer_than=1, writer=slow)
    assert newer is not None
    assert newer.version == 4
    assert writing.ended() is None
    now = stats(replay)
    assert (now["inserted_steps"], now["outdated_pushes"], now["pushes_wait_for"]) == (1 + 20 + 5, 0, None)
    assert now["blocked_pushes"] == 1
    assert now["version_lag"]["count"] == 3
    assert now["version_lag"]["sum"] == LAG


@IN_PROCESS_AND_REMOTE
def test_without_newer_parameters_nothing_waits(make_replay: MakeReplay) -> None:
    replay = make_replay([table(max_version_lag=LAG), table("any")])
    writer = replay.writer("t", 1, VIEW)
    assert write(writer).ended() is None
    # Nothing newer: the writer has what there is.
    assert replay.get_parameters("policy", writer=writer) is None
    publish(replay, LAG)
    assert write(writer).ended() is None
    publish(replay, 1)
    newest = replay.get_parameters("policy", writer=writer)
    assert newest is not None
    for _ in range(3):
        assert replay.get_parameters("policy", newer_than=newest.version, writer=writer) is None
        assert write(writer, 20).ended() is None
    publish(replay, 10)
    fill(replay, 20, name="any")
    assert stats(replay, "any")["version_lag"]["count"] == 0


@IN_PROCESS_AND_REMOTE
def test_a_writer_that_gets_no_parameters_is_told_so(make_replay: MakeReplay) -> None:
    replay = make_replay([table(max_version_lag=LAG)])
    publish(replay, LAG + 1)
    writer = replay.writer("t", 1, VIEW, name="scripted")
    writer.append(**step(0))
    reason = (
        'writer "scripted" of table "t" has got no parameters, and "policy" has version 3: .*get_parameters with this'
    )
    with pytest.raises(errors.DeadlineError, match=reason):
        writer.flush(timeout=0.1)
    # Its steps are kept.
    assert replay.get_parameters("policy", writer=writer) is not None
    writer.flush()
    assert stats(replay)["inserted_steps"] == 1


@IN_PROCESS_AND_REMOTE
def test_the_wait_ends_by_ctrl_c_and_close(make_replay: MakeReplay, log: Lines) -> None:
    replay = make_replay([table(max_version_lag=LAG), table("dropped", max_version_lag=LAG)])
    publish(replay, LAG + 1)
    writer, of_dropped = replay.writer("t", 1, VIEW), replay.writer("dropped", 1, VIEW)
    writer.append(**step(0))

    def interrupt() -> None:
        try:
            log.wait_for("has got no parameters")
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    interrupting = Call(interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.flush(timeout=60)
    assert interrupting.ended() is None

    dropped = write(of_dropped)
    until(lambda: stats(replay, "dropped")["outdated_pushes"] == 1)
    replay.drop_table("dropped")
    assert isinstance(dropped.ended(), errors.UnknownTableError)

    waiting = Call(lambda: writer.flush(timeout=None))
    until(lambda: stats(replay)["outdated_pushes"] == 1)
    # It makes no more steps: closing stores the last one.
    writer.close()
    assert isinstance(waiting.ended(), errors.ClosedError)
    assert stats(replay)["inserted_steps"] == 1


def test_the_bound_holds_beside_a_learner_that_publishes(make_replay: MakeReplay) -> None:
    replay = make_replay([table(max_version_lag=LAG)])
    ended = threading.Event()

    def learn() -> None:
        while not ended.is_set():
            publish(replay, 1)

    def act() -> None:
        with replay.writer("t", 1, VIEW, chunk_steps=1) as writer:
            for t in range(200):
                while True:
                    replay.get_parameters("policy", writer=writer)
                    try:
                        writer.append(**step(t), timeout=0.01)
                        break
                    except errors.DeadlineError:
                        pass

    learning = Call(learn)
    acting = [Call(act) for _ in range(2)]
    assert [call.ended() for call in acting] == [None, None]
    ended.set()
    assert learning.ended() is None
    now = stats(replay)
    assert now["inserted_steps"] == 400
    assert lags_above(now["version_lag"], LAG) == 0


def test_each_of_several_servers_learns_what_its_writers_have(tmp_path: Path) -> None:
    with ExitStack() as stack:
        memories = [stack.enter_context(innet.Memory()) for _ in range(2)]
        servers = [stack.enter_context(one.serve(f"unix://{tmp_path}/{i}")) for i, one in enumerate(memories)]
        address = ",".join(server.addresses[0] for server in servers)
        shards = stack.enter_context(innet.connect(address, tables=[table(max_version_lag=LAG)]))
        # The first one's server is not that of the last writer that was opened.
        writers = [stack.enter_context(shards.writer("t", 1, VIEW, server=i)) for i in range(2)]
        for turn in range(3):
            publish(shards, LAG + 1)
            for writer in writers:
                assert shards.get_parameters("policy", writer=writer) is not None
            for writer in writers:
                writer.append(**step(turn))
                writer.flush(timeout=10)
        each = [one["tables"]["t"] for one in shards.stats()["shards"].values()]
        assert [(one["inserted_steps"], one["version_lag"]["sum"]) for one in each] == [(3, 0), (3, 0)]


@IN_PROCESS_AND_REMOTE
def test_steps_are_older_than_the_bound_by_what_is_published_during_their_chunk(make_replay: MakeReplay) -> None:
    """Each step has the version that it was made with, and the test knows the newest one when it was stored."""
    columns: dict[str, Any] = {"step": "int64", "version": "int64"}
    rows, chunk_steps, most_published = innet.Window(0, 0), 4, 2
    replay = make_replay([innet.Table("t", columns, 1000, sampler="fifo", max_times_sampled=1, max_version_lag=LAG)])
    random, newest, made_with = np.random.default_rng(0), 0, 0
    newest_when_stored: list[int] = []
    with replay.writer("t", 1, rows, chunk_steps=chunk_steps) as writer:

        def fetch() -> int:
            parameters = replay.get_parameters("policy", writer=writer)
            return 0 if parameters is None else parameters.version

        for number in range(400):
            published = int(random.integers(most_published + 1))
            publish(replay, published)
            newest += published
            if random.random() < 0.1:
                made_with = fetch()
            step_made: dict[str, Any] = {"step": np.array([number]), "version": np.array([made_with])}
            full = number % chunk_steps == chunk_steps - 1
            try:
                writer.append(**step_made, terminated=[False], truncated=[False], timeout=None)
                if full:
                    writer.flush(timeout=0.02)
            except errors.DeadlineError:
                # The chunk passes with its old steps.
                made_with = fetch()
                writer.flush(timeout=None)
            if full:
                newest_when_stored += [newest] * chunk_steps
    assert stats(replay)["blocked_pushes"] > 0
    stored = replay.sample("t", 400, rows)
    assert stored.step.ravel().tolist() == list(range(400))
    lags = np.array(newest_when_stored) - stored.version.ravel()
    assert LAG < lags.max() <= LAG + chunk_steps * most_published


def test_a_snapshot_keeps_the_bound(tmp_path: Path) -> None:
    limited = table(max_version_lag=LAG)
    with innet.Memory([limited]) as memory:
        fill(memory, 20)
        memory.save(tmp_path / "memory")
    with innet.Memory() as memory:
        memory.restore(tmp_path / "memory")
        assert memory.tables()["t"] == limited
        # Versions count from 1 again, as do the writers.
        publish(memory, LAG)
        fill(memory, 20)
    with innet.Memory([limited]) as memory, pytest.raises(errors.TableError, match="max_version_lag is 2, asked for 3"):
        memory.create_table(table(max_version_lag=3))


@pytest.mark.timeout(300)
def test_the_bound_holds_in_a_run(tmp_path: Path) -> None:
    lag = 4
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        config = small(replay=server.addresses[0], max_version_lag=lag, publish_period=1, actors=2)
        result = train.run(config, folder=tmp_path / "run")
        tables = memory.stats()["tables"]
        (run,) = (table for name, table in tables.items() if not name.endswith("/reports"))
    assert result.agent_steps > 0
    assert run["max_version_lag"] == lag
    assert run["version_lag"]["count"] > 0
    assert lags_above(run["version_lag"], lag) == 0
