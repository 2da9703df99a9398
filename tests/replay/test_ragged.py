"""Ragged columns against plain lists of arrays: every way to write, every view, in process and served."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from serving import served_memories

import innet_drl as innet
from innet_drl import datasets, errors

ENVS = 3
COLUMNS: dict[str, Any] = {
    "observation/tokens": ("int32", (None,)),
    "observation/points": innet.Column("float32", (None, 3), "lz4"),
    "observation/camera": ("uint8", (8, 8)),
    "action": innet.Column("uint8", (None,), "zstd", max_length=40),
    "reward": "float32",
    "id": "int64",
}
INNER = {"tokens": ("int32", ()), "points": ("float32", (3,)), "action": ("uint8", ())}


@pytest.fixture(params=["in process", "served", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory() as memory:
            yield memory
        return
    with served_memories(tmp_path, 1 + (request.param == "two servers")) as address, innet.connect(address) as client:
        yield client


def table(name: str = "t", **settings: Any) -> innet.Table:
    return innet.Table(name, COLUMNS, 5000, sampler="uniform", **settings)


def value(random: np.random.Generator, name: str) -> NDArray[Any]:
    dtype, inner = INNER[name]
    length = 0 if random.random() < 0.3 else int(random.integers(40))
    return random.integers(0, 200, (length, *inner)).astype(dtype)


class Episodes:
    """Episodes of random lengths, written for three environments side by side, and what was written, by id."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.steps: list[dict[str, Any]] = []
        """Of each id its observation, action, episode, and step of the episode."""
        self.observations: list[list[dict[str, Any]]] = [[] for _ in range(ENVS)]
        """Of each episode, the last one included once it has come."""
        self.current = list(range(ENVS))
        self.seen = [self.observe() for _ in range(ENVS)]

    def observe(self) -> dict[str, Any]:
        random = self.random
        camera = np.full((8, 8), 3, np.uint8)
        camera[random.integers(8)] = random.integers(256)
        return {"tokens": value(random, "tokens"), "points": value(random, "points"), "camera": camera}

    def step(self) -> dict[str, Any]:
        """One row of each environment: lists, and the last observations of those that end."""
        over = self.random.random(ENVS) < 0.3
        actions = [value(self.random, "action") for _ in range(ENVS)]
        ids = len(self.steps) + np.arange(ENVS)
        last = [self.observe() for _ in range(ENVS)]
        for env in range(ENVS):
            episode = self.observations[self.current[env]]
            place = {"episode": self.current[env], "at": len(episode)}
            self.steps.append({"action": actions[env], "seen": self.seen[env], **place})
            episode.append(self.seen[env])
            self.seen[env] = last[env]
            if over[env]:
                episode.append(last[env])
                self.current[env] = len(self.observations)
                self.observations.append([])
                self.seen[env] = self.observe()
        return {
            "observation": [self.steps[id]["seen"] for id in ids],
            "final_observation": last,
            "final": over,
            "action": actions,
            "reward": np.zeros(ENVS, np.float32),
            "id": ids,
            "terminated": over,
            "truncated": np.zeros(ENVS, bool),
        }


def observation(rows: list[dict[str, Any]], form: str) -> dict[str, Any]:
    """Observations of each environment as arguments of `append`."""
    parts = {name: [row[name] for row in rows] for name in ("tokens", "points")}
    return {
        **{name: given(part, name, form) for name, part in parts.items()},
        "camera": np.stack([r["camera"] for r in rows]),
    }


def given(rows: list[NDArray[Any]], name: str, form: str) -> Any:
    match form:
        case "arrays":
            return rows
        case "lists":
            return tuple(row.tolist() for row in rows)
        case _:
            dtype, inner = INNER[name]
            return innet.Ragged.of([np.empty((0, *inner), dtype), *rows], dtype)[1:]


def append(writer: innet.Writer, step: dict[str, Any], form: str) -> None:
    for name in ("observation", "final_observation"):
        step[name] = observation(step[name], form)
    writer.append(**{**step, "action": given(step["action"], "action", form)})


def extend(writer: innet.Writer, steps: list[dict[str, Any]], form: str) -> None:
    """The steps as one block."""

    def ragged(name: str, rows: list[list[NDArray[Any]]]) -> Any:
        dtype, _ = INNER[name]
        if form == "lists":
            return rows
        flat = innet.Ragged.of([row for step in rows for row in step], dtype)
        return flat if form == "Ragged" else innet.Ragged(flat, np.arange(len(rows) + 1) * ENVS)

    block: dict[str, Any] = {
        name: np.stack([step[name] for step in steps]) for name in ("final", "reward", "id", "terminated", "truncated")
    }
    for name in ("observation", "final_observation"):
        block[name] = {
            part: ragged(part, [[row[part] for row in step[name]] for step in steps]) for part in ("tokens", "points")
        } | {"camera": np.stack([np.stack([row["camera"] for row in step[name]]) for step in steps])}
    block["action"] = ragged("action", [step["action"] for step in steps])
    writer.extend(**block)


def write(replay: innet.Replay, view: Any, seed: int, name: str = "t") -> Episodes:
    episodes = Episodes(seed)
    for server in range(datasets.number_of_servers(replay)):
        with replay.writer(name, ENVS, view, chunk_steps=4, server=server) as writer:
            for _ in range(5):
                for form in ("arrays", "lists", "Ragged"):
                    append(writer, episodes.step(), form)
                for form in ("lists", "Ragged", "nested"):
                    extend(writer, [episodes.step() for _ in range(3)], form)
    return episodes


def same(one: Any, other: NDArray[Any]) -> None:
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("seed", range(3))
def test_transitions_are_the_lists_that_were_written(replay: innet.Replay, seed: int) -> None:
    view = innet.NStep(n=2)
    replay.create_table(table(view=view))
    episodes = write(replay, None, seed)
    batch = replay.sample("t", 300)
    assert isinstance(batch.observation["tokens"], innet.Ragged)
    for item, id in enumerate(batch.id):
        step = episodes.steps[id]
        episode = episodes.observations[step["episode"]]
        following = episode[min(step["at"] + 2, len(episode) - 1)]
        for part in ("tokens", "points"):
            same(batch.observation[part][item], step["seen"][part])
            same(batch.next_observation[part][item], following[part])
        same(batch.observation["camera"][item], step["seen"]["camera"])
        same(batch.action[item], step["action"])
    assert not any(array.flags.owndata for array in (batch.action.values, batch.action.offsets))


@pytest.mark.parametrize("seed", range(2))
def test_sequences_and_windows_nest(replay: innet.Replay, seed: int) -> None:
    view = innet.Sequences(3, period=1, state=("action",))
    replay.create_table(table(view=view))
    episodes = write(replay, None, seed)
    batch = replay.sample("t", 200)
    tokens = batch.observation["tokens"]
    assert tokens.lengths.tolist() == [4] * 200
    for item, id in enumerate(batch.id[:, 0]):
        step = episodes.steps[id]
        episode = episodes.observations[step["episode"]]
        for t in range(4):
            expected = episode[step["at"] + t] if step["at"] + t < len(episode) else None
            for part in ("tokens", "points"):
                found = batch.observation[part][item][t]
                same(found, expected[part] if expected else np.empty((0, *INNER[part][1]), INNER[part][0]))
        same(batch.action[item], step["action"])
    window = replay.sample("t", 100, innet.Window(0, 2))
    for item, id in enumerate(window.id[:, 0]):
        step = episodes.steps[id]
        episode = episodes.observations[step["episode"]]
        for slot in range(3):
            found = window["observation"]["points"][item][slot]
            if window.mask[item, slot]:
                same(found, episode[step["at"] + slot]["points"])
            else:
                assert found.shape == (0, 3)
    padded = window.action.padded(value=9)
    assert padded.shape == (100, 3, int(window.action.values.lengths.max()))
    assert (padded[~window.action.mask()] == 9).all()


def test_mixes_episodes_and_snapshots_have_them(replay: innet.Replay, tmp_path: Path) -> None:
    view = innet.NStep()
    written = {}
    for seed, name in enumerate(("a", "b")):
        replay.create_table(table(name, view=view))
        written[name] = write(replay, None, seed, name)
    batch = replay.sample(innet.Mix({"a": 0.5, "b": 0.5}), 60)
    for item, (source, id) in enumerate(zip(batch.tables, batch.id, strict=True)):
        same(batch.action[item], written["ab"[source]].steps[id]["action"])

    def check(memory: innet.Replay) -> None:
        found = 0
        for episode in memory.episodes("a"):
            assert list(episode) == [
                "terminated",
                "truncated",
                "first",
                "final",
                "observation",
                "action",
                "reward",
                "id",
            ]
            for row, id in enumerate(episode["id"]):
                step = written["a"].steps[id]
                if episode["final"][row]:
                    assert len(episode["action"][row]) == 0
                    continue
                found += 1
                same(episode["action"][row], step["action"])
                same(episode["observation"]["points"][row], step["seen"]["points"])
        assert found == len(written["a"].steps)

    check(replay)
    if isinstance(replay, innet.Memory):
        replay.save(tmp_path / "saved")
        with innet.Memory([table(name, view=view) for name in "ab"]) as restored:
            restored.restore(tmp_path / "saved")
            check(restored)
            same(restored.sample("a", 1, innet.Window(0, 0)).action.offsets[:1], np.zeros(1, np.int64))


def test_slices_pickles_and_tensors_of_a_batch(replay: innet.Replay) -> None:
    import torch

    view = innet.Sequences(2, period=1)
    replay.create_table(table(view=view))
    write(replay, None, 5)
    batch = replay.sample("t", 40)
    tensors = replay.sample("t", 40, device="cpu")
    assert isinstance(tensors.observation["tokens"].values.values, torch.Tensor)
    for whole in (batch, tensors):
        for part in (slice(3, 9), slice(0, 40, 7), slice(5, 5), slice(39, 60)):
            piece = whole[part]
            again = pickle.loads(pickle.dumps(piece))
            for name in ("tokens", "points"):
                expected = [whole.observation[name][item] for item in range(40)[part]]
                for found in (piece.observation[name], again.observation[name]):
                    assert len(found) == len(expected)
                    assert all(one == other for one, other in zip(found, expected, strict=True))
    twice = batch[2:30:3][1:6:2]
    assert all(one == batch.action[item] for one, item in zip(twice.action, (5, 11, 17), strict=True))


def test_bad_input_names_column_and_row(replay: innet.Replay) -> None:
    columns = {
        "tokens": innet.Column("int32", (None,), max_length=4),
        "points": ("float32", (None, 3)),
        "fixed": ("int32", (2,)),
    }
    replay.create_table(innet.Table("t", columns, 1000, view=innet.Window(0, 0)))
    flags = np.zeros(2, bool)
    row: dict[str, Any] = {"fixed": np.zeros((2, 2), np.int32), "terminated": flags, "truncated": flags}
    tokens, points = [[1], [2, 3]], [np.zeros((1, 3), np.float32), np.zeros((0, 3), np.float32)]
    with replay.writer("t", 2) as writer:
        bad: list[tuple[dict[str, Any], str]] = [
            ({"tokens": [[1], [1.5]]}, '"tokens" of stream 1 has to be int32 of the shape .None,., got float64'),
            ({"tokens": [np.ones(1, np.int64), [1]]}, '"tokens" of stream 0 has to be int32'),
            (
                {"tokens": [[1], [2**40]]},
                '"tokens" of stream 1 has the number 1099511627776, which int32 does not hold',
            ),
            ({"tokens": [[1], [[1], [2, 3]]]}, '"tokens" of stream 1 is no array'),
            ({"tokens": np.array([[1], [2, 3]], object)}, '"tokens" is an object array'),
            ({"tokens": [[1], [1, 2, 3, 4, 5]]}, '"tokens" of stream 1 has 5 elements, and the column takes at most 4'),
            ({"tokens": [[1]]}, '"tokens" has to have 2 rows, got 1'),
            ({"tokens": 3}, '"tokens" has to be a Ragged or a list with an array for each row, got a int'),
            ({"tokens": innet.Ragged([1], [0, 1])}, '"tokens" has to have 2 rows'),
            ({"tokens": np.zeros((3, 2), np.int32)}, r'"tokens" has to have 2 rows, got int32\[3, 2\]'),
            (
                {"points": [np.zeros((1, 2), np.float32), []]},
                r'"points" of stream 0 .* of the shape \(None, 3\), got float32\[1, 2\]',
            ),
            (
                {"points": innet.Ragged(np.zeros((2, 2), np.float32), [0, 1, 2])},
                r'"points" has to be float32 of the shape \(None, 3\)',
            ),
            ({"fixed": innet.Ragged([1, 2], [0, 1, 2])}, '"fixed" has to be int32'),
        ]
        for change, message in bad:
            with pytest.raises(errors.SchemaError, match=message):
                writer.append(**{"tokens": tokens, "points": points, **row, **change})
        writer.append(tokens=tokens, points=points, **row)
        block: dict[str, Any] = {"fixed": np.zeros((2, 2, 2), np.int32), "terminated": np.zeros((2, 2), bool)}
        block |= {"truncated": np.zeros((2, 2), bool), "points": [points, points]}
        with pytest.raises(errors.SchemaError, match='"tokens" of stream 1 at step 1 has 5 elements'):
            writer.extend(tokens=[tokens, [[1], [1, 2, 3, 4, 5]]], **block)
        with pytest.raises(errors.SchemaError, match='"tokens" has to have 2 steps of 2 rows, got 1 at step 1'):
            writer.extend(tokens=[tokens, [[1]]], **block)
        writer.extend(tokens=[tokens, tokens], **block)
    found = replay.sample("t", 60).tokens.values
    assert {tuple(part) for part in found} == {(1,), (2, 3)}


def test_a_stack_of_ragged_observations_is_refused() -> None:
    view = innet.NStep(stack={"camera": 4})
    table(view=view)
    with pytest.raises(errors.ReplayError, match=r'"observation/tokens".*give it the stack 1'):
        table(view=innet.NStep(stack=2))


def test_definitions_come_back(replay: innet.Replay) -> None:
    definition = table(view=innet.NStep())
    replay.create_table(definition)
    assert replay.table("t") == definition == pickle.loads(pickle.dumps(definition))
    assert replay.table("t").columns["observation/points"].shape == (None, 3)
    column = definition.columns["action"]
    assert eval(repr(column), vars(innet)) == column
    assert column.is_ragged
    with pytest.raises(errors.TableDiffersError, match=r"action: uint8 \(None,\) zstd max_length=40"):
        replay.create_table(innet.Table("t", {**COLUMNS, "action": ("uint8", (None,))}, 5000, sampler="uniform"))
    for shape in ((0,), (3, None), (None, None), (None, 0)):
        with pytest.raises(errors.ReplayError, match="shape"):
            innet.Table("t", {"a": ("uint8", shape)}, 10)
    with pytest.raises(errors.TableError, match="max_length and no free dimension"):
        innet.Table("t", {"a": innet.Column("uint8", (3,), max_length=4)}, 10)
