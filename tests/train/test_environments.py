"""Environments: flags at the ends of games and lives, scores, seeds, and exact restoring."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from innet_drl.train import environments
from innet_drl.train.environments import Environments, EnvironmentSpec
from innet_drl.train.errors import ConfigurationError, UnavailableEnvironmentError
from innet_drl.train.networks import make_network
from innet_drl.train.play import video
from innet_drl.train.settings.config import PRESETS, Config

BREAKOUT = PRESETS["breakout"]
CARTPOLE = PRESETS["cartpole"]


def test_rewards_are_not_clipped() -> None:
    """Seaquest's smallest reward is 20."""
    arena = environments.make(dataclasses.replace(BREAKOUT, environment="atari/seaquest"), 4)
    arena.reset(0)
    random = np.random.default_rng(0)
    rewards = [arena.step(random.integers(0, arena.spec.actions, 4)).reward for _ in range(150)]
    assert np.max(rewards) >= 20


def test_a_game_of_breakout_loses_four_lives_and_ends_with_the_fifth() -> None:
    arena = environments.make(BREAKOUT, 1)
    arena.reset(0)
    random = np.random.default_rng(0)
    lost = 0
    while True:
        step = arena.step(random.integers(0, 4, 1))
        lost += int(step.life_lost[0])
        if step.terminated[0]:
            break
    assert lost == 4
    assert not step.life_lost[0]
    after = arena.step(np.zeros(1, np.int64))
    assert not after.life_lost[0]
    assert not after.terminated[0]
    assert after.reward[0] == 0
    # The first observation of a game has one frame, under three empty ones.
    assert (after.observation[0, :3] == 0).all()
    assert after.observation[0, 3].any()


def test_fire_follows_a_lost_life_and_is_the_action_that_was_taken() -> None:
    """Breakout waits for it with an empty screen."""
    arena = environments.make(BREAKOUT, 2)
    arena.reset(0)
    random = np.random.default_rng(0)
    lost = np.zeros(2, bool)
    fired = 0
    for _ in range(400):
        actions = random.choice([0, 2, 3], 2)
        step = arena.step(actions)
        np.testing.assert_array_equal(step.taken, np.where(lost, 1, actions))
        fired += int(lost.sum())
        lost = step.life_lost
    assert fired > 4


def test_a_game_without_fire_takes_the_given_actions() -> None:
    arena = environments.make(dataclasses.replace(BREAKOUT, environment="atari/freeway"), 1)
    assert arena.spec.actions == 3
    arena.reset(0)
    assert arena.step(np.ones(1, np.int64)).taken == 1


@pytest.mark.parametrize("size", [48, 64, 84])
def test_frames_have_the_configured_size(size: int) -> None:
    config = dataclasses.replace(BREAKOUT, frame_size=size)
    arena = environments.make(config, 2)
    observation = arena.reset(0)
    assert observation.shape == (2, 4, size, size)
    assert make_network(config, arena.spec).q(torch.from_numpy(observation)).shape == (2, 4)


def test_a_frame_size_that_the_network_cannot_take_is_named() -> None:
    config = dataclasses.replace(BREAKOUT, frame_size=32, network="nature")
    with pytest.raises(ConfigurationError, match=r"at least 36 pixels, and these are 32x32: .*frame_size"):
        make_network(config, environments.make(config, 1).spec)
    with pytest.raises(ConfigurationError, match="frame_size 1000: it must be less than or equal to 210"):
        dataclasses.replace(BREAKOUT, frame_size=1000)


def test_a_game_is_cut_off_at_the_frame_limit() -> None:
    arena = environments.make(BREAKOUT, 1, episode_frames=200)
    arena.reset(0)
    steps = [arena.step(np.zeros(1, np.int64)) for _ in range(60)]
    ends = [index for index, step in enumerate(steps) if step.truncated[0]]
    assert ends
    assert not steps[ends[0]].terminated[0]


def test_an_observation_stays_as_it_was() -> None:
    """The actor holds an observation over the next step."""
    arena = environments.make(BREAKOUT, 2)
    held = arena.reset(0)
    copy = held.copy()
    for _ in range(3):
        arena.step(np.ones(2, np.int64))
    np.testing.assert_array_equal(held, copy)


def test_the_colour_environment_stays_in_step() -> None:
    grey, colour = environments.make(BREAKOUT, 1), environments.make_colour(BREAKOUT, episode_frames=108_000)
    grey.reset(7)
    colour.reset(seed=7)
    random = np.random.default_rng(0)
    for _ in range(300):
        action = random.integers(0, 4, 1)
        step = grey.step(action)
        picture, reward, terminated, _, _ = colour.step(step.taken)
        assert reward[0] == step.reward[0]
        assert terminated[0] == step.terminated[0]
    assert picture.shape == (1, 1, 210, 160, 3)


def test_cartpole_is_truncated_at_500_and_scores_by_the_step() -> None:
    arena = environments.make(CARTPOLE, 1)
    observation = arena.reset(0)
    score = 0.0
    for _ in range(500):
        # Pushing towards the side the pole falls to holds it up.
        step = arena.step((observation[:, 2] + 0.5 * observation[:, 3] > 0).astype(np.int64))
        observation = step.observation
        score += float(step.reward[0])
    assert score == 500
    assert step.truncated.all()
    assert not step.terminated.any()
    assert arena.step(np.zeros(1, np.int64)).reward[0] == 0


def test_another_autoreset_mode_is_refused() -> None:
    vector = gymnasium.make_vec(
        "CartPole-v1",
        2,
        vectorization_mode="sync",
        vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.DISABLED},
    )
    with pytest.raises(UnavailableEnvironmentError, match="NEXT_STEP"):
        Environments(vector, EnvironmentSpec(2, 1, (4,), "float32", 1))


def test_an_environment_that_does_not_tell_its_mode_is_refused() -> None:
    vector = gymnasium.make_vec("CartPole-v1", 2)
    vector.metadata = {}
    with pytest.raises(UnavailableEnvironmentError, match="declare it"):
        Environments(vector, EnvironmentSpec(2, 1, (4,), "float32", 1))


@pytest.mark.parametrize(
    ("name", "reason"),
    [("Pendulum-v1", "continuous-actions"), ("CartPole-v99", "CartPole")],
)
def test_an_environment_that_does_not_fit_is_refused(name: str, reason: str) -> None:
    with pytest.raises(UnavailableEnvironmentError, match=reason):
        environments.make(Config(environment=name), 1)


class Corridor(gymnasium.Env[Any, Any]):
    """Walks along five cells; actions begin at -1, observations are of any dtype."""

    def __init__(self, dtype: str, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 4, (1,), np.dtype(dtype).type)
        self.action_space = gymnasium.spaces.Discrete(3, start=-1)
        self.cell = 2

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = 2
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert action in (-1, 0, 1)
        self.cell += int(action)
        return self._observe(), float(action), self.cell in (0, 4), False, {}

    def _observe(self) -> Any:
        return np.array([self.cell], self.observation_space.dtype)


@pytest.fixture
def corridor(request: pytest.FixtureRequest) -> Iterator[Config]:
    gymnasium.register("Corridor-v0", lambda **kwargs: Corridor(request.param, **kwargs), disable_env_checker=True)
    yield dataclasses.replace(CARTPOLE, environment="Corridor-v0")
    del gymnasium.registry["Corridor-v0"]


@pytest.mark.parametrize("corridor", ["float64", "uint8", "int64"], indirect=True)
def test_vectors_of_any_dtype_and_actions_from_any_start(corridor: Config) -> None:
    arena = environments.make(corridor, 2)
    assert arena.spec.actions == 3
    observation = arena.reset(0)
    assert observation.dtype == np.float32
    assert observation.tolist() == [[2.0], [2.0]]
    step = arena.step(np.array([0, 2]))
    assert step.observation.dtype == np.float32
    assert step.observation.tolist() == [[1.0], [3.0]]
    assert step.reward.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("corridor", ["float64"], indirect=True)
def test_an_environment_without_render_is_no_video_and_no_traceback(corridor: Config, tmp_path: Path) -> None:
    network = make_network(corridor, environments.make(corridor, 1).spec)
    with pytest.raises(UnavailableEnvironmentError, match="Corridor-v0 cannot be drawn"):
        video.record(corridor, network, tmp_path / "game.mp4")
    with pytest.raises(ConfigurationError, match=r"name it game\.mp4"):
        video.record(corridor, network, tmp_path / "game.gif")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ALE/Breakout-v99", "did you mean atari/breakout?"),
        ("breakout", "did you mean atari/breakout?"),
        ("SpaceInvaders", "did you mean atari/space_invaders?"),
        ("atari/Breakout", "did you mean breakout?"),
        ("NoSuchGame-v1", "Atari games are named atari/<game>"),
    ],
)
def test_other_names_of_a_game_get_the_right_hint(name: str, hint: str) -> None:
    with pytest.raises(UnavailableEnvironmentError, match=re.escape(hint)):
        environments.make(dataclasses.replace(BREAKOUT, environment=name), 1)


def test_an_environment_that_raises_is_named() -> None:
    def broken(**kwargs: Any) -> Corridor:
        raise RuntimeError("no licence")

    gymnasium.register("Broken-v0", broken)
    with pytest.raises(UnavailableEnvironmentError, match=r"'Broken-v0' cannot be made: .*RuntimeError: no licence"):
        environments.make(dataclasses.replace(CARTPOLE, environment="Broken-v0"), 1)
    del gymnasium.registry["Broken-v0"]
