"""`Replay.episodes` against the steps that were written: all of them, in order, whatever the sampler and the place."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import served_memories

import innet_drl as innet
from innet_drl import datasets, errors

COLUMNS: dict[str, Any] = {
    "observation/camera": ("uint8", (16, 16)),
    "observation/place": ("float32", (2,)),
    "action": "int64",
    "reward": "float32",
    # An action mask; `Window` has an array of this name.
    "mask": ("bool", (3,)),
}
VIEW = innet.NStep(stack={"camera": 3}, n=3, gamma=0.9)
ENVIRONMENTS = 3


@pytest.fixture(params=["in process", "served", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory(max_bytes=1 << 30) as memory:
            yield memory
        return
    with served_memories(tmp_path, 2 if "two" in request.param else 1) as address, innet.connect(address) as client:
        yield client


def written(replay: innet.Replay, count: int, seed: int, server: int | None = None) -> list[dict[str, Any]]:
    """Writes `count` rows of each environment, NEXT_STEP, and returns the rows by environment, flat."""
    random = np.random.default_rng(seed)
    frame = random.integers(0, 256, (ENVIRONMENTS, 16, 16), np.uint8)
    rows: list[dict[str, Any]] = []
    ended, final = np.zeros(ENVIRONMENTS, bool), np.zeros(ENVIRONMENTS, bool)
    first = np.ones(ENVIRONMENTS, bool)
    with replay.writer("t", ENVIRONMENTS, chunk_steps=7, server=server) as writer:
        for _ in range(count):
            # Most pixels stay, so that frames are stored as differences.
            frame = frame.copy()
            frame[:, random.integers(16)] = random.integers(256)
            end = random.random(ENVIRONMENTS)
            row = {
                "observation/camera": frame,
                "observation/place": random.normal(size=(ENVIRONMENTS, 2)).astype(np.float32),
                "action": random.integers(0, 4, ENVIRONMENTS),
                "reward": random.normal(size=ENVIRONMENTS).astype(np.float32),
                "mask": random.random((ENVIRONMENTS, 3)) < 0.5,
                "terminated": (end < 0.05) & ~final,
                "truncated": (end > 0.95) & ~final,
                "first": first,
                "final": final,
            }
            observation = {"camera": row["observation/camera"], "place": row["observation/place"]}
            given: dict[str, Any] = {name: array for name, array in row.items() if "/" not in name}
            writer.append(observation=observation, **given)
            rows.append(row)
            ended = row["terminated"] | row["truncated"]
            first, final = final, ended
    return [{name: np.stack([row[name][one] for row in rows]) for name in rows[0]} for one in range(ENVIRONMENTS)]


def cut(stream: dict[str, Any]) -> list[dict[str, Any]]:
    """The episodes of a stream's rows."""
    begins = [*np.flatnonzero(stream["first"]), len(stream["first"])]
    return [{name: array[begin:end] for name, array in stream.items()} for begin, end in itertools.pairwise(begins)]


def key(episode: dict[str, Any]) -> bytes:
    return bytes(episode["observation/place"].tobytes())


def flat(episode: innet.Batch) -> dict[str, Any]:
    arrays = episode.as_dict()
    parts = arrays.pop("observation")
    return arrays | {f"observation/{name}": part for name, part in parts.items()}


def assert_equal(found: innet.Batch, expected: dict[str, Any]) -> None:
    arrays = flat(found)
    assert sorted(arrays) == sorted(expected)
    assert len(found) == len(expected["first"])
    # Of a final row only the observation is stored.
    stepped = ~expected["final"]
    for name, array in expected.items():
        assert arrays[name].dtype == array.dtype, name
        of = stepped if name in ("action", "reward", "mask") else slice(None)
        np.testing.assert_array_equal(arrays[name][of], array[of], name)


@pytest.mark.parametrize("sampler", ["prioritized", "fifo", "max_heap"])
def test_all_episodes_are_read_as_they_were_written(replay: innet.Replay, sampler: Any) -> None:
    times = 1 if sampler == "fifo" else 0
    replay.create_table(innet.Table("t", COLUMNS, 5000, sampler=sampler, max_times_sampled=times, view=VIEW))
    streams = [stream for server in (0, 1) for stream in written(replay, 200, seed=server, server=server)]
    expected = {key(episode): episode for stream in streams for episode in cut(stream)}
    found = list(replay.episodes("t"))
    assert len(found) == len(expected)
    for episode in found:
        assert_equal(episode, expected[key(flat(episode))])
    # The episodes of a stream are in their order.
    order = [key(flat(episode)) for episode in found]
    for stream in streams:
        own = [key(episode) for episode in cut(stream)]
        assert [each for each in order if each in own] == own


def test_the_reader_leaves_samples_and_the_table_alone(replay: innet.Replay) -> None:
    replay.create_table(innet.Table("t", COLUMNS, 5000, sampler="fifo", max_times_sampled=1, view=VIEW))
    written(replay, 50, seed=0)
    before = replay.stats()["tables"]["t"]
    assert sum(len(episode) for episode in replay.episodes("t")) == 150
    after = replay.stats()["tables"]["t"]
    for name in ("steps", "items", "sampled_items", "bytes"):
        assert before[name] == after[name], name


def test_an_episode_whose_beginning_was_evicted_is_the_rest_of_it(replay: innet.Replay) -> None:
    replay.create_table(innet.Table("t", COLUMNS, 400, view=VIEW))
    streams = written(replay, 400, seed=3)
    found = list(replay.episodes("t"))
    expected = [episode for stream in streams for episode in cut(stream)]
    assert 0 < sum(len(episode) for episode in found) <= 400
    for episode in found:
        last = flat(episode)["observation/place"][-1]
        (whole,) = [other for other in expected if (other["observation/place"][-1] == last).all()]
        rest = {name: array[-len(episode) :] for name, array in whole.items()}
        assert_equal(episode, rest)


def test_steps_that_arrive_during_the_reading_are_not_read(replay: innet.Replay) -> None:
    replay.create_table(innet.Table("t", COLUMNS, 5000, view=VIEW))
    written(replay, 60, seed=0, server=0)
    episodes = replay.episodes("t")
    lengths = [len(next(episodes))]
    written(replay, 60, seed=1, server=0)
    lengths += map(len, episodes)
    assert sum(lengths) == 180
    assert sum(map(len, replay.episodes("t"))) == 360


def test_a_table_in_use_can_be_read() -> None:
    with innet.Memory(innet.Table("t", COLUMNS, 2000, view=VIEW)) as replay:
        written(replay, 50, seed=0)
        stop = threading.Event()

        def write() -> None:
            while not stop.is_set():
                written(replay, 50, seed=1)

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(20):
                for episode in replay.episodes("t"):
                    assert not episode.first[1:].any()
                    assert not (episode.final[:-1]).any()
        finally:
            stop.set()
            thread.join()


def test_an_empty_table_has_no_episodes(replay: innet.Replay) -> None:
    replay.create_table(innet.Table("t", COLUMNS, 400, view=VIEW))
    assert list(replay.episodes("t")) == []
    assert repr(replay.episodes("t")).startswith('<Episodes of table "t"')
    with pytest.raises(errors.UnknownTableError, match=r"'?nothing'?"):
        replay.episodes("nothing")


def test_a_dropped_table_ends_the_reading() -> None:
    # More chunks than one answer has.
    columns: dict[str, Any] = {"observation": ("uint8", (64, 1024)), "action": "int64", "reward": "float32"}
    random = np.random.default_rng(0)
    with innet.Memory() as replay:
        for _ in range(2):
            replay.create_table(innet.Table("t", columns, 400, view=innet.NStep()))
            with replay.writer("t", 1, chunk_steps=5) as writer:
                for t in range(200):
                    noise = random.integers(0, 256, (1, 64, 1024), np.uint8)
                    writer.append(
                        observation=noise, action=[0], reward=[0.0], terminated=[t % 10 == 9], truncated=[False]
                    )
            episodes = replay.episodes("t")
            next(episodes)
            replay.drop_table("t")
            with pytest.raises(errors.UnknownTableError):
                list(episodes)


def test_a_reading_holds_a_part_of_a_table() -> None:
    columns: dict[str, Any] = {"observation": ("uint8", (1 << 20,)), "action": "int64", "reward": "float32"}
    with innet.Memory(innet.Table("t", columns, 700, view=innet.NStep())) as replay:
        with replay.writer("t", 1, chunk_steps=10) as writer:
            for t in range(600):
                # Compresses to nearly nothing: 600 MB unpacked.
                frame = np.full((1, 1 << 20), t % 256, np.uint8)
                writer.append(observation=frame, action=[t], reward=[0.0], terminated=[False], truncated=[False])
        lengths, actions, most = [], [], 0
        for episode in replay.episodes("t"):
            lengths.append(len(episode))
            actions += list(episode.action)
            most = max(most, episode.observation.nbytes)
            assert (episode.observation[:, 0] == episode.action % 256).all()
        # One episode that does not end, in parts of 256 MB.
        assert lengths == [255, 255, 90]
        assert actions == list(range(600))
        assert most <= 256 << 20


def test_a_closed_client_ends_the_reading(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address, innet.connect(address) as client:
        client.create_table(innet.Table("t", COLUMNS, 400, view=VIEW))
        episodes = client.episodes("t", timeout=5.0)
        client.close()
        with pytest.raises(errors.ClosedError):
            next(episodes)


def test_steps_that_this_replay_s_writers_hold_are_read(replay: innet.Replay, tmp_path: Path) -> None:
    columns: Any = {"observation": ("float32", (2,)), "action": "int64", "reward": "float32"}
    replay.create_table(innet.Table("t", columns, 1000, view=innet.NStep()))
    with replay.writer("t", 1) as writer:
        for t in range(60):
            ends: Any = {"terminated": [t % 7 == 6], "truncated": [False]}
            writer.append(observation=np.full((1, 2), t, np.float32), action=[t], reward=1.0, **ends)
        assert np.concatenate([one.action for one in replay.episodes("t")]).tolist() == list(range(60))
        writer.append(
            observation=np.zeros((1, 2), np.float32), action=[60], reward=1.0, terminated=[True], truncated=[False]
        )
        assert datasets.export_table(replay, "t", tmp_path / "t.parquet").steps == 61
        writer.append(
            observation=np.zeros((1, 2), np.float32), action=[61], reward=1.0, terminated=[True], truncated=[False]
        )
        if isinstance(replay, innet.Memory):
            replay.save(tmp_path / "saved")
            with innet.Memory() as other:
                other.restore(tmp_path / "saved")
                assert sum(len(one) for one in other.episodes("t")) == 62
