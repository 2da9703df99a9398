"""Whole trajectories against lists of episodes, bit for bit: in process, served, over two servers, restored."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from serving import served_memories

import innet_drl as innet
from innet_drl import errors

STREAMS = 3
COLUMNS: dict[str, Any] = {
    "observation/view": ("uint8", (3, 2)),
    "observation/words": ("int32", (None,)),
    "action": "int64",
    "reward": "float32",
    "place": ("int32", (2,)),
    "tokens": ("float32", (None, 2)),
}

MakeReplay = Callable[[innet.Table], innet.Replay]


@pytest.fixture(params=["in process", "served", "two servers"])
def make_replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeReplay]:
    with ExitStack() as stack:

        def make(table: innet.Table) -> innet.Replay:
            if request.param == "in process":
                return stack.enter_context(innet.Memory([table], seed=1))
            servers = 2 if request.param == "two servers" else 1
            address = stack.enter_context(served_memories(tmp_path, servers))
            return stack.enter_context(innet.connect(address, tables=[table]))

        yield make


def table(**settings: Any) -> innet.Table:
    arguments: dict[str, Any] = {"sampler": "uniform", "max_times_sampled": 1, **settings}
    return innet.Table("t", COLUMNS, 20_000, **arguments)


@dataclass
class Row:
    values: dict[str, Any]
    first: bool = False
    terminated: bool = False
    truncated: bool = False
    final: bool = False

    @property
    def ends(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Expected:
    """One item: its steps, and the row with the observation after them."""

    steps: list[Row]
    following: Row | None
    begins: bool
    ends: bool


def play(writer: innet.Writer, seed: int, count: int, number: int = 0) -> list[list[Row]]:
    """Appends random steps with all kinds of ends, and returns the rows of each stream."""
    random = np.random.default_rng(seed)
    recorded: list[list[Row]] = [[] for _ in range(STREAMS)]

    def observation() -> dict[str, Any]:
        words = random.integers(-9, 9, random.integers(0, 4), np.int32)
        return {"view": random.integers(0, 256, (3, 2), np.uint8), "words": words}

    for _ in range(count):
        rows, last_observations = [], []
        for stream, known in enumerate(recorded):
            last = known[-1] if known else None
            values = {
                "observation": observation(),
                "action": int(random.integers(0, 100)),
                "reward": float(np.float32(random.normal())),
                "place": np.array([number * STREAMS + stream, len(known)], np.int32),
                "tokens": random.normal(size=(random.integers(0, 5), 2)).astype(np.float32),
            }
            # A row of its own has the last observation, the same step has it, or nobody has.
            final = last is not None and last.ends and random.random() < 0.3
            # After an end mostly another episode, else another life; elsewhere rarely a reset without an end.
            starts = last is None or last.final or random.random() < (0.8 if last.ends else 0.03)
            row = Row(values, first=starts and not final, final=final)
            if not final:
                kind = random.random()
                row.terminated, row.truncated = kind < 0.08, 0.06 < kind < 0.14
            rows.append(row)
            last_observations.append(observation() if row.ends and random.random() < 0.4 else None)
        finals = np.array([row.final for row in rows])
        same_step = not finals.any()
        if same_step:
            finals = np.array([shown is not None for shown in last_observations])
        else:
            last_observations = [None] * STREAMS
        arguments: dict[str, Any] = {
            "observation": {
                "view": np.stack([row.values["observation"]["view"] for row in rows]),
                "words": [row.values["observation"]["words"] for row in rows],
            },
            "tokens": [row.values["tokens"] for row in rows],
            **{name: np.array([row.values[name] for row in rows]) for name in ("action", "place")},
            "reward": np.array([row.values["reward"] for row in rows], np.float32),
            **{name: np.array([getattr(row, name) for row in rows]) for name in ("terminated", "truncated", "first")},
            "final": finals,
        }
        if same_step and finals.any():
            seen = [shown or rows[0].values["observation"] for shown in last_observations]
            arguments["final_observation"] = {
                "view": np.stack([shown["view"] for shown in seen]),
                "words": [shown["words"] for shown in seen],
            }
        writer.append(**arguments)
        for known, row, shown in zip(recorded, rows, last_observations, strict=True):
            known.append(row)
            if shown is not None:
                known.append(Row({"observation": shown}, final=True))
    return recorded


def items_of(rows: list[Row], max_steps: int) -> tuple[list[Expected], int]:
    """The items of a stream, and the trajectories that were left unfinished."""
    lives: list[tuple[int, int]] = []
    start = None
    for at, row in enumerate(rows):
        if row.final:
            continue
        if row.first and start is not None:
            lives.append((start, at))
            start = None
        start = at if start is None else start
        if row.ends:
            lives.append((start, at + 1))
            start = None
    if start is not None:
        lives.append((start, len(rows)))
    items, unfinished = [], 0
    for start, end in lives:
        for at in range(start, end, max_steps):
            until = min(at + max_steps, end)
            follows = until < len(rows) and not rows[until].first
            ends = rows[until - 1].ends
            if not (ends or follows):
                unfinished += 1
                continue
            items.append(Expected(rows[at:until], rows[until] if follows else None, at == start, ends))
    return items, unfinished


def drained(replay: innet.Replay, view: innet.Trajectory, count: int) -> Iterator[innet.Batch]:
    while count > 0:
        batch = replay.sample("t", min(count, 23), view, timeout=10, threads=2)
        yield batch
        count -= len(batch)


def check(batch: innet.Batch, at: int, expected: Expected, gamma: float) -> None:
    """Item `at` of a batch, bit for bit."""
    steps = [row.values for row in expected.steps]
    np.testing.assert_array_equal(batch.place[at], [step["place"] for step in steps])
    np.testing.assert_array_equal(batch.action[at], [step["action"] for step in steps])
    np.testing.assert_array_equal(batch.reward[at], np.array([step["reward"] for step in steps], np.float32))
    np.testing.assert_array_equal(batch.observation["view"][at], [step["observation"]["view"] for step in steps])
    for found, of in (
        (batch.tokens[at], [step["tokens"] for step in steps]),
        (batch.observation["words"][at], [step["observation"]["words"] for step in steps]),
    ):
        assert found.lengths.tolist() == [len(value) for value in of]
        np.testing.assert_array_equal(found.values, np.concatenate(of))
    returns, following = [], 0.0
    for step in reversed(steps):
        following = step["reward"] + gamma * following
        returns.append(following)
    np.testing.assert_array_equal(batch.returns[at], np.array(returns[::-1]).astype(np.float32))
    assert batch.begins[at] == expected.begins
    assert batch.ends[at] == expected.ends
    last = expected.steps[-1]
    assert (batch.terminated[at], batch.truncated[at]) == (last.terminated, last.truncated)
    assert batch.has_next[at] == (expected.following is not None)
    after = expected.following.values["observation"] if expected.following else {"view": np.zeros((3, 2)), "words": []}
    np.testing.assert_array_equal(batch.next_observation["view"][at], after["view"])
    np.testing.assert_array_equal(batch.next_observation["words"][at], after["words"])


def check_all(replay: innet.Replay, view: innet.Trajectory, items: list[Expected]) -> None:
    """Draws every item once."""
    places = {tuple(item.steps[0].values["place"].tolist()): item for item in items}
    assert len(places) == len(items)
    for batch in drained(replay, view, len(items)):
        assert all(array.dtype == np.bool_ for array in (batch.begins, batch.ends, batch.has_next, batch.truncated))
        for at in range(len(batch)):
            check(batch, at, places.pop(tuple(batch.place[at][0].tolist())), view.gamma)
    assert not places
    with pytest.raises(errors.DeadlineError):
        replay.sample("t", 1, view, timeout=0)


@pytest.mark.parametrize(
    ("max_steps", "gamma", "chunk_steps"), [(1000, 1.0, 50), (4, 0.9, 7), (1, 0.5, 1), (7, 1.0, 3)]
)
def test_items_are_the_trajectories_of_the_episodes(
    make_replay: MakeReplay, max_steps: int, gamma: float, chunk_steps: int
) -> None:
    view = innet.Trajectory(max_steps, gamma)
    replay = make_replay(table(view=view))
    items, unfinished, dropped = [], 0, 0
    for number in range(2):
        with replay.writer("t", STREAMS, chunk_steps=chunk_steps, server=number) as writer:
            recorded = play(writer, seed=10 * max_steps + number, count=150, number=number)
        for rows in recorded:
            of_stream, left = items_of(rows, max_steps)
            items += of_stream
            unfinished += left
        dropped += writer.dropped_windows
    assert dropped == unfinished > 0
    parts = {(item.begins, item.ends) for item in items}
    assert parts == ({(True, True), (True, False), (False, True), (False, False)} if max_steps < 10 else {(True, True)})
    check_all(replay, view, items)


def test_a_snapshot_keeps_trajectories_and_those_that_go_on(tmp_path: Path) -> None:
    view = innet.Trajectory(5, 0.9)
    saved = innet.Memory([table()])
    with saved.writer("t", STREAMS, view, chunk_steps=4) as writer:
        recorded = play(writer, seed=3, count=120)
    saved.save(tmp_path / "snapshot")
    with innet.Memory([table()]) as restored:
        restored.restore(tmp_path / "snapshot")
        check_all(restored, view, [item for rows in recorded for item in items_of(rows, 5)[0]])


def group(writer: innet.Writer, size: int, complete: bool = True, **more: Any) -> None:
    for member in range(size):
        ends = complete and member == size - 1
        tokens = [np.arange(member, dtype=np.int32)]
        writer.append(tokens=tokens, reward=[float(member)], terminated=[ends], truncated=[False], **more)


GROUPS: dict[str, Any] = {"tokens": ("int32", (None,)), "reward": "float32"}


def test_only_complete_groups_are_items(make_replay: MakeReplay) -> None:
    view = innet.Trajectory()
    replay = make_replay(innet.Table("t", GROUPS, 4000, view=view))
    with replay.writer("t", 1) as writer:
        group(writer, 8)
        group(writer, 3, complete=False)
        assert (writer.items, writer.dropped_windows) == (1, 0)
    assert writer.dropped_windows == 1
    batch = replay.sample("t", 4)
    assert batch.tokens.offsets.tolist() == [0, 8, 16, 24, 32]
    assert batch.tokens.values.lengths.tolist() == list(range(8)) * 4
    assert all(array.all() for array in (batch.begins, batch.ends, batch.terminated))
    assert batch.returns[0].tolist() == [28, 28, 27, 25, 22, 18, 13, 7]
    assert not batch.as_dict().keys() & {"next_observation", "has_next"}


def test_the_priority_given_last_counts(make_replay: MakeReplay) -> None:
    replay = make_replay(innet.Table("t", GROUPS, 4000, view=innet.Trajectory(), priority_exponent=1.0))
    with replay.writer("t", 1) as writer:
        for priority in (1.0, 3.0):
            group(writer, 3, complete=False, priority=[9.0])
            writer.append(tokens=[[1]], reward=[priority], terminated=[True], truncated=[False], priority=[priority])
    batch = replay.sample("t", 400)
    of_item = np.array([batch.reward[at][-1] for at in range(400)])
    np.testing.assert_allclose(batch.probabilities, of_item / 4)


def test_names_of_arrays_and_numbers_are_checked() -> None:
    with pytest.raises(errors.ConfigError, match="max_steps is 1 to 65534, got 0"):
        innet.Trajectory(0)
    with pytest.raises(errors.ConfigError, match="gamma is 0 to 1"):
        innet.Trajectory(gamma=1.5)
    with pytest.raises(errors.SchemaError, match='"returns" has the name of an array'):
        innet.Table("t", {**GROUPS, "returns": "float32"}, 10, view=innet.Trajectory(5))
    view = innet.Trajectory(12, 0.5, "frame")
    assert repr(view) == "Trajectory(max_steps=12, gamma=0.5, observation='frame')"
    with innet.Memory([innet.Table("t", GROUPS, 2000)]) as memory:
        with pytest.raises(errors.SchemaError, match='column "frame"'):
            memory.writer("t", 1, view)
        with pytest.raises(errors.ConfigError, match="max_steps"):
            memory.writer("t", 1, innet.Trajectory(2000))
        assert memory.table("t") == innet.Table("t", GROUPS, 2000)


def test_a_table_with_trajectories_is_read_as_it_was_defined(make_replay: MakeReplay) -> None:
    defined = innet.Table("t", GROUPS, 2000, view=innet.Trajectory(12, 0.5))
    assert make_replay(defined).table("t") == defined


def test_an_episode_that_outlasts_the_table_is_counted_and_said(make_replay: MakeReplay) -> None:
    replay = make_replay(innet.Table("t", GROUPS, 100, view=innet.Trajectory(40)))
    with ExitStack() as stack:
        slow, fast = (stack.enter_context(replay.writer("t", 1, chunk_steps=5, server=0)) for _ in range(2))
        group(slow, 20, complete=False)
        slow.flush()
        group(fast, 100, complete=False, first=[True])
        fast.flush()
        slow.append(tokens=[[1]], reward=[0.0], terminated=[True], truncated=[False])
        slow.flush()
        assert replay.stats()["tables"]["t"]["late_items"] == 1
        with pytest.raises(errors.DeadlineError, match=r"larger capacity|on the servers"):
            replay.sample("t", 1, timeout=0)


def test_tensors_iterators_and_mixes_have_the_same_trajectories(make_replay: MakeReplay) -> None:
    view = innet.Trajectory(6, 0.9)
    replay = make_replay(table(view=view, max_times_sampled=0))
    replay.create_table(innet.Table("other", COLUMNS, 20_000, view=view))
    items: dict[tuple[int, ...], Expected] = {}
    for number, name in enumerate(("t", "other")):
        with replay.writer(name, STREAMS) as writer:
            for rows in play(writer, seed=number, count=60, number=number):
                items |= {tuple(item.steps[0].values["place"].tolist()): item for item in items_of(rows, 6)[0]}
    mix = innet.Mix({"t": 0.5, "other": 0.5})
    batches: list[Any] = [replay.sample(mix, 32), replay.sample(mix, 32, device="cpu")]
    with replay.batches(mix, 32) as iterator:
        batches.append(next(iterator))
    for batch in batches:
        for at in range(len(batch)):
            place = tuple(batch.place[at][0].tolist())
            assert place[0] // STREAMS == batch.tables[at]
            expected = items[place]
            assert batch.action[at].tolist() == [row.values["action"] for row in expected.steps]
            assert batch.tokens[at].lengths.tolist() == [len(row.values["tokens"]) for row in expected.steps]
            assert (bool(batch.begins[at]), bool(batch.ends[at])) == (expected.begins, expected.ends)


def test_a_recorder_writes_the_episodes_of_an_environment(make_replay: MakeReplay) -> None:
    env = gymnasium.make("CartPole-v1", max_episode_steps=15)
    spaces = env.observation_space, env.action_space
    replay = make_replay(innet.Table.from_spaces("t", *spaces, 2000, view=innet.Trajectory(30), max_times_sampled=1))
    observations: list[list[Any]] = []
    ends: list[tuple[bool, bool]] = []
    with innet.Recorder(env, replay.writer("t", 1, server=0)) as recorder:
        for seed in range(20):
            observations.append([recorder.reset(seed=seed)[0]])
            over = False
            while not over:
                observation, _, terminated, truncated, _ = recorder.step(
                    seed % 2 if seed < 10 else len(observations[-1]) % 2
                )
                observations[-1].append(observation)
                over = terminated or truncated
            ends.append((terminated, truncated))
    assert {(True, False), (False, True)} <= set(ends)
    batch = replay.sample("t", 20)
    of_episode = {tuple(episode[0]): (episode, end) for episode, end in zip(observations, ends, strict=True)}
    for at in range(20):
        episode, end = of_episode.pop(tuple(batch.observation[at][0]))
        np.testing.assert_array_equal(batch.observation[at], episode[:-1])
        np.testing.assert_array_equal(batch.next_observation[at], episode[-1])
        assert (batch.terminated[at], batch.truncated[at]) == end
        assert batch.returns[at][0] == len(episode) - 1
