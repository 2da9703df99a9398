"""`Writer.extend` against `append`: blocks of random lengths make the same rows, items and ids."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import served_memories, until

import innet_drl as innet
from innet_drl import errors

COLUMNS: dict[str, Any] = {
    "observation/camera": ("uint8", (16, 16)),
    "observation/place": ("float32", (2,)),
    "action": "int64",
    "reward": "float32",
    "note": ("uint8", (4,)),
}
VIEW = innet.NStep(stack={"camera": 3}, n=3, gamma=0.9)


@pytest.fixture(params=["in process", "served"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory(max_bytes=1 << 30) as memory:
            yield memory
        return
    with served_memories(tmp_path, 1) as address, innet.connect(address) as client:
        yield client


def make(replay: innet.Replay, name: str, **settings: Any) -> None:
    arguments = {"sampler": "fifo", "max_times_sampled": 1, "view": VIEW, **settings}
    replay.create_table(innet.Table(name, COLUMNS, 5000, **arguments))


def steps(seed: int, count: int, envs: int, autoreset: str) -> dict[str, Any]:
    """Random steps [count, envs, ...] of an environment in this autoreset mode, with Q-values."""
    random = np.random.default_rng(seed)

    def seen() -> dict[str, Any]:
        return {
            "camera": random.integers(0, 256, (count, envs, 16, 16), np.uint8),
            "place": random.normal(size=(count, envs, 2)).astype(np.float32),
        }

    ends = random.random((count, envs))
    rows: dict[str, Any] = {
        "observation": seen(),
        "action": random.integers(0, 4, (count, envs)),
        "reward": random.normal(size=(count, envs)).astype(np.float32),
        "note": random.integers(0, 256, (count, envs, 4), np.uint8),
        "terminated": ends < 0.1,
        "truncated": ends > 0.9,
        "q": random.normal(size=(count, envs, 4)).astype(np.float32),
    }
    over = rows["terminated"] | rows["truncated"]
    if autoreset == "NEXT_STEP":
        # The row after an end has the last observation alone.
        rows["final"] = np.zeros((count, envs), bool)
        for t in range(1, count):
            rows["final"][t] = over[t - 1] & ~rows["final"][t - 1]
        for name in ("terminated", "truncated"):
            rows[name] &= ~rows["final"]
    else:
        rows["final_observation"] = seen()
        rows["final"] = over
        rows["final_q"] = random.normal(size=(count, envs, 4)).astype(np.float32)
    return rows


def part(rows: Any, key: Any) -> Any:
    if isinstance(rows, dict):
        return {name: part(value, key) for name, value in rows.items()}
    return rows[key]


def content(replay: innet.Replay, name: str) -> dict[str, Any]:
    """All items of a table in the order of their insertion; ids as differences from the first."""
    batch = replay.sample(name, replay.stats()["tables"][name]["items"])
    return {**batch.as_dict(), "ids": batch.ids - batch.ids[0]}


def equal(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            equal(found[name], expected[name])
    else:
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("envs", [1, 3])
@pytest.mark.parametrize("autoreset", ["NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("chunk_steps", [1, 7, 50])
def test_blocks_are_as_their_steps(replay: innet.Replay, autoreset: str, envs: int, chunk_steps: int) -> None:
    rows, count = steps(chunk_steps, 200, envs, autoreset), 200
    make(replay, "steps")
    make(replay, "blocks")
    with replay.writer("steps", envs, chunk_steps=chunk_steps) as writer:
        for t in range(count):
            writer.append(**part(rows, t))
    lengths = np.random.default_rng(1)
    with replay.writer("blocks", envs, chunk_steps=chunk_steps) as blocks:
        at = 0
        while at < count:
            length = int(lengths.integers(0, 60))
            blocks.extend(**part(rows, slice(at, at + length)))
            at += length
    assert (blocks.steps, blocks.items, blocks.dropped_windows) == (writer.steps, writer.items, writer.dropped_windows)
    tables = replay.stats()["tables"]
    for figure in ("steps", "items", "bytes", "chunks"):
        assert tables["blocks"].get(figure) == tables["steps"].get(figure), figure
    equal(content(replay, "blocks"), content(replay, "steps"))


def test_priorities_of_a_block_are_those_of_its_steps() -> None:
    with innet.Memory(seed=3) as memory:
        random = np.random.default_rng(0)
        rows, priority = steps(0, 100, 2, "SAME_STEP"), random.random((100, 2))
        for name in ("steps", "blocks"):
            make(memory, name, sampler="max_heap", priority_exponent=1.0, max_times_sampled=0)
        with memory.writer("steps", 2) as writer, memory.writer("blocks", 2) as blocks:
            for t in range(100):
                writer.append(**part(rows, t), priority=priority[t])
            blocks.extend(**rows, priority=priority)
        assert memory.stats()["tables"]["blocks"]["total_mass"] == memory.stats()["tables"]["steps"]["total_mass"]


def test_a_refused_block_leaves_nothing(replay: innet.Replay) -> None:
    make(replay, "t")
    rows = steps(0, 20, 2, "SAME_STEP")
    reward = rows["reward"].copy()
    reward[7, 1] = np.nan
    q = rows["q"].copy()
    action = rows["action"].copy()
    action[3, 0] = 9
    with replay.writer("t", 2) as writer:
        for name, value, message in [
            ("reward", reward, '"reward" of stream 1 at step 7 is NaN'),
            ("action", action, "stream 0 at step 3 has the action 9 without a Q-value: q has 4 actions"),
            (
                "reward",
                rows["reward"][:19],
                r'"reward" has to be float32\[20, 2\] \(steps and environments first\), got .*19, 2',
            ),
            ("terminated", rows["terminated"][0], r'"terminated" of a block has to be bool\[T, 2\].*, got bool\[2\]'),
            ("terminated", False, r'"terminated" of a block has to be bool'),
            ("truncated", rows["truncated"][:, :1], r'"truncated" has to be bool\[20, 2\]'),
            ("q", q[:, :, :0], r'"q" has to be float32\[20, 2, 1\]'),
            ("priority", np.full((20, 2), -1.0), "priority"),
            ("observation", {"camera": rows["observation"]["camera"]}, 'and "place" is missing'),
            ("final", np.ones((20, 2), bool), "has a final observation, but its step neither"),
        ]:
            with pytest.raises(errors.ReplayError, match=message):
                writer.extend(**{**rows, name: value})
        assert (writer.steps, writer.items) == (0, 0)
        writer.extend(**part(rows, slice(0, 0)))
        with pytest.raises(errors.SchemaError, match=r"\[0, 2\]"):
            writer.extend(**{**part(rows, slice(0, 0)), "reward": np.zeros((0, 3), np.float32)})
        writer.extend(**rows)
        assert writer.steps == 40
        kept = {name: part(rows[name], slice(0, 2)) for name in ("observation", "action", "reward", "note")}
        none, final = np.zeros((2, 2), bool), np.array([[False, False], [True, False]])
        with pytest.raises(
            errors.SchemaError, match="stream 0 at step 1 has a final row, but the row before it neither"
        ):
            writer.extend(**kept, terminated=none, truncated=none, final=final)
        writer.extend(**kept, terminated=final[::-1], truncated=none, final=final)
        assert writer.steps == 43


def test_a_block_waits_for_its_predecessor(replay: innet.Replay) -> None:
    """The rate limiter blocks the first block's steps until a sample; a second block is refused meanwhile."""
    make(replay, "t", min_size=10, samples_per_insert=1.0, slack=60.0, sampler="uniform", max_times_sampled=0)
    # A client sends up to 32 pushes ahead of their answers.
    rows = steps(0, 200, 1, "SAME_STEP")
    with replay.writer("t", 1, chunk_steps=1) as writer:
        writer.extend(**rows, timeout=0.2)
        assert writer.steps == 200
        for _ in range(2):
            with pytest.raises(errors.DeadlineError, match="the next insert waits until"):
                writer.extend(**rows, timeout=0.2)
            assert writer.steps == 200
        inserted = replay.stats()["tables"]["t"]["inserted_steps"]
        assert inserted < 200
        sampler = threading.Thread(target=lambda: [replay.sample("t", 4) for _ in range(90)])
        sampler.start()
        writer.extend(**rows, timeout=20)
        writer.flush(20)
        sampler.join()
        assert writer.steps == 400
        assert replay.stats()["tables"]["t"]["inserted_steps"] >= 400


def one(t: int) -> dict[str, Any]:
    place = np.full((1, 2), t, np.float32)
    return {
        "observation": {"camera": np.zeros((1, 16, 16), np.uint8), "place": place},
        "action": [0],
        "reward": float(t),
        "note": np.zeros((1, 4), np.uint8),
        "terminated": False,
        "truncated": False,
    }


def test_a_loop_that_writes_and_samples_gets_its_own_steps(replay: innet.Replay) -> None:
    """At most four samples for each step: the loop waits for the ratio, and its steps come from the open chunk."""
    make(replay, "t", sampler="uniform", max_times_sampled=0, samples_per_insert=4.0, slack=8.0)
    began = time.monotonic()
    with replay.writer("t", 1, innet.NStep()) as writer:
        for t in range(30):
            writer.append(**one(t))
            if t > 2:
                replay.sample("t", 4, innet.NStep(), timeout=20)
        # A call that does not wait leaves the chunk open.
        before = replay.stats()["tables"]["t"]["inserted_steps"]
        writer.append(**one(30))
        make(replay, "other")
        with replay.writer("other", 1) as other:
            other.append(**one(0))
        assert replay.stats()["tables"]["t"]["inserted_steps"] == before
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_iterator_gets_the_steps_of_open_chunks(replay: innet.Replay, prefetch: int) -> None:
    make(replay, "t", sampler="uniform", max_times_sampled=0, samples_per_insert=4.0, slack=8.0)
    view = innet.NStep()
    with replay.writer("t", 1, view) as writer:
        for t in range(8):
            writer.append(**one(t))
        with replay.batches("t", 4, view, prefetch=prefetch, timeout=20) as batches:
            for t in range(8, 30):
                next(batches)
                writer.append(**one(t))


def test_a_call_that_allows_fewer_items_gets_the_open_chunk_first(replay: innet.Replay) -> None:
    make(replay, "t")
    with replay.writer("t", 1, innet.NStep()) as writer:
        for t in range(10):
            writer.append(**one(t))
        assert len(replay.sample("t", 64, innet.NStep(), allow_short=True, timeout=0.5)) == 9


def test_threads_send_their_steps_to_a_call_that_waits(replay: innet.Replay) -> None:
    """A thread that writes slowly: its steps arrive one by one while another thread waits for them."""
    make(replay, "t", min_size=12, sampler="uniform", max_times_sampled=0)
    ended = threading.Event()

    def act() -> None:
        with replay.writer("t", 1, innet.NStep()) as writer:
            t = 0
            while not ended.is_set():
                writer.append(**one(t))
                t += 1
                time.sleep(0.02)

    actor = threading.Thread(target=act)
    actor.start()
    try:
        # In chunks of 50 steps this would take a second.
        batch = replay.sample("t", 4, innet.NStep(), timeout=20)
        assert len(batch) == 4
        assert replay.stats()["tables"]["t"]["inserted_steps"] < 45
    finally:
        ended.set()
        actor.join()


@pytest.mark.parametrize("as_block", [False, True])
@pytest.mark.parametrize("prefetch", [None, 0, 2])
def test_the_last_step_that_is_waited_for_arrives(replay: innet.Replay, prefetch: int | None, as_block: bool) -> None:
    """The call waits first, and no step follows the one that it needs."""
    make(replay, "t", min_size=10, sampler="uniform", max_times_sampled=0)
    view = innet.NStep()
    batches = None if prefetch is None else replay.batches("t", 4, view, prefetch=prefetch, timeout=20)
    found: list[innet.Batch] = []

    def sample() -> None:
        found.append(replay.sample("t", 4, view, timeout=20) if batches is None else next(batches))

    sampler = threading.Thread(target=sample)
    sampler.start()
    with replay.writer("t", 1, view) as writer:
        until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] >= 1)
        rows = [one(t) for t in range(11)]
        if as_block:
            writer.extend(**block_of(rows))
        else:
            for row in rows:
                writer.append(**row)
        sampler.join(15)
        assert [len(batch) for batch in found] == [4]
    if batches is not None:
        batches.close()


def block_of(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows of `one` as a block."""
    seen = {part: np.stack([row["observation"][part] for row in rows]) for part in rows[0]["observation"]}
    return {
        "observation": seen,
        "action": np.zeros((len(rows), 1), np.int64),
        "reward": np.array([[row["reward"]] for row in rows], np.float32),
        "note": np.zeros((len(rows), 1, 4), np.uint8),
        "terminated": np.zeros((len(rows), 1), bool),
        "truncated": np.zeros((len(rows), 1), bool),
    }


def test_no_unsent_step_of_a_closed_writer_is_looked_for(replay: innet.Replay) -> None:
    make(replay, "t")
    writer = replay.writer("t", 1)
    writer.append(**one(0))
    writer.close()
    with pytest.raises(errors.DeadlineError, match="min_size"):
        replay.sample("t", 4, timeout=0.1)
