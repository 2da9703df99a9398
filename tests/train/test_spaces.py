"""The table of spaces in docs/how-to/environments.md: each row makes frames, is read by its network, and trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import brought
import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from places import ROOT
from training import small

from innet_drl.launch import start
from innet_drl.structures import map_leaves
from innet_drl.train import environments
from innet_drl.train.errors import UnavailableEnvironmentError
from innet_drl.train.networks import make_network, q_values
from innet_drl.train.play.agent import Agent

PAGE = ROOT / "docs" / "how-to" / "environments.md"

SEEN: dict[str, tuple[str, Any]] = {
    "vector of float64": ("mlp", (5,)),
    "vector of integers": ("mlp", (4,)),
    "vector of uint8": ("mlp", (128,)),
    "matrix of floats": ("mlp", (24,)),
    "number": ("mlp", (1,)),
    "image without channels": ("nature", (1, 40, 44)),
    "image, channels last": ("impala", (3, 12, 10)),
    "image, channels first": ("impala", (3, 20, 24)),
    "image of booleans": ("impala", (4, 10, 10)),
    "image of floats": ("impala", (2, 9, 9)),
    "stack of images": ("impala", (12, 16, 16)),
    "discrete": ("mlp", (6,)),
    "several discrete": ("mlp", (7,)),
    "bits": ("mlp", (6,)),
    "dictionary": ("dict", {"arm.mode": (3,), "arm.position": (2,), "camera": (3, 12, 10)}),
    "tuple": ("dict", {"0": (3,), "1": (3,)}),
}
"""Network and shapes that a network gets, of each row."""
TORSOS = {"mlp": "VectorTorso", "nature": "ConvolutionTorso", "impala": "ImpalaTorso", "dict": "DictTorso"}


def of(environment: Any, **changes: Any) -> Any:
    return small(environment=environment, environments=2, **changes)


def test_the_page_has_a_row_for_each_space() -> None:
    rows = re.findall(r"^\| ([^|]+?) \| `[^|]*` \|", PAGE.read_text(), re.M)
    assert rows == [*brought.OBSERVATIONS, *brought.ACTIONS]
    assert SEEN.keys() == brought.OBSERVATIONS.keys()


@pytest.mark.parametrize("stack", [1, 3])
@pytest.mark.parametrize("row", brought.OBSERVATIONS)
def test_a_network_gets_observations_of_the_documented_shape(row: str, stack: int) -> None:
    config = of(brought.Sampler, environment_args={"observation": row}, stack=stack)
    envs = environments.make(config, 2)
    network = make_network(config, envs.spec)
    name, shapes = SEEN[row]
    assert type(network.get_submodule("torso")).__name__ == TORSOS[name]
    given: list[Any] = []
    network.get_submodule("torso").register_forward_pre_hook(lambda _, inputs: given.append(inputs[0]))
    observation = envs.reset(5)
    envs.step(np.zeros(2, np.int64))
    assert network(map_leaves(torch.from_numpy, observation)).shape == (2, 3)
    arrays = given[0] if isinstance(given[0], dict) else {"": given[0]}
    expected = shapes if isinstance(shapes, dict) else {"": shapes}
    space = envs.spec.observation_space
    declared = space.spaces if isinstance(space, spaces.Dict) else {"": space}
    assert arrays.keys() == expected.keys() == declared.keys()
    for key, shape in expected.items():
        assert arrays[key].shape == (2, stack * shape[0], *shape[1:])
        assert declared[key].shape == arrays[key].shape[1:]


@pytest.mark.parametrize("row", brought.OBSERVATIONS)
def test_an_environment_of_this_observation_trains(row: str, tmp_path: Path) -> None:
    arguments = {"observation": row}
    config = of("brought:Sampler", environment_args=arguments, serial=True, steps=200, batch_size=8, stack=2)
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None


def newest(envs: environments.Environments, observation: Any) -> dict[str, Any]:
    """The arrays of a dictionary's observation, by name."""
    return {part.name: array for part, array in zip(envs.spec.parts, observation, strict=True)}


def test_values_are_those_of_the_environment() -> None:
    rows = {row: environments.make(of(brought.Sampler, environment_args={"observation": row}), 1) for row in SEEN}
    got = {row: envs.reset(3) for row, envs in rows.items()}
    raw = {row: brought.Sampler(row).reset(seed=3)[0] for row in SEEN}
    np.testing.assert_array_equal(got["vector of integers"][0], raw["vector of integers"])
    np.testing.assert_array_equal(got["vector of float64"][0], raw["vector of float64"].astype(np.float32))
    np.testing.assert_array_equal(got["image, channels last"][0], raw["image, channels last"].transpose(2, 0, 1))
    np.testing.assert_array_equal(got["image, channels first"][0], raw["image, channels first"])
    np.testing.assert_array_equal(
        got["stack of images"][0].reshape(4, 3, 16, 16), raw["stack of images"].transpose(0, 3, 1, 2)
    )
    assert got["discrete"][0].argmax() + 2 == raw["discrete"]
    assert got["discrete"].sum() == 1
    assert got["several discrete"][0].tolist() == [
        *(np.arange(1, 4) == raw["several discrete"][0]),
        *(np.arange(4) == raw["several discrete"][1]),
    ]
    parts = newest(rows["dictionary"], got["dictionary"])
    np.testing.assert_array_equal(parts["camera"][0], raw["dictionary"]["camera"].transpose(2, 0, 1))
    np.testing.assert_array_equal(parts["arm.position"][0], raw["dictionary"]["arm"]["position"].astype(np.float32))
    assert parts["arm.mode"][0].argmax() + 1 == raw["dictionary"]["arm"]["mode"]


def test_a_dictionary_is_read_as_it_was_written() -> None:
    config = of(brought.Sampler, environment_args={"observation": "dictionary"})
    envs = environments.make(config, 2)
    observation = envs.reset(1)
    read = make_network(config, envs.spec).read
    assert read is not None
    for name, part in newest(envs, observation).items():
        np.testing.assert_array_equal(read(map_leaves(torch.from_numpy, observation))[name].numpy(), part)


@pytest.mark.parametrize("row", brought.ACTIONS)
def test_numbers_of_actions_are_all_actions(row: str, tmp_path: Path) -> None:
    """The environment asserts that its space contains each action."""
    config = of("brought:Sampler", environment_args={"action": row}, serial=True, steps=150, batch_size=8)
    space: Any = brought.ACTIONS[row]
    envs = environments.make(config, 2)
    taken = [np.asarray(action) for action in envs.numbered(np.arange(envs.spec.actions))]
    assert len({str(action) for action in taken}) == envs.spec.actions
    assert all(space.contains(action if action.ndim else action[()]) for action in taken)
    assert envs.spec.actions == {"discrete": 3, "discrete with a start": 3, "several discrete": 6, "bits": 8}[row]
    assert start.train(config, tmp_path / "run").learner_updates > 0


@pytest.mark.parametrize(
    ("name", "shape"), [("FrozenLake-v1", (16,)), ("Blackjack-v1", None), ("Acrobot-v1", (6,)), ("Taxi-v4", (500,))]
)
def test_environments_of_gymnasium(name: str, shape: tuple[int, ...] | None) -> None:
    config = of(name)
    envs = environments.make(config, 2)
    assert envs.spec.observation_space.shape == shape
    assert [part.name for part in envs.spec.parts] == ([] if shape else ["0", "1", "2"])
    network = make_network(config, envs.spec)
    observation = envs.reset(0)
    for _ in range(30):
        q = q_values(network, observation)
        observation = envs.step(q.argmax(1)).observation


def test_an_atari_game_of_gymnasium_keeps_its_defaults() -> None:
    """Colour frames of 210x160, four a step, sticky actions of 0.25, unlike ale-py's vector environment."""
    envs = environments.make(of("ALE/Breakout-v5"), 1)
    assert envs.spec.frame_shape == (3, 210, 160)
    assert (envs.spec.frames_per_step, envs.spec.actions) == (4, 4)
    ale: Any = envs.vector.envs[0].unwrapped
    assert ale.ale.getFloat("repeat_action_probability") == 0.25
    assert ale._frameskip == 4
    assert environments.make(of("ALE/Breakout-v5", environment_args={"full_action_space": True}), 1).spec.actions == 18
    memory = environments.make(of("ALE/Breakout-v5", environment_args={"obs_type": "ram"}), 1)
    assert memory.spec.observation_space == spaces.Box(0, 255, (128,), np.float32)


class Telling(brought.Sampler):
    """Has a text beside an image."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Dict(text=spaces.Text(5), image=brought.IMAGE)


def test_a_run_tells_once_what_it_leaves_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start.train(of(Telling, serial=True, steps=300), tmp_path / "run")
    told = [message for message in caplog.messages if "is text, and is left out" in message]
    assert len(told) == 1
    assert "the observation's part 'text'" in told[0]


def test_what_is_no_array_is_left_out_or_refused() -> None:
    class Told(brought.Sampler):
        def __init__(self, alone: bool) -> None:
            super().__init__()
            text = spaces.Text(5)
            mission: spaces.Space[str] = spaces.Space(dtype=str)
            self.observation_space = text if alone else spaces.Dict(mission=mission, text=text, image=brought.IMAGE)

    spec = environments.make(of(Told, environment_args={"alone": False}), 1).spec
    assert [part.name for part in spec.parts] == ["image"]
    assert spec.left_out == ("mission", "text")
    with pytest.raises(UnavailableEnvironmentError, match=r"observations Text.* wrap it"):
        environments.make(of(Told, environment_args={"alone": True}), 1)


@pytest.mark.parametrize("part", [spaces.Sequence(brought.BOX), spaces.OneOf((brought.BOX, spaces.Discrete(2)))])
def test_a_part_without_a_shape_is_refused(part: spaces.Space[Any]) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        made = brought.Sampler()
        made.observation_space = spaces.Dict(image=brought.IMAGE, inner=spaces.Dict(things=part))
        return made

    with pytest.raises(UnavailableEnvironmentError, match=r"observations .* in 'inner.things' are no arrays.* wrap it"):
        environments.make(of(make), 1)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Box(-1, 1, (2,)), r"docs/how-to/environments\.md#continuous-actions"),
        (spaces.MultiDiscrete([100, 100]), "10,000 combinations, more than 4,096"),
        (spaces.Tuple((spaces.Discrete(2),)), "needs discrete ones"),
    ],
)
def test_actions_that_q_learning_cannot_take_are_refused(space: Any, message: str) -> None:
    def make() -> gymnasium.Env[Any, Any]:
        made = brought.Sampler()
        made.action_space = space
        return made

    with pytest.raises(UnavailableEnvironmentError, match=message):
        environments.make(of(make), 1)


def test_a_number_too_large_for_one_hot_is_refused() -> None:
    def make() -> gymnasium.Env[Any, Any]:
        made = brought.Sampler()
        made.observation_space = spaces.Discrete(1_000_000)
        return made

    with pytest.raises(UnavailableEnvironmentError, match=r"one-hot vector .* 1,000,000 numbers"):
        environments.make(of(make), 1)


@pytest.mark.parametrize(
    ("row", "change", "message"),
    [
        (
            "dictionary",
            lambda seen: {"camera": seen["camera"]},
            r"has the keys \['camera'\]: .* keys \['camera', 'arm'\]",
        ),
        ("dictionary", lambda seen: {**seen, "sonar": 1}, r"the observation has the keys \['.*'sonar'\]: it must be"),
        ("dictionary", lambda seen: seen["camera"], "the observation is ndarray: it must be a dictionary"),
        ("dictionary", lambda seen: {**seen, "arm": {}}, r"the observation\['arm'\] has the keys \[\]: .*'mode'"),
        (
            "dictionary",
            lambda seen: {**seen, "camera": seen["camera"][1:]},
            r"the observation\['camera'\] has the shape \(11, 10, 3\): it must be \(12, 10, 3\)",
        ),
        (
            "dictionary",
            lambda seen: {**seen, "camera": seen["camera"][None]},
            r"parts with batches of several shapes: \(\), \(1,\)",
        ),
        ("tuple", lambda seen: seen[:1], "the observation has 1 parts: it must be a tuple of 2"),
        ("tuple", lambda seen: seen[1], "the observation is ndarray: it must be a tuple of 2"),
    ],
)
def test_an_agent_refuses_other_parts_than_those_of_its_space(row: str, change: Any, message: str) -> None:
    config = of(brought.Sampler, environment_args={"observation": row})
    envs = environments.make(config, 1)
    agent = Agent(config, make_network(config, envs.spec), envs, Path(), 0, 0)
    seen = envs.vector.single_observation_space.sample()
    assert isinstance(agent.act(seen), int)
    with pytest.raises(ValueError, match=message):
        agent.act(change(seen))
