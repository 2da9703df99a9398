"""Snapshots of servers: a restart continues, damaged ones are passed over, bad folders and settings are refused."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from calls import Call, Lines
from recording_relay import RecordingRelay
from serving import SERVE, SERVER_CLI, Server, until
from steps import VIEW, fill, step, table

import innet_drl as innet
from innet_drl import datasets, errors

pytestmark = pytest.mark.timeout(110)


def snapshots(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".snapshot")


def save(server: Server) -> str:
    """Saves on request."""
    command = [*SERVER_CLI, "snapshot", server.address]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def refusal(tmp_path: Path, *flags: str, status: int = 2) -> str:
    """The error of a server that does not start."""
    command = [*SERVE, f"unix://{tmp_path}/refused", *flags]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended
    (line,) = [line for line in ended.stderr.splitlines() if line.startswith("innet-replay: ")]
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "snapshots"


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[Server]:
    flags = f"--snapshot={folder}", "--snapshot-every=0s"
    with Server(f"unix://{tmp_path}/s", *flags, log=tmp_path / "log") as serving:
        yield serving


def stop(server: Server) -> None:
    """Ends a server in order."""
    server.send(signal.SIGTERM)
    server.wait()


def test_everything_continues_after_a_restart(server: Server, folder: Path, log: Lines) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        writer = replay.writer("t", 2, VIEW, chunk_steps=7)
        for t in range(60):
            writer.append(**step(t, 2))
        writer.flush()
        before = replay.sample("t", 32, VIEW)
        replay.update_priorities("t", before.ids, np.full(32, 5.0))
        replay.put_parameters("policy", {"w": np.ones(3, np.float32)})
        replay.put_parameters("policy", {"w": np.full(3, 2, np.float32)})
        stats = replay.stats()["tables"]["t"]

        # The drain ends before the save, so nothing is lost.
        stop(server)
        assert snapshots(folder) == ["0000000001.snapshot"]
        asking = Call(replay.stats)
        log.wait_for("waiting up to")
        server.start()
        assert asking.ended() is None
        restored = {"path": f"{folder}/0000000001.snapshot", "tables": {"t": 120}}
        assert replay.stats()["snapshots"]["restored"] == restored
        lines = server.logged(f'path="{restored["path"]}" tables=1 steps=120 writers=1 parameters=1 ', "listening")
        assert re.search(r"listening .* tables=1", lines)
        (line,) = [line for line in log.lines if "answers again" in line]
        assert line.endswith(": it was started again, with 120 steps of its snapshot")
        again = replay.stats()["tables"]["t"]
        kept = ("steps", "items", "total_mass", "max_priority", "inserted_steps", "inserted_items", "sampled_items")
        assert {name: again[name] for name in kept} == {name: stats[name] for name in kept}
        assert (again["connected_writers"], again["resumable_writers"]) in ((0, 1), (1, 0))
        # Ids from before name the restored items.
        assert replay.update_priorities("t", before.ids, np.full(32, 7.0)).applied == 32
        newest = replay.get_parameters("policy")
        assert newest is not None
        assert newest.version == 2
        np.testing.assert_array_equal(newest.tensors["w"], np.full(3, 2))
        assert replay.put_parameters("policy", {"w": np.zeros(3, np.float32)}) == 3
        # The writer continues its episodes: windows span the restart.
        for t in range(60, 80):
            writer.append(**step(t, 2))
        writer.close()
        after = replay.stats()["tables"]["t"]
        assert after["steps"] == after["inserted_steps"] == 160
        uninterrupted = innet.Memory([table()])
        with uninterrupted.writer("t", 2, VIEW, chunk_steps=7) as other:
            for t in range(80):
                other.append(**step(t, 2))
        assert after["inserted_items"] == uninterrupted.stats()["tables"]["t"]["inserted_items"]
        assert after["late_items"] == 0


def test_a_reading_of_episodes_continues_after_restarts(server: Server) -> None:
    """Chunks before them were evicted, and episodes go on in the chunks after them."""
    columns: dict[str, Any] = {"frame": ("uint8", (20_000,)), "number": "int64"}
    noisy = innet.Table("noisy", columns, capacity=500, view=innet.Window(0, 1))
    noise = np.random.default_rng(0)
    with innet.connect(server.address, tables=[noisy]) as replay:
        with replay.writer("noisy", 2, chunk_steps=3) as writer:
            for t in range(400):
                ends = np.array([t % 50 == 49, t % 70 == 69])
                frames = noise.integers(0, 255, (2, 20_000), np.uint8)
                writer.append(frame=frames, number=[t, 1000 + t], terminated=ends, truncated=[False, False])
            writer.flush()
            whole = [episode["number"].tolist() for episode in replay.episodes("noisy")]
            assert len(whole) > 8
            reading = replay.episodes("noisy")
            read = []
            for number, episode in enumerate(reading):
                read.append(episode["number"].tolist())
                if number in (0, 3):
                    stop(server)
                    server.start()
                if number == 1:
                    # Not read: it came later.
                    writer.append(frame=frames, number=[400, 1400], terminated=[False, False], truncated=[False, False])
        assert read == whole
        # Another table of the name is not read on.
        reading = replay.episodes("noisy")
        next(reading)
        replay.drop_table("noisy")
        stop(server)
        server.start()
        replay.create_table(noisy)
        with pytest.raises(errors.UnknownTableError, match="it was dropped"):
            list(reading)


class RestartedMeanwhile:
    """A replay whose servers are restarted, one after the other, before some of its episodes are read."""

    def __init__(self, replay: innet.Replay, servers: list[Server], before: set[int], work: Callable[[], None]) -> None:
        self.table = replay.table
        self._replay, self._servers, self._before, self._work = replay, servers, before, work
        self.restarts = 0

    def episodes(self, table: str, timeout: float | None) -> Iterator[innet.Batch]:
        for number, episode in enumerate(self._replay.episodes(table, timeout)):
            if number in self._before:
                server = self._servers[self.restarts % len(self._servers)]
                stop(server)
                server.start()
                self.restarts += 1
                self._work()
            yield episode


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_an_export_continues_after_restarts(tmp_path: Path, count: int) -> None:
    file = tmp_path / "data.parquet"
    columns: dict[str, Any] = {
        "observation/camera": ("uint8", (20_000,)),
        "observation/place": ("float32", (2,)),
        "action": "int64",
        "reward": "float32",
    }
    noise = np.random.default_rng(0)
    frames: dict[tuple[int, int], int] = {}
    with ExitStack() as stack:
        servers = [
            stack.enter_context(Server(f"unix://{tmp_path}/{each}", f"--snapshot={tmp_path / f'of {each}'}"))
            for each in range(count)
        ]
        addresses = ",".join(server.address for server in servers)
        table = innet.Table("t", columns, 2000, view=innet.NStep())
        replay = stack.enter_context(innet.connect(addresses, tables=table))
        writers = [stack.enter_context(replay.writer("t", 2, chunk_steps=3, server=each)) for each in range(count)]

        def write(steps: range) -> None:
            for t, (each, writer) in itertools.product(steps, enumerate(writers)):
                camera = noise.integers(0, 255, (2, 20_000), np.uint8)
                place = np.array([[2 * each + stream, t] for stream in range(2)], np.float32)
                frames.update({(2 * each + stream, t): zlib.crc32(camera[stream]) for stream in range(2)})
                writer.append(
                    observation={"camera": camera, "place": place},
                    action=[t, -t],
                    reward=1.0,
                    terminated=[t % 50 == 48, False],
                    truncated=[False, t % 70 == 68],
                    first=[t % 50 == 0, t % 70 == 0],
                    final=[t % 50 == 49, t % 70 == 69],
                )
            for writer in writers:
                writer.flush()

        # More than one answer has of each server.
        write(range(400))
        later = (range(begin, begin + 10) for begin in itertools.count(400, 10))
        exported = RestartedMeanwhile(replay, servers, {1, 2, 14 * count - 2}, lambda: write(next(later)))
        counts = datasets.export_table(cast(innet.Replay, exported), "t", file)
        assert exported.restarts == 3
        found: dict[int, list[int]] = {stream: [] for stream in range(2 * count)}
        for episode in datasets.read(file):
            streams, steps = episode["observation"]["place"].astype(int).T
            period = 70 if streams[0] % 2 else 50
            assert set(streams) == {streams[0]}
            assert steps[0] % period == 0
            assert episode["final"].tolist() == (steps % period == period - 1).tolist()
            assert (episode["truncated"] | episode["terminated"]).tolist() == (steps % period == period - 2).tolist()
            action = np.where(episode["final"], 0, -steps if streams[0] % 2 else steps)
            np.testing.assert_array_equal(episode["action"], action)
            assert [zlib.crc32(frame) for frame in episode["observation"]["camera"]] == [
                frames[streams[0], t] for t in steps
            ]
            found[streams[0]] += steps.tolist()
        assert sum(map(len, found.values())) == counts.rows
        for stream, steps in found.items():
            # What all servers had when the export began.
            assert steps == list(range(400)), stream


@pytest.mark.parametrize("count", [1, 2])
def test_an_export_from_a_server_that_comes_back_without_its_memory_leaves_the_old_file(
    tmp_path: Path, count: int
) -> None:
    columns: dict[str, Any] = {"observation": ("uint8", (20_000,)), "action": "int64", "reward": "float32"}
    noise = np.random.default_rng(0)
    file = tmp_path / "data.parquet"
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(f"unix://{tmp_path}/{each}")) for each in range(count)]
        addresses = ",".join(server.address for server in servers)
        table = innet.Table("t", columns, 2000, view=innet.NStep())
        replay = stack.enter_context(innet.connect(addresses, tables=table))
        for each in range(count):
            with replay.writer("t", 1, chunk_steps=3, server=each) as writer:
                for t in range(400):
                    frame = noise.integers(0, 255, (1, 20_000), np.uint8)
                    writer.append(observation=frame, action=[t], reward=1.0, terminated=[t % 50 == 49], truncated=False)
        datasets.export_table(replay, "t", file)
        before = file.read_bytes()
        exported = RestartedMeanwhile(replay, servers, {1}, lambda: None)
        with pytest.raises(errors.UnknownTableError, match="dropped"):
            datasets.export_table(cast(innet.Replay, exported), "t", file)
        assert exported.restarts == 1
        assert file.read_bytes() == before
        assert not list(tmp_path.glob("*.part"))


def test_episodes_of_a_later_server_that_lost_its_memory_are_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(Server(f"unix://{tmp_path}/{each}")) for each in range(2)]
        addresses = ",".join(server.address for server in servers)
        replay = stack.enter_context(innet.connect(addresses, tables=table()))
        for each in range(2):
            with replay.writer("t", 1, VIEW, server=each) as writer:
                for t in range(40):
                    writer.append(**step(t))
        episodes = replay.episodes("t")
        next(episodes)
        servers[1].kill()
        servers[1].start()
        with pytest.raises(errors.UnknownTableError):
            list(episodes)


def test_versions_continue_after_a_drop_and_restarts(server: Server) -> None:
    with innet.connect(server.address) as replay:
        for version in (1, 2, 3):
            assert replay.put_parameters("policy", {"w": np.ones(3)}) == version
        replay.drop_parameters("policy")
        for _ in range(2):
            stop(server)
            server.start()
            assert replay.parameters() == {}
        assert replay.put_parameters("policy", {"w": np.ones(3)}) == 4


def test_ids_survive_three_kills(tmp_path: Path, folder: Path) -> None:
    """Each life of the server evicts items and takes others; the ids of all lives keep naming their items."""
    small = table(capacity=60, priority_exponent=1.0)
    one_step = innet.NStep(n=1, observation="frame")
    flags = (f"--snapshot={folder}", "--snapshot-every=0s")

    def ids_by_step(replay: innet.Replay) -> dict[int, int]:
        batch = replay.sample("t", 4096, one_step)
        return dict(zip(batch.action.tolist(), batch.ids.tolist(), strict=True))

    with (
        Server(f"unix://{tmp_path}/s", *flags) as server,
        innet.connect(server.address, tables=[small]) as replay,
        replay.writer("t", 1, one_step, chunk_steps=1) as writer,
    ):
        t = 0
        known: dict[int, int] = {}
        for life in range(4):
            for _ in range(60 if life == 0 else 20):
                writer.append(**step(t))
                t += 1
            writer.flush()
            for action, key in ids_by_step(replay).items():
                assert known.setdefault(action, key) == key
            save(server)
            server.kill()
            server.start()
            # A program that has not sampled since the restart.
            with innet.connect(server.address) as other:
                live = ids_by_step(replay)
                assert len(live) > 50
                for action, key in known.items():
                    receipt = other.update_priorities("t", np.array([key], np.uint64), [action + 1.0])
                    assert (receipt.applied, receipt.stale) == ((1, 0) if action in live else (0, 1)), (life, action)
            assert live.items() <= known.items()
            batch = replay.sample("t", 64, one_step)
            total = sum(action + 1.0 for action in live)
            np.testing.assert_allclose(batch.probabilities, (batch.action + 1.0) / total, rtol=1e-6)
        assert len(known) == t


def test_no_step_is_lost_or_doubled_if_the_server_ends_during_pushes(server: Server) -> None:
    # A queue: each item, which is one step, is sampled once, in the order of the pushes.
    queue = table(sampler="fifo", max_times_sampled=1, capacity=100_000)
    one_step = innet.NStep(n=1, observation="frame")
    acknowledged = 0
    ended = threading.Event()

    def push() -> int:
        """Pushes without a pause; returns the number of steps."""
        nonlocal acknowledged
        with replay.writer("t", 1, one_step, chunk_steps=3) as writer:
            for t in itertools.count():
                if ended.is_set():
                    return t
                writer.append(**step(t, episode=1))
                if t % 50 == 49:
                    writer.flush()
                    acknowledged = t + 1
        raise AssertionError("count() does not end")

    with (
        innet.connect(server.address, tables=[queue]) as replay,
        innet.connect(server.address) as reader,
        ThreadPoolExecutor() as thread,
    ):
        pushing = thread.submit(push)

        def pushes_go_on() -> None:
            before = acknowledged
            until(lambda: acknowledged > before or pushing.done())

        try:
            for _ in range(3):
                pushes_go_on()
                stop(server)
                before = acknowledged
                server.start()
                # At least these: the writer may have sent others again.
                restored = reader.stats()["tables"]["t"]["steps"]
                assert restored >= before > 0
        finally:
            ended.set()
        pushed = pushing.result()
        stats = reader.stats()["tables"]["t"]
        assert stats["items"] == stats["inserted_items"] == pushed
        actions: list[int] = []
        while len(actions) < pushed:
            actions += reader.sample("t", min(100, pushed - len(actions)), one_step, timeout=0).action.tolist()
        assert actions == list(range(pushed))


def test_a_push_that_was_not_acknowledged_applies_once(tmp_path: Path, server: Server) -> None:
    with (
        innet.connect(server.address, tables=[table()]) as reader,
        RecordingRelay(tmp_path / "relay", tmp_path / "s") as relay,
        innet.connect(relay.address) as replay,
        replay.writer("t", 1, VIEW, chunk_steps=5) as writer,
    ):
        for t in range(10):
            writer.append(**step(t))
        writer.flush()
        relay.loses_replies = True
        # A chunk leaves with the step after it.
        for t in range(10, 16):
            writer.append(**step(t))
        until(lambda: reader.stats()["tables"]["t"]["steps"] == 15)
        stop(server)
        relay.loses_replies = False
        server.start()
        writer.flush()
        assert reader.stats()["tables"]["t"]["inserted_steps"] == 16


def test_a_sample_beside_an_open_writer_waits_for_a_killed_server(server: Server) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        writer = replay.writer("t", 1, VIEW)
        writer.append(**step(0, 1))
        fill(replay, 10)
        save(server)
        assert len(replay.sample("t", 4, VIEW)) == 4
        server.kill()
        with ThreadPoolExecutor(1) as pool:
            sampled = pool.submit(replay.sample, "t", 4, VIEW)
            time.sleep(0.2)
            assert not sampled.done()
            server.start()
            assert len(sampled.result(30)) == 4


def test_a_writer_learns_how_many_steps_a_kill_has_lost(server: Server) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        with pytest.raises(errors.ExpiredError) as raised, replay.writer("t", 2, VIEW, chunk_steps=5) as writer:
            for t in range(30):
                writer.append(**step(t, 2))
                if t == 9:
                    writer.flush()
                    name = re.fullmatch(r"(\S+)  [\d.]+ KiB  [\d.]+ s\n", save(server))
                    assert name is not None
                    assert Path(name[1]).exists()
            writer.flush()
            server.kill()
            server.start()
            writer.append(**step(30, 2))
            writer.append(**step(31, 2))
            writer.flush()
        text = str(raised.value)
        assert "without the last 40 of the 60 steps" in text
        assert "and 0 later ones that it had sent are lost with them" in text
        assert "4 appended steps that were not sent yet are lost, too" in text
        assert replay.stats()["tables"]["t"]["steps"] == 20
        fill(replay, 10, streams=2)
        assert replay.stats()["tables"]["t"]["steps"] == 40


def test_the_two_newest_are_kept_and_a_damaged_one_is_passed_over(tmp_path: Path, folder: Path) -> None:
    with Server(f"unix://{tmp_path}/s", f"--snapshot={folder}", "--snapshot-every=0s", log=tmp_path / "log") as server:
        with innet.connect(server.address, tables=[table()]) as replay:
            for _ in range(3):
                fill(replay, 10)
                save(server)
            stats = replay.stats()
            assert stats["snapshots"]["saved"] == stats["server"]["latency_s"]["snapshot"]["count"] == 3
        assert snapshots(folder) == ["0000000002.snapshot", "0000000003.snapshot"]
        newest = folder / "0000000003.snapshot"
        newest.write_bytes(newest.read_bytes()[:-100])
        server.kill()
        # A server that was killed during a save leaves a part of a file.
        (folder / "0000000004.snapshot.partial").write_bytes(b"innetmem")
        server.start()
        unreadable = "0000000003.snapshot.unreadable"
        # It stays, beside the two that are kept, and each start names it.
        server.logged("0000000003.snapshot cannot be used", "0000000002.snapshot", f"path={folder}/{unreadable}")
        with innet.connect(server.address) as replay:
            assert replay.stats()["tables"]["t"]["steps"] == 20
        for _ in range(2):
            save(server)
        assert snapshots(folder) == ["0000000004.snapshot", "0000000005.snapshot"]
        assert {path.name for path in folder.iterdir()} == {"lock", unreadable, *snapshots(folder)}
        server.kill()
        server.start()
        server.logged(unreadable)

        newest = folder / "0000000005.snapshot"
        whole = newest.read_bytes()
        newest.write_bytes(whole[:8] + b"\4\0\xfb\xff" + whole[12:])
        server.kill()
        text = refusal(tmp_path, f"--snapshot={folder}")
        assert "it has format 4, and this release reads formats 2 to 3" in text
        assert "start the release that has saved it, or move that file out of" in text
        assert len(snapshots(folder)) == 2

        for name in snapshots(folder):
            (folder / name).write_bytes(b"nothing")
        assert "every snapshot in" in refusal(tmp_path, f"--snapshot={folder}")
        assert len(snapshots(folder)) == 2


def test_snapshots_are_saved_at_intervals(tmp_path: Path, folder: Path) -> None:
    flags = (f"--snapshot={folder}", "--snapshot-every=20ms")
    with Server(f"unix://{tmp_path}/s", *flags) as server, innet.connect(server.address, tables=[table()]) as replay:
        fill(replay, 10)
        saved = replay.stats()["snapshots"]["saved"]
        until(lambda: replay.stats()["snapshots"]["saved"] > saved + 2)
        last = replay.stats()["snapshots"]
        assert last["failed"] == 0
        assert last["bytes"] > 0
        assert last["duration_s"] > 0
        assert last["age_s"] >= 0
        server.kill()
        server.start()
        assert replay.stats()["tables"]["t"]["steps"] == 10


def test_limits_are_the_running_servers(tmp_path: Path, server: Server, folder: Path) -> None:
    with innet.connect(server.address, tables=[table()]) as replay:
        fill(replay, 100)
    stop(server)
    definition = """
        [[tables]]
        name = "t"
        capacity = {capacity}
        priority_exponent = {exponent}
        columns = [
            {{ name = "frame", dtype = "uint8", shape = [12, 8] }},
            {{ name = "action", dtype = "int64" }},
            {{ name = "reward", dtype = "float32" }},
        ]
        """
    config = tmp_path / "server.toml"
    flags = [f"--snapshot={folder}", f"--config={config}"]
    config.write_text(definition.format(capacity=1000, exponent=1.0))
    text = refusal(tmp_path, *flags)
    assert "priority_exponent is 1.0, in the snapshot 0.6" in text
    assert "move the snapshots out of" in text
    # The whole memory does not fit.
    text = refusal(tmp_path, f"--snapshot={folder}", "--max-bytes=400KiB", "--max-frame-bytes=100KiB")
    assert "raise the memory's max_bytes" in text
    assert "move the snapshots out of" in text
    assert snapshots(folder) == ["0000000001.snapshot"]
    # A smaller table keeps the newest steps.
    config.write_text(definition.format(capacity=50, exponent=0.6))
    with Server(f"unix://{tmp_path}/small", *flags) as small, innet.connect(small.address) as replay:
        assert 0 < replay.stats()["tables"]["t"]["steps"] <= 50


def test_a_server_that_restores_is_not_ready_yet(tmp_path: Path, folder: Path) -> None:
    raw = innet.Table("raw", {"a": innet.Column("uint8", (1 << 16,), codec="none")}, 2000, view=innet.Window(0, 0))
    with Server(f"unix://{tmp_path}/s", f"--snapshot={folder}") as server:
        with innet.connect(server.address, tables=[raw]) as replay, replay.writer("raw", 1) as writer:
            for _ in range(20):
                ended: dict[str, Any] = {name: np.zeros((100, 1), bool) for name in ("terminated", "truncated")}
                writer.extend(a=np.zeros((100, 1, 1 << 16), np.uint8), **ended)
        stop(server)
    with socket.create_server(("127.0.0.1", 0)) as free:
        http = f"127.0.0.1:{free.getsockname()[1]}"

    def health() -> int | None:
        try:
            with urllib.request.urlopen(f"http://{http}/healthz", timeout=10) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None

    command = [*SERVE, f"unix://{tmp_path}/s", f"--snapshot={folder}", f"--http={http}"]
    restoring = 0
    # A look may miss a short restore.
    while restoring == 0:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as supervisor:
            (tmp_path / "supervisor").unlink(missing_ok=True)
            supervisor.bind(f"{tmp_path}/supervisor")
            environment = {**os.environ, "NOTIFY_SOCKET": f"{tmp_path}/supervisor"}
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
                said, answer = b"", None
                while answer != 200:
                    with suppress(BlockingIOError):
                        while True:
                            said += supervisor.recv(4096, socket.MSG_DONTWAIT) + b"\n"
                    answer = health()
                    if answer == 503:
                        restoring += 1
                        assert b"READY=1" not in said
                while b"READY=1" not in said:
                    said += supervisor.recv(4096) + b"\n"
                with innet.connect(f"unix://{tmp_path}/s") as replay:
                    assert replay.stats()["tables"]["raw"]["steps"] == 2000
                process.kill()


def test_a_view_that_stored_items_have_too_few_steps_for_is_refused(tmp_path: Path, folder: Path) -> None:
    config = tmp_path / "server.toml"
    definition = """
        [[tables]]
        name = "t"
        capacity = 100
        view = {{ n_step = {{ observation = "frame", n = {n} }} }}
        columns = [
            {{ name = "frame", dtype = "uint8", shape = [12, 8] }},
            {{ name = "action", dtype = "int64" }},
            {{ name = "reward", dtype = "float32" }},
        ]
        """
    flags = [f"--snapshot={folder}", f"--config={config}"]
    config.write_text(definition.format(n=1))
    with Server(f"unix://{tmp_path}/s", *flags) as server:
        with innet.connect(server.address) as replay, replay.writer("t", 1) as writer:
            for t in range(20):
                writer.append(**step(t))
        stop(server)
        config.write_text(definition.format(n=3))
        text = refusal(tmp_path, *flags)
        assert "n=1" in text
        assert re.search(r"asked for NStep\(.*n=3.*\), and (\d+) of \1 items have too few steps for it", text)
        assert "restore the setting" in text
        config.write_text(definition.format(n=1))
        server.start()
        emptied = subprocess.run([*SERVER_CLI, "empty", "t", server.address], check=False)
        assert emptied.returncode == 0
        stop(server)
        config.write_text(definition.format(n=3))
        server.start()
        with innet.connect(server.address) as replay:
            assert replay.stats()["tables"]["t"]["items"] == 0


def test_a_copy_of_a_memory_is_refused_beside_it(tmp_path: Path, folder: Path) -> None:
    with (
        Server(f"unix://{tmp_path}/a", f"--snapshot={folder}") as first,
        Server(f"unix://{tmp_path}/b") as second,
    ):
        with innet.connect(f"{first.address},{second.address}", tables=[table()]) as replay:
            fill(replay, 20)
        stop(first)
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        first.start()
        with Server(f"unix://{tmp_path}/c", f"--snapshot={copy}") as third:
            innet.connect(f"{first.address},{second.address}").close()
            with pytest.raises(errors.ConfigError) as raised:
                innet.connect(f"{first.address},{second.address},{third.address}")
            assert f"{first.address} and {third.address} have the same memory" in str(raised.value)
            assert "empty folder" in str(raised.value)


def test_a_copy_of_a_memory_returns_to_its_first_server(
    tmp_path: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A folder is copied while its server runs. Another server starts with the copy, and then the first one."""
    copy, one_step = tmp_path / "copy", innet.NStep(n=1, observation="frame")
    with (
        Server(f"unix://{tmp_path}/a", f"--snapshot={folder}", "--snapshot-every=0s") as first,
        Server(f"unix://{tmp_path}/b", f"--snapshot={tmp_path}/other", "--snapshot-every=0s") as second,
        innet.connect(f"{first.address},{second.address}", tables=table(sampler="uniform")) as replay,
    ):

        def write(steps: range) -> None:
            with replay.writer("t", 1, one_step, chunk_steps=1, server=0) as writer:
                for t in steps:
                    writer.append(**step(t))

        def ids_by_step() -> dict[int, int]:
            batch = replay.sample("t", 4096, one_step)
            return dict(zip(batch.action.tolist(), batch.ids.tolist(), strict=True))

        def steps() -> list[int | None]:
            return [stats and stats["tables"]["t"]["steps"] for stats in replay.stats()["shards"].values()]

        write(range(10))
        save(first)
        shutil.copytree(folder, copy)
        write(range(10, 20))
        save(first)
        save(second)
        before = ids_by_step()
        assert set(before) == {*range(20)}

        second.kill()
        assert steps() == [20, None]
        with Server(second.address, f"--snapshot={copy}", "--snapshot-every=0s"):
            until(lambda: f"{first.address} and {second.address} have the same memory" in caplog.text)
            assert steps() == [20, None]
        second.start()
        first.kill()
        shutil.rmtree(folder)
        copy.rename(folder)
        first.start()
        until(lambda: steps() == [10, 0])

        write(range(100, 110))
        after = ids_by_step()
        assert set(after) == {*range(10), *range(100, 110)}
        assert after.items() & before.items() == {(t, before[t]) for t in range(10)}
        for t, key in (before | after).items():
            receipt = replay.update_priorities("t", np.array([key], np.uint64), [1.0])
            assert (receipt.applied, receipt.stale) == ((1, 0) if t in after else (0, 1)), t


@pytest.mark.parametrize("use", ["stats", "sample", "write"])
def test_a_copy_is_refused_by_a_client_that_has_not_noticed_its_server_leave(
    tmp_path: Path, folder: Path, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The copy starts at the address of another server, between two calls of the client."""
    copy, one_step = tmp_path / "copy", innet.NStep(n=1, observation="frame")
    with (
        Server(f"unix://{tmp_path}/a", f"--snapshot={folder}", "--snapshot-every=0s") as first,
        Server(f"unix://{tmp_path}/b", f"--snapshot={tmp_path}/other", "--snapshot-every=0s") as second,
        innet.connect(f"{first.address},{second.address}", tables=table(sampler="uniform")) as replay,
        replay.writer("t", 1, one_step, chunk_steps=1, server=1) as unnoticed,
    ):

        def actions() -> list[int]:
            return list(replay.sample("t", 4096, one_step).action.tolist())

        with replay.writer("t", 1, one_step, chunk_steps=1, server=0) as writer:
            for t in range(10):
                writer.append(**step(t))
        for t in range(10, 20):
            unnoticed.append(**step(t))
        unnoticed.flush()
        save(first)
        save(second)
        shutil.copytree(folder, copy)
        assert set(actions()) == {*range(20)}
        second.kill()
        with Server(second.address, f"--snapshot={copy}", "--snapshot-every=0s") as third:
            if use == "stats":
                assert list(replay.stats()["shards"].values())[1] is None
            elif use == "sample":
                assert set(actions()) == {*range(10)}
            else:
                unnoticed.append(**step(20))
                with pytest.raises(errors.DisconnectedError, match="have the same memory"):
                    unnoticed.flush(timeout=1.0)
            with innet.connect(third.address) as alone:
                assert alone.stats()["tables"]["t"]["steps"] == 10
            if use != "write":
                until(lambda: f"{first.address} and {second.address} have the same memory" in caplog.text)
        second.start()
        for t in range(21 if use == "write" else 20, 30):
            unnoticed.append(**step(t))
        unnoticed.flush()
        until(lambda: set(actions()) == {*range(30)})


def test_files_with_secrets_that_others_can_read_are_named(tmp_path: Path) -> None:
    tokens = {name: tmp_path / name for name in ("open", "closed")}
    for name, mode in (("open", 0o644), ("closed", 0o640)):
        tokens[name].write_text(f"token of the role {name}")
        tokens[name].chmod(mode)
    flags = f"--token-file={tokens['closed']}", f"--actor-token-file={tokens['open']}"
    with Server(f"unix://{tmp_path}/s", *flags, log=tmp_path / "log") as server:
        log = server.logged("chmod 600", "listening")
        warnings = [line for line in log.splitlines() if "chmod 600" in line]
    assert len(warnings) == 1
    assert f"actor_token_file {tokens['open']} can be read by every user" in warnings[0]


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path, server: Server, folder: Path) -> None:
    assert "another server has locked it" in refusal(tmp_path, f"--snapshot={folder}", status=1)
    (tmp_path / "file").touch()
    text = refusal(tmp_path, f"--snapshot={tmp_path}/file", status=1)
    assert "cannot be saved" in text
    assert "--snapshot" in text
    # Root may write everywhere but here.
    text = refusal(tmp_path, "--snapshot=/proc/snapshots", status=1)
    assert "cannot be saved in /proc/snapshots" in text
    assert "no memory to save" in refusal(tmp_path, "--snapshot=a", "--gradients-only", "--gradients=127.0.0.1:0")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 3 MiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(path)]
    try:
        mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_an_error_at_the_start_and_a_warning_later(tmp_path: Path, disk: Path) -> None:
    flags = (f"--snapshot={disk}/snapshots", "--snapshot-every=50ms")
    with (
        Server(f"unix://{tmp_path}/s", *flags, log=tmp_path / "log") as server,
        innet.connect(server.address, tables=[table()]) as replay,
    ):
        fill(replay, 10)
        saved = replay.stats()["snapshots"]["saved"]
        until(lambda: replay.stats()["snapshots"]["saved"] > saved + 1)
        with (disk / "other").open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        fill(replay, 400)
        until(lambda: replay.stats()["snapshots"]["failed"] > 1)
        # It serves on, and the snapshots from before are whole.
        assert replay.stats()["tables"]["t"]["steps"] == 410
        assert len(snapshots(disk / "snapshots")) == 2
        server.logged("no new snapshot", "No space left")
        failed = subprocess.run([*SERVER_CLI, "snapshot", server.address], capture_output=True, text=True, check=False)
        assert failed.returncode == 1
        assert "No space left" in failed.stderr
        server.kill()
        assert "No space left" in refusal(tmp_path, *flags, status=1)
        assert len(snapshots(disk / "snapshots")) == 2
        (disk / "other").unlink()
        server.start()
        assert replay.stats()["tables"]["t"]["steps"] == 10
        until(lambda: replay.stats()["snapshots"]["saved"] > 0)


def test_the_operator_alone_may_ask_for_one(tmp_path: Path, folder: Path) -> None:
    tokens = {role: f"token of the {role}" for role in ("operator", "learner")}
    flags = [f"--token={tokens['operator']}", f"--learner-token={tokens['learner']}", f"--snapshot={folder}"]
    with Server(f"unix://{tmp_path}/s", *flags) as server:

        def ask(role: str) -> Any:
            command = [*SERVER_CLI, "snapshot", server.address, f"--token={tokens[role]}"]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        assert "may not snapshot" in ask("learner").stderr
        assert ask("operator").returncode == 0
    with Server(f"unix://{tmp_path}/without") as server:
        command = [*SERVER_CLI, "snapshot", server.address]
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
        assert "start it with --snapshot DIR" in asked.stderr


def test_a_memory_of_this_process_is_served_with_snapshots(folder: Path) -> None:
    with innet.Memory([table()]) as memory, memory.serve("innet://127.0.0.1:0", snapshot=folder, snapshot_every=0):
        fill(memory, 10)
        assert snapshots(folder) == []
    assert snapshots(folder) == ["0000000001.snapshot"]
    with innet.Memory([table()]) as memory:
        with memory.serve("innet://127.0.0.1:0", snapshot=folder):
            assert memory.stats()["tables"]["t"]["steps"] == 10
        with pytest.raises(errors.ConfigError, match="is not empty"):
            memory.serve("innet://127.0.0.1:0", snapshot=folder)
        with pytest.raises(errors.ConfigError, match="snapshot_every"):
            memory.serve("innet://127.0.0.1:0", snapshot=folder, snapshot_every=-1)
        with pytest.raises(errors.ConfigError, match="snapshot_every is set, but snapshot"):
            memory.serve("innet://127.0.0.1:0", snapshot_every=60)
