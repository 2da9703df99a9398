"""Observations and actions of several parts, against tables that have one of the parts alone."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from serving import served_memories

import innet_drl as innet
from innet_drl import errors

SPACE = spaces.Dict(
    camera=spaces.Box(0, 255, (8, 8), np.uint8),
    arm=spaces.Dict(joints=spaces.Box(-1, 1, (3,), np.float32), mode=spaces.Discrete(5)),
    pair=spaces.Tuple((spaces.Box(-1, 1, (2,), np.float64), spaces.MultiBinary(4))),
)
ACTIONS = spaces.Dict(move=spaces.Discrete(4), force=spaces.Box(0, 1, (), np.float32))
LEAVES = ["camera", "arm/joints", "arm/mode", "pair/0", "pair/1"]


def leaf(structure: Any, path: str) -> Any:
    for part in path.split("/"):
        structure = structure[int(part) if part.isdigit() else part]
    return structure


class Robot(gymnasium.Env[Any, Any]):
    """Random observations, the same for every seed; ends at random, in either way."""

    observation_space = SPACE
    action_space = ACTIONS

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.frame = np.zeros((8, 8), np.uint8)
        return self._see(), {}

    def _see(self) -> Any:
        # Most of a camera's frame stays, as a real one's does.
        self.frame[self.np_random.integers(8)] = self.np_random.integers(256)
        return {**self.observation_space.sample(), "camera": self.frame}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        end = self.np_random.random()
        reward = float(self.np_random.random()) + float(action["force"])
        return self._see(), reward, bool(end < 0.1), bool(end > 0.9), {}


class One(gymnasium.ObservationWrapper[Any, Any, Any]):
    """One part of the observation."""

    def __init__(self, path: str) -> None:
        super().__init__(Robot())
        self.path = path
        self.observation_space = leaf(SPACE, path)

    def observation(self, observation: Any) -> Any:
        return leaf(observation, self.path)


def environments(make: Callable[[], gymnasium.Env[Any, Any]], mode: str) -> Any:
    if mode == "single":
        return make()
    return SyncVectorEnv([make] * 3, autoreset_mode=AutoresetMode[mode])


def record(replay: innet.Replay, name: str, make: Callable[[], gymnasium.Env[Any, Any]], mode: str, view: Any) -> None:
    """Records 200 steps of each environment in a new table, whose items are sampled in their order."""
    env = environments(make, mode)
    single = make()
    table = innet.Table.from_spaces(
        name,
        single.observation_space,
        single.action_space,
        5000,
        columns={"speed": "float32"},
        sampler="uniform",
        max_times_sampled=1,
        view=view,
    )
    replay.create_table(table)
    number = 1 if mode == "single" else 3
    # A window has no observation, which the recorder needs for the ends of episodes.
    written = innet.NStep(stack=4, n=3) if isinstance(view, innet.Window) else view
    with innet.Recorder(env, replay.writer(name, number, written, chunk_steps=7)) as recorder:
        recorder.reset(seed=5)
        actions = np.random.default_rng(0)
        over = True
        for _ in range(200):
            over = mode == "single" and over
            shape = () if mode == "single" else (3,)
            action = {"move": actions.integers(4, size=shape), "force": actions.random(shape, np.float32)}
            _, _, terminated, truncated, _ = recorder.step(action, speed=actions.random(number, np.float32))
            if mode == "single" and (terminated or truncated):
                recorder.reset()


@pytest.fixture(params=["in process", "one server", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory() as memory:
            yield memory
        return
    with served_memories(tmp_path, 1 + (request.param == "two servers")) as address, innet.connect(address) as client:
        yield client


STACKS = {"camera": 4, "arm/joints": 2}
VIEWS: dict[str, Callable[[Any], Any]] = {
    "n_step": lambda stack: innet.NStep(stack=stack, n=3, gamma=0.9),
    "one step": lambda stack: innet.NStep(stack=stack, gamma=0.9, padding="repeat"),
    "sequences": lambda stack: innet.Sequences(4, burn_in=2, period=2, stack=stack),
    "window": lambda stack: innet.Window(3, 2),
}


@pytest.mark.parametrize("mode", ["single", "NEXT_STEP", "SAME_STEP"])
@pytest.mark.parametrize("view", VIEWS)
def test_parts_are_as_each_of_them_alone(replay: innet.Replay, mode: str, view: str) -> None:
    record(replay, "whole", Robot, mode, VIEWS[view](STACKS))
    count = replay.stats()["tables"]["whole"]["items"]
    assert count > 50
    whole = replay.sample("whole", count)
    order = np.lexsort(whole.speed.reshape(count, -1).T)
    assert set(whole.observation) == {"camera", "arm", "pair"}
    assert isinstance(whole.observation["pair"], tuple)
    for path in LEAVES:
        stack = 1 if view == "window" else STACKS.get(path, 1)
        record(replay, path.replace("/", "_"), functools.partial(One, path), mode, VIEWS[view](stack))
        alone = replay.sample(path.replace("/", "_"), count)
        same = np.lexsort(alone.speed.reshape(count, -1).T)
        for name in set(whole) - {"ids", "ages", "observation", "next_observation", "action"}:
            np.testing.assert_array_equal(whole[name][order], alone[name][same], name)
        for name in {"observation", "next_observation"} & set(whole):
            found, expected = leaf(whole[name], path), alone[name]
            assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found[order], expected[same], f"{name} {path}")
        np.testing.assert_array_equal(whole.action["force"][order], alone.action["force"][same])
        replay.drop_table(path.replace("/", "_"))


def filled(view: Any = None, **settings: Any) -> innet.Memory:
    memory = innet.Memory(seed=1, **settings)
    record(memory, "robot", Robot, "NEXT_STEP", view or innet.NStep(stack=STACKS, n=2))
    return memory


def test_a_part_is_stored_once() -> None:
    """A transition of two stacks of four frames takes as many bytes as a frame."""
    with filled() as memory:
        table = memory.stats()["tables"]["robot"]
        frame = sum(np.prod(leaf(SPACE, path).shape) * leaf(SPACE, path).dtype.itemsize for path in LEAVES)
        assert table["bytes"] / table["steps"] < frame + 512 / 7 + 64


def test_a_batch_is_a_mapping_that_can_be_sliced_and_pickled() -> None:
    with filled() as memory:
        batch = memory.sample("robot", 64)
        assert set(batch.keys()) == set(batch) == set(batch.as_dict())
        assert "reward" in batch
        assert "joints" not in batch
        assert [name for name, _ in batch.items()] == list(batch)
        assert batch.values()[0] is batch["observation"]
        assert batch.get("reward") is batch.reward
        assert (batch.get("joints"), batch.get("joints", 7)) == (None, 7)
        assert (lambda observation, reward, **others: reward)(**batch) is batch["reward"]
        with pytest.raises(KeyError, match='no array "joints"; it has observation/camera, '):
            batch["joints"]
        with pytest.raises(TypeError, match=r"a slice of its items, as batch\[:32\], got int"):
            batch[3]  # type: ignore[call-overload]
        with pytest.raises(TypeError, match="the step of a slice of a batch is 1 or more"):
            batch[::-1]
        for key in (slice(8, 24), slice(1, None, 7), slice(-5, None), slice(60, 3), slice(None)):
            part = batch[key]
            for made in (part, pickle.loads(pickle.dumps(part)), copy.deepcopy(part)):
                assert len(made) == len(made.reward) == len(range(64)[key])
                assert repr(made) == repr(part)
                for path in LEAVES:
                    for name in ("observation", "next_observation"):
                        found = leaf(made[name], path)
                        expected = leaf(batch[name], path)[key]
                        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
                        np.testing.assert_array_equal(found, expected)
                np.testing.assert_array_equal(made.ids, batch.ids[key])
        # A slice shares memory, and a pickled batch has no more than its items.
        assert np.shares_memory(batch[8:24].reward, batch.reward)
        assert len(pickle.dumps(batch[:8])) < len(pickle.dumps(batch)) / 4
        memory.update_priorities("robot", batch[:8].ids, np.ones(8))


def test_only_shared_memory_is_read_only() -> None:
    with filled() as memory:
        batch = memory.sample("robot", 64)
        assert not batch.observation["camera"].flags.writeable
        # Without a stack, an observation and its next one have their own bytes.
        for array in (batch.observation["arm"]["mode"], batch.next_observation["pair"][0], batch.reward, batch.ids):
            assert array.flags.writeable
        before = batch.next_observation["arm"]["mode"].copy()
        batch.observation["arm"]["mode"][:] = 7
        np.testing.assert_array_equal(batch.next_observation["arm"]["mode"], before)


@pytest.mark.filterwarnings("error")
def test_tensors_have_the_same_structure() -> None:
    with filled() as memory:
        batches = [memory.sample("robot", 16, device="cpu")]
        with memory.batches("robot", 16, device="cpu") as ahead:
            batches.append(next(ahead))
        for batch in batches:
            assert batch.observation["camera"].shape == (16, 4, 8, 8)
            assert batch.next_observation["pair"][0].dtype == torch.float64
            for part in (batch[4:8], pickle.loads(pickle.dumps(batch[4:8])), batch[slice(4, 8)]):
                assert len(part) == 4
                assert torch.equal(part.observation["arm"]["joints"], batch.observation["arm"]["joints"][4:8])
                assert torch.equal(part["action"]["move"], batch.action["move"][4:8])
            assert set({**batch}) == set(batch) == set(batch.as_dict()) == set(dict(batch.items()))
            assert (batch.get("reward") is batch.reward, batch.get("joints", 7)) == (True, 7)
            assert len(batch.values()) == len(batch.keys())
            with pytest.raises(KeyError, match="no array 'joints'"):
                batch["joints"]
            with pytest.raises(TypeError, match="the step of a slice"):
                batch[::-1]
            memory.update_priorities("robot", batch[4:8].ids, torch.ones(4))


def rows(**changes: Any) -> dict[str, Any]:
    observation = {
        "camera": np.zeros((1, 8, 8), np.uint8),
        "arm": {"joints": np.zeros((1, 3), np.float32), "mode": [0]},
        "pair": (np.zeros((1, 2)), np.zeros((1, 4), np.int8)),
    }
    row = {"observation": observation, "action": {"move": [1], "force": 0.5}, "reward": 1.0, "speed": 0.0}
    return {**row, "terminated": False, "truncated": False, **changes}


def test_bad_structures_are_refused() -> None:
    with filled() as memory, memory.writer("robot", 1) as writer:
        good = rows()["observation"]
        for bad, message in [
            ({**good, "camera": np.zeros((1, 8, 8))}, r'"observation/camera" has to be uint8\[1, 8, 8\]'),
            ({"camera": good["camera"]}, '"observation" has the parts camera, arm, pair, and "arm" is missing'),
            ({**good, "more": 1}, r'"observation" has the parts camera, arm, pair, got .*more'),
            ({**good, "arm": np.zeros(1)}, '"observation/arm" is a dictionary with the parts joints, mode, got one nd'),
            ({**good, "pair": good["pair"][:1]}, '"observation/pair" has the parts 0, 1, and "1" is missing'),
            ({**good, "pair": (*good["pair"], 1)}, '"observation/pair" has the parts 0, 1, got 3'),
            ({**good, "pair": {"0": 1, "1": 2}}, '"observation/pair" is a tuple with the parts 0, 1, got one dict'),
            (np.zeros(3), '"observation" is a dictionary with the parts camera, arm, pair, got one ndarray'),
            (
                {**good, "arm": {"joints": np.full((1, 3), np.nan, np.float32), "mode": [0]}},
                r'"observation/arm/joints" of stream 0 is NaN at \[0\]',
            ),
        ]:
            with pytest.raises(errors.SchemaError, match=message):
                writer.append(**rows(observation=bad))
            with pytest.raises(errors.SchemaError, match=message.replace('"observation', '"final_observation')):
                writer.append(**rows(final_observation=bad, terminated=True))
        writer.append(**rows())
        # A part by its own name.
        separate = {f"observation/{path}": leaf(good, path) for path in LEAVES}
        whole = rows()
        del whole["observation"]
        writer.append(**whole, **separate, first=[True])
        with pytest.raises(errors.SchemaError, match='column "observation/camera" is given twice'):
            writer.append(**rows(), **{"observation/camera": good["camera"]})
        with pytest.raises(errors.SchemaError, match='the table has no column "more"; it has observation/camera'):
            writer.append(**rows(more={"a": 1}))
        with pytest.raises(errors.SchemaError, match='column "observation/pair/1" is missing'):
            writer.append(**whole, **{name: separate[name] for name in list(separate)[:-1]})


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.OneOf([spaces.Discrete(2)]), "the space of 'observation' is of type OneOf.* arrays of one shape"),
        (spaces.Dict(a=spaces.OneOf([spaces.Discrete(2), spaces.Discrete(3)])), "'observation/a' is of type OneOf"),
        (spaces.Dict({"0": spaces.Discrete(2)}), "has a part '0': a part's name is a text without slashes, and no num"),
        (spaces.Dict(a=spaces.Dict({})), "the space of 'observation/a' has no parts"),
        (spaces.Dict({"a/b": spaces.Discrete(2)}), "has a part 'a/b'"),
        (spaces.Dict({3: spaces.Discrete(2)}), "has a part 3"),  # type: ignore[dict-item]
    ],
)
def test_spaces_without_a_fixed_size_are_refused(space: spaces.Space[Any], message: str) -> None:
    with pytest.raises(
        errors.ConfigError,
        match=message.replace("'observation/a'", '"observation/a"').replace("'observation'", '"observation"'),
    ):
        innet.Table.from_spaces("t", space, spaces.Discrete(2), 10)


def test_views_and_columns_that_do_not_fit_are_refused() -> None:
    columns: dict[str, Any] = {"observation/a": "float32", "observation/b": "float32", "reward": "float32"}
    stacks: list[tuple[Any, str]] = [
        ({"c": 4}, 'stack names the part "c", and the observation "observation" of table "t" has the parts a, b'),
        ({"a": 0}, "stack is 1 to 1024, got 0"),
        ({"a": 2**40}, "stack is an integer from 1 to 1024"),
        ({0: 4}, 'stack names the part "0"'),
    ]
    for stack, message in stacks:
        with pytest.raises(errors.ReplayError, match=message):
            innet.Table("t", columns, 10, view=innet.NStep(stack=stack))
    with pytest.raises(TypeError, match="stack is an integer, got a str"):
        innet.NStep(stack="4")  # type: ignore[arg-type]
    with pytest.raises(errors.ReplayError, match="is one column: give a number"):
        innet.Table("t", {"observation": "float32", "reward": "float32"}, 10, view=innet.NStep(stack={"a": 4}))
    for bad, message in [
        ({"a": "float32", "a/b": "float32"}, 'column "a" has the part "a/b"'),
        ({"a//b": "float32"}, 'column "a//b" is a part of a structure'),
        ({"first/a": "float32"}, 'column "first/a" has the name of an argument'),
        ({**columns, "next_observation/a": "float32"}, 'column "next_observation/a" has the name of an array that'),
    ]:
        with pytest.raises(errors.ReplayError, match=message):
            innet.Table("t", bad, 10, view=innet.NStep() if "reward" in bad else None)
    with pytest.raises(
        errors.ConfigError, match='a view\'s observation is a column, or all parts of one: "observation", not'
    ):
        innet.NStep(observation="observation/a")
    view = innet.NStep(stack={"b": 2, "a": 3})
    assert view.stack == {"a": 3, "b": 2}
    assert pickle.loads(pickle.dumps(view)) == view == eval(repr(view), vars(innet))
    assert "stack={'a': 3, 'b': 2}" in repr(innet.Table("t", columns, 10, view=view))


class Mission(gymnasium.Env[Any, Any]):
    """A mission in words, as MiniGrid has."""

    observation_space = spaces.Dict(
        mission=spaces.Text(8, charset="abcdeü "), note=spaces.Space(dtype=str), place=spaces.Discrete(9)
    )
    action_space = spaces.Discrete(2)
    words = ("", "abc", "ü a", "ddddeeee")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self._see(), {}

    def _see(self) -> Any:
        return {"mission": self.words[self.t % 4], "note": "note" * self.t, "place": self.t}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self._see(), 0.0, self.t == 7, False, {}


@pytest.mark.parametrize("mode", ["single", "NEXT_STEP", "SAME_STEP"])
def test_texts_are_bytes(mode: str) -> None:
    table = innet.Table.from_spaces("t", Mission.observation_space, Mission.action_space, 500, view=innet.NStep())
    columns = [table.columns[f"observation/{name}"] for name in ("mission", "note")]
    assert [(column.shape, column.max_length) for column in columns] == [((None,), 32), ((None,), 0)]
    env = environments(Mission, mode)
    number = 1 if mode == "single" else 3
    with innet.Memory(table) as memory:
        with innet.Recorder(env, memory.writer("t", number)) as recorder:
            recorder.reset()
            for _ in range(20):
                _, _, terminated, *_ = recorder.step(0 if mode == "single" else np.zeros(3, np.int64))
                if mode == "single" and terminated:
                    recorder.reset()
        batch = memory.sample("t", 100)
        for observation, rows in (
            (batch.observation, batch.discount >= 0),
            (batch.next_observation, batch.discount > 0),
        ):
            texts = [bytes(text).decode() for text in observation["mission"][rows]]
            assert texts == np.array(Mission.words)[observation["place"] % 4][rows].tolist()
            notes = [bytes(note) for note in observation["note"][rows]]
            assert notes == [b"note" * int(place) for place in observation["place"][rows]]
        with memory.writer("t", 1) as writer:
            row: dict[str, Any] = {"action": [0], "reward": 0.0, "terminated": False, "truncated": False}
            long = {"mission": "a" * 33, "note": "", "place": [0]}
            with pytest.raises(
                errors.SchemaError, match='"observation/mission" of stream 0 has 33 elements, and the column takes'
            ):
                writer.append(observation=long, **row)


def test_texts_are_in_blocks() -> None:
    columns: dict[str, Any] = {"observation": ("uint8", 8), "reward": "float32"}
    texts = [["a", "ü"], ["", "longer"], ["abc", "d"]]
    with innet.Memory(innet.Table("t", columns, 1000, view=innet.Window(0, 0))) as memory:
        flags = np.zeros((3, 2), bool)
        with memory.writer("t", 2) as writer:
            for value in (texts, np.array(texts), np.array(texts, object)):
                writer.extend(observation=value, reward=np.zeros((3, 2), np.float32), terminated=flags, truncated=flags)
        found = memory.sample("t", 500).observation[:, 0].view("S8")[:, 0]
        assert {text.decode() for text in found} == {text for row in texts for text in row}


def test_a_state_may_have_parts() -> None:
    columns: dict[str, Any] = {
        "observation": "float32",
        "reward": "float32",
        "memory/h": ("float32", 3),
        "memory/c": "float32",
    }
    view = innet.Sequences(4, state=["memory"])
    with innet.Memory(innet.Table("t", columns, 100, view=view)) as memory:
        with memory.writer("t", 1) as writer:
            for t in range(20):
                state = {"h": np.full((1, 3), t, np.float32), "c": float(t)}
                writer.append(observation=float(t), reward=0.0, memory=state, terminated=False, truncated=False)
        batch = memory.sample("t", 16)
        assert (batch.memory["h"].shape, batch.memory["c"].shape) == ((16, 3), (16,))
        np.testing.assert_array_equal(batch.memory["c"], batch.observation[:, 0])


class Batched(gymnasium.vector.VectorEnv[Any, Any, Any]):
    """Two environments in SAME_STEP mode, whose last observations are a dictionary of arrays."""

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012 - as Gymnasium declares it
    num_envs = 2
    single_observation_space = spaces.Dict(
        a=spaces.Box(0, 100, (2,), np.float32), b=spaces.Tuple((spaces.Discrete(9),))
    )
    single_action_space = spaces.Discrete(2)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return self._see(0), {}

    def _see(self, t: int) -> Any:
        return {"a": np.full((2, 2), t, np.float32), "b": (np.full(2, t),)}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self.t += 1
        over = self.t == 5
        info = {"final_obs": self._see(5)} if over else {}
        self.t %= 5
        return self._see(self.t), np.ones(2), np.zeros(2, bool), np.full(2, over), info


def test_last_observations_may_be_a_structure_of_arrays() -> None:
    env = Batched()
    table = innet.Table.from_spaces(
        "t", env.single_observation_space, env.single_action_space, 1000, view=innet.NStep()
    )
    with innet.Memory(table) as memory:
        with innet.Recorder(env, memory.writer("t", 2)) as recorder:
            recorder.reset()
            for _ in range(20):
                recorder.step(np.zeros(2, np.int64))
        batch = memory.sample("t", 64)
        np.testing.assert_array_equal(batch.next_observation["a"][:, 0], batch.observation["a"][:, 0] + 1)
        np.testing.assert_array_equal(batch.next_observation["b"][0], batch.observation["b"][0] + 1)
        assert 5 in batch.next_observation["b"][0]
