"""Writers that a sample waits for: their counts, their names, and the end of a wait for writers that are gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from calls import Call
from serving import Server, served_memories, until
from steps import VIEW, fill, step, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def counts(stats: dict[str, Any], name: str = "t") -> tuple[int, int]:
    """Connected and resumable writers of a memory."""
    of = stats["tables"][name]
    return of["connected_writers"], of["resumable_writers"]


def test_a_wait_without_writers_ends(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=100)])
    with pytest.raises(errors.NoWritersError, match=r'^table "t" has had no writer since it was made, \d+ s ago$'):
        replay.sample("t", 4, VIEW, timeout=None, writers_timeout=1)
    with replay.writer("t", 1, VIEW, name="actor 3") as writer:
        writer.append(**step(0))
    last = r'^no writer of table "t" has been connected for \d+ s; the last was "actor 3"$'
    with pytest.raises(errors.NoWritersError, match=last):
        replay.sample("t", 4, VIEW, timeout=None, writers_timeout=1)
    # The time counts from the last batch on, over calls that end earlier.
    with replay.batches("t", 4, VIEW, timeout=0.3, writers_timeout=1) as batches:
        ended: list[errors.DeadlineError] = []
        while not ended or type(ended[-1]) is errors.DeadlineError:
            with pytest.raises(errors.DeadlineError) as caught:
                next(batches)
            ended.append(caught.value)
    assert isinstance(ended[-1], errors.NoWritersError)
    assert len(ended) > 2
    # Nobody asked for an end.
    with pytest.raises(errors.DeadlineError, match="waiting for writers") as waited:
        replay.sample("t", 4, VIEW, timeout=1.5, writers_timeout=None)
    assert not isinstance(waited.value, errors.NoWritersError)
    with pytest.raises(
        errors.ConfigError, match=r"writers_timeout is in seconds, 0 to 1e9, or None to wait without limit; got -1"
    ):
        replay.sample("t", 4, VIEW, writers_timeout=-1)


def test_writers_that_go_during_a_wait_end_it(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=100), table("other")])
    writer = replay.writer("t", 1, VIEW, name="actor 3")
    # The table of the wait counts, not another one of a mix.
    fill(replay, 20, name="other")
    mixed = Call(partial(replay.sample, innet.Mix({"t": 0.5, "other": 0.5}), 8, VIEW, timeout=3, writers_timeout=0.5))
    waiting = Call(partial(replay.sample, "t", 4, VIEW, timeout=None, writers_timeout=0.5))
    assert type(mixed.ended()) is errors.DeadlineError
    writer.close()
    ended = waiting.ended()
    assert isinstance(ended, errors.NoWritersError)
    assert 'the last was "actor 3"' in str(ended)
    # A batch may be short at the deadline, and no sooner.
    with pytest.raises(errors.DeadlineError) as waited:
        replay.sample("t", 4, VIEW, allow_short=True, timeout=1.5, writers_timeout=0.5)
    assert not isinstance(waited.value, errors.NoWritersError)


def test_a_server_that_is_away_is_not_one_without_writers(tmp_path: Path) -> None:
    with (
        Server(f"unix://{tmp_path}/0") as near,
        Server(f"unix://{tmp_path}/1") as far,
        innet.connect(f"{near.address},{far.address}", tables=table(min_size=100), reconnect_for=60) as replay,
    ):
        writer = replay.writer("t", 1, VIEW, server=1)
        writer.append(**step(0))
        writer.flush()
        waiting = Call(partial(replay.sample, "t", 4, VIEW, timeout=4, writers_timeout=0.5))
        far.kill()
        assert type(waiting.ended()) is errors.DeadlineError
        with suppress(errors.ReplayError):
            writer.close(timeout=0)


def test_a_wait_names_how_its_writers_are(make_replay: MakeReplay) -> None:
    replay = make_replay([table(min_size=100)])
    with replay.writer("t", 1, VIEW) as first, replay.writer("t", 1, VIEW):
        for said in ("none has pushed", r"the last push was \d+ s ago"):
            with pytest.raises(
                errors.DeadlineError, match=rf"waiting for writers; 2 writers are connected, {said}$"
            ) as waited:
                replay.sample("t", 4, VIEW, timeout=1.2, writers_timeout=0.1)
            assert not isinstance(waited.value, errors.NoWritersError)
            first.append(**step(0))
            first.flush()
        (writer, *_) = replay.stats()["tables"]["t"]["by_writer"]
        assert writer["connected"]
        assert writer["last_push_s"] is None or writer["last_push_s"] < 60


def test_a_call_to_a_stopped_server_does_not_ask_how_its_writers_are_after_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeout, grace = 6.5, 6.0
    with (
        Server(f"unix://{tmp_path}/s") as server,
        innet.connect(server.address, tables=table(min_size=100), grace=grace) as replay,
    ):
        begun = time.monotonic()
        waiting = Call(partial(replay.sample, "t", 4, VIEW, timeout=timeout, writers_timeout=None))
        # The client has heard what the sample waits for.
        until(lambda: "waiting for writers" in caplog.text)
        server.send(signal.SIGSTOP)
        assert "waiting for writers" in str(waiting.ended())
        # Another question to the server would take another grace.
        assert time.monotonic() - begun < timeout + grace + 5


@contextmanager
def writing_process(address: str, writers: int) -> Iterator[multiprocessing.context.ForkProcess]:
    """A process with writers, and with a child that keeps what it inherits, as those of vector environments do."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe()

    def write() -> None:
        replay = innet.connect(address)
        opened = [replay.writer("t", 1, VIEW, name=f"actor {index}", server=0) for index in range(writers)]
        for writer in opened:
            writer.append(**step(0))
            writer.flush()
        child = fork.Process(target=signal.pause)
        child.start()
        theirs.send(child.pid)
        signal.pause()

    process = fork.Process(target=write)
    process.start()
    child = ours.recv()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("address", ["innet://127.0.0.1:0", "unix://{}/s"])
def test_writers_of_a_killed_process_are_resumable(address: str, tmp_path: Path) -> None:
    with Server(address.format(tmp_path), "--snapshot", str(tmp_path / "saved")) as server:
        with innet.connect(server.address, tables=table()) as replay:
            with writing_process(server.address, 2) as process:
                assert counts(replay.stats()) == (2, 0)
                process.kill()
                until(lambda: counts(replay.stats()) == (0, 2))
            of = replay.stats()["tables"]["t"]
            assert not any(writer["connected"] for writer in of["by_writer"])
            assert of["last_writer"] in ("actor 0", "actor 1")
            assert of["without_writers_s"] < 60
        # So they are after a restart of the server.
        server.send(signal.SIGTERM)
        server.wait()
        server.start()
        with innet.connect(server.address) as replay:
            assert counts(replay.stats()) == (0, 2)


def test_placement_counts_connected_writers(tmp_path: Path) -> None:
    with served_memories(tmp_path, 3) as address, innet.connect(address, tables=table()) as replay:

        def each() -> list[int]:
            return [counts(stats)[0] for stats in replay.stats()["shards"].values()]

        with writing_process(address, 6) as process, ExitStack() as stack:
            assert each() == [6, 0, 0]
            process.kill()
            until(lambda: each() == [0, 0, 0])
            for _ in range(6):
                stack.enter_context(replay.writer("t", 1, VIEW))
            assert each() == [2, 2, 2]


def test_writers_that_start_at_once_spread(tmp_path: Path) -> None:
    with ExitStack() as stack:
        # Processes of their own answer several clients at once.
        servers = [stack.enter_context(Server(f"unix://{tmp_path}/{number}")) for number in range(3)]
        address = ",".join(server.address for server in servers)
        replay = stack.enter_context(innet.connect(address))
        start = threading.Barrier(20)

        def open_writer(client: innet.Replay) -> innet.Writer:
            start.wait()
            return client.writer(new.name, 1, VIEW)

        for number in range(10):
            with ExitStack() as closing, ThreadPoolExecutor(20) as pool:
                # The first call of each client is the one that looks for a server.
                new = table(f"t{number}")
                clients = [closing.enter_context(innet.connect(address, tables=new)) for _ in range(20)]
                writers = [closing.enter_context(writer) for writer in pool.map(open_writer, clients)]
                placed = [counts(stats, new.name) for stats in replay.stats()["shards"].values()]
                assert sum(connected for connected, _ in placed) == len(writers) == 20
                # At most 1.5 times the mean.
                assert max(connected for connected, _ in placed) <= 10, placed
                # A writer that went on to another server is not left behind.
                assert all(resumable == 0 for _, resumable in placed)
