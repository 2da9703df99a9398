"""Stable-Baselines3's algorithms on this memory: its own buffers are the reference."""

from __future__ import annotations

import _thread
import copy
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from order import BATCHES, check_every_place
from sb3_contrib import QRDQN, TQC
from serving import Server, served_memories, until
from stable_baselines3 import DDPG, DQN, SAC, TD3
from stable_baselines3.common.buffers import DictReplayBuffer, NStepReplayBuffer, ReplayBuffer
from stable_baselines3.common.callbacks import (
    BaseCallback,
    CheckpointCallback,
    EvalCallback,
    StopTrainingOnRewardThreshold,
)
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import innet_drl as innet
from innet_drl import errors
from innet_drl.sb3 import InnetReplayBuffer, PrioritizedDQN, PrioritizedSAC, collect, train

ENVIRONMENTS = 3
GAMMA = 0.9
ACTION = spaces.Box(-1, 1, (2,), np.float32)
VECTOR = spaces.Box(-1e6, 1e6, (3,), np.float32)
PARTS = spaces.Dict({"camera": spaces.Box(0, 255, (2, 4, 4), np.uint8), "joints": VECTOR, "level": spaces.Discrete(99)})


def small() -> dict[str, Any]:
    """Arguments of a small algorithm; SB3 writes to `policy_kwargs`."""
    return {"policy_kwargs": {"net_arch": [16]}, "learning_starts": 20, "buffer_size": 500, "seed": 3}


@pytest.fixture(params=["in process", "served"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[dict[str, Any]]:
    """Arguments that place a buffer."""
    if request.param == "in process":
        yield {}
        return
    with served_memories(tmp_path, 1) as address:
        yield {"address": address}


def observed(space: spaces.Space[Any], environment: int, number: int) -> Any:
    """An observation that tells its environment and number."""
    numbers = np.array([environment, number % 250, number // 250])
    if isinstance(space, spaces.Dict):
        camera = np.broadcast_to(numbers[:2, None, None], (2, 4, 4)).astype(np.uint8)
        return {"camera": camera, "joints": numbers.astype(np.float32), "level": np.int64(number % 99)}
    return numbers.astype(np.float32)


def told(observation: Any) -> tuple[int, int]:
    """Environment and number of an observation."""
    values = observation["joints"] if isinstance(observation, dict) else observation
    return int(values[0]), int(values[1] + 250 * values[2])


def stacked(observations: list[Any]) -> Any:
    if isinstance(observations[0], dict):
        return {key: np.stack([each[key] for each in observations]) for key in observations[0]}
    return np.stack(observations)


def played(buffers: list[tuple[Any, list[int]]], space: spaces.Space[Any], steps: int) -> None:
    """Adds the same random steps to buffers, each of some environments.

    Numbers of observations rise by 1, and by 2 with a new episode.
    """
    random = np.random.default_rng(5)
    at = [0] * ENVIRONMENTS
    for _ in range(steps):
        before = [observed(space, each, at[each]) for each in range(ENVIRONMENTS)]
        after = [observed(space, each, at[each] + 1) for each in range(ENVIRONMENTS)]
        action = random.uniform(-1, 1, (ENVIRONMENTS, 2)).astype(np.float32)
        reward = random.normal(size=ENVIRONMENTS)
        end = random.random(ENVIRONMENTS)
        done, cut = end < 0.15, end < 0.07
        for buffer, chosen in buffers:
            infos: list[dict[str, Any]] = [{"TimeLimit.truncated": bool(cut[each])} for each in chosen]
            arrays = stacked([before[each] for each in chosen]), stacked([after[each] for each in chosen])
            buffer.add(*arrays, action[chosen], reward[chosen], done[chosen], infos)
        at = [number + 1 + done for number, done in zip(at, done, strict=True)]


@pytest.mark.parametrize("timeouts", [True, False])
@pytest.mark.parametrize(("space", "n"), [(VECTOR, 1), (VECTOR, 3), (PARTS, 1)])
def test_samples_equal_those_of_the_buffers_of_sb3(
    space: spaces.Space[Any], n: int, timeouts: bool, place: dict[str, Any]
) -> None:
    steps = 60
    settings: dict[str, Any] = {"device": "cpu", "handle_timeout_termination": timeouts}
    reference: type = DictReplayBuffer if space is PARTS else ReplayBuffer
    if n > 1:
        settings |= {"n_steps": n, "gamma": GAMMA}
        reference = NStepReplayBuffer
    ours = InnetReplayBuffer(1000, space, ACTION, n_envs=ENVIRONMENTS, **settings, **place)
    theirs = [reference(1000, space, ACTION, **settings) for _ in range(ENVIRONMENTS)]
    everyone = list(range(ENVIRONMENTS))
    played([(ours, everyone), *((buffer, [each]) for each, buffer in enumerate(theirs))], space, steps)
    assert (ours.pos, ours.size(), ours.full) == (steps, steps, False)
    # By the number of the observation, whatever the position.
    numbers = [[told(_at(buffer.observations, row)) for row in range(steps)] for buffer in theirs]
    seen = set()
    for _ in range(16):
        batch = ours.sample(256)
        for row in np.unique(batch.ids, return_index=True)[1]:
            environment, number = told(_at(batch.observations, row))
            position = numbers[environment].index((environment, number))
            expected = theirs[environment]._get_samples(np.array([position]))
            seen.add((environment, position))
            for name in ("observations", "actions", "next_observations", "dones", "rewards"):
                _assert_equal(getattr(batch, name), row, getattr(expected, name))
            if n > 1:
                assert batch.discounts is not None
                discount = expected.discounts * (1 - expected.dones)
                torch.testing.assert_close(batch.discounts[row : row + 1], discount)
            else:
                assert batch.discounts is None
    assert len(seen) == steps * ENVIRONMENTS


def _at(values: Any, row: int) -> Any:
    if isinstance(values, dict):
        return {
            key: np.asarray(part[row]).reshape(-1) if key == "joints" else part[row] for key, part in values.items()
        }
    return np.asarray(values[row]).reshape(-1)


def _assert_equal(batch: Any, row: int, expected: Any) -> None:
    if isinstance(expected, dict):
        for key, part in expected.items():
            _assert_equal(batch[key], row, part)
        return
    assert batch.dtype == expected.dtype
    torch.testing.assert_close(batch[row : row + 1], expected)


@pytest.mark.parametrize(
    "space",
    [spaces.Discrete(5), spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(6), spaces.Box(0, 1, (2, 2), np.float64)],
)
@pytest.mark.parametrize("action", [spaces.Discrete(3), spaces.MultiBinary(2), spaces.Box(-1, 1, (1,), np.float64)])
def test_spaces_have_the_shapes_and_dtypes_of_sb3(space: spaces.Space[Any], action: spaces.Space[Any]) -> None:
    ours, theirs = (made(20, space, action, "cpu", n_envs=2) for made in (InnetReplayBuffer, ReplayBuffer))
    space.seed(1)
    action.seed(1)
    for _ in range(5):
        observation, following = (np.array([space.sample() for _ in range(2)]) for _ in range(2))
        step = np.array([action.sample() for _ in range(2)])
        for buffer in (ours, theirs):
            buffer.add(observation, following, step, np.zeros(2), np.zeros(2, bool), [{}, {}])
    for mine, reference in zip(ours.sample(4)[:5], theirs.sample(4)[:5], strict=True):
        assert (mine.dtype, mine.shape) == (reference.dtype, reference.shape)


class Counting(gym.Env[Any, Any]):
    """The observation is the number of the episode and that of its step; it is cut off after nine steps."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = action_space
        self.episode = 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.step_number = self.episode + 1, 0
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.step_number += 1
        return self._observation(), float(self.step_number), False, self.step_number == 9, {}

    def _observation(self) -> Any:
        return np.array([self.episode, self.step_number], np.float32)


@pytest.mark.parametrize("algorithm", [DQN, SAC, TD3, DDPG, QRDQN, TQC, PrioritizedDQN, PrioritizedSAC])
def test_every_algorithm_learns_twice_from_whole_steps(algorithm: Any) -> None:
    discrete = algorithm in (DQN, QRDQN, PrioritizedDQN)
    env = DummyVecEnv([lambda: Counting(spaces.Discrete(2) if discrete else ACTION)] * 2)
    model = algorithm("MlpPolicy", env, replay_buffer_class=InnetReplayBuffer, **small())
    model.learn(60)
    model.learn(60)
    assert model._n_updates > 0
    batch = model.replay_buffer.sample(256)
    # Also where the second `learn` reset the environments in the middle of an episode.
    np.testing.assert_array_equal(batch.next_observations[:, 0], batch.observations[:, 0])
    np.testing.assert_array_equal(batch.next_observations[:, 1], batch.observations[:, 1] + 1)
    np.testing.assert_array_equal(batch.rewards, batch.next_observations[:, 1:])
    assert not batch.dones.any()


@pytest.mark.filterwarnings("ignore:The last trajectory:UserWarning")
def test_images_take_optimize_memory_usage_beside_timeouts() -> None:
    env = make_vec_env("CartPole-v1", 1)
    model = DQN("MlpPolicy", env, replay_buffer_class=InnetReplayBuffer, optimize_memory_usage=True, **small())
    model.learn(30)
    model.learn(30)
    assert model.replay_buffer is not None
    assert len(model.replay_buffer.sample(16).rewards) == 16


def test_normalisation_is_that_of_the_environment() -> None:
    env = VecNormalize(DummyVecEnv([lambda: Counting(ACTION)]))
    buffer = InnetReplayBuffer(100, env.observation_space, env.action_space, "cpu")
    env.reset()
    observation = env.get_original_obs()
    for _ in range(8):
        _, _, done, infos = env.step(np.zeros((1, 2), np.float32))
        following = env.get_original_obs()
        buffer.add(observation, following, np.zeros((1, 2)), env.get_original_reward(), done, infos)
        observation = following
    batch: Any = buffer.sample(32, env)
    expected: Any = env.normalize_obs(np.stack([np.ones(8), np.arange(8)], 1))
    rows = np.argmin(np.abs(np.asarray(batch.observations)[:, 1:] - expected[:, 1]), axis=1)
    np.testing.assert_allclose(batch.observations, expected[rows], rtol=1e-6)
    np.testing.assert_allclose(batch.rewards[:, 0], env.normalize_reward(rows + 1.0), rtol=1e-6)
    several = InnetReplayBuffer(100, env.observation_space, env.action_space, "cpu", n_steps=3)
    several.add(observation, observation, np.zeros((1, 2)), np.ones(1), np.ones(1, bool), [{}])
    with pytest.raises(errors.ConfigError, match="norm_reward=False, or use n_steps=1"):
        several.sample(4, env)


def test_a_saved_buffer_has_the_same_steps_and_goes_on(tmp_path: Path) -> None:
    model = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=InnetReplayBuffer, **small())
    model.learn(60)
    buffer: Any = model.replay_buffer
    copies = [copy.deepcopy(buffer), pickle.loads(pickle.dumps(buffer))]
    model.save_replay_buffer(tmp_path / "buffer.pkl")
    model.load_replay_buffer(tmp_path / "buffer.pkl")
    for each in [*copies, model.replay_buffer]:
        stored = [_rows(replay) for replay in (buffer, each)]
        assert stored[0] == stored[1]
        assert len(stored[0]) == 60
        assert (each.pos, each.full) == (60, False)
    model.learn(30, reset_num_timesteps=False)
    assert model.replay_buffer is not None
    # Updates come after every fourth step.
    assert model.replay_buffer.pos == 92


def _rows(buffer: Any) -> list[bytes]:
    """The stored steps, in order, without final rows."""
    found = []
    for episode in buffer.replay.episodes(buffer.table.name):
        rows = zip(*(episode[name] for name in ("observation", "action", "reward", "final")), strict=True)
        found += [b"".join(part.tobytes() for part in row[:3]) for row in rows if not row[3]]
    return found


def test_a_part_of_a_batch_is_as_good_as_the_whole() -> None:
    buffer = InnetReplayBuffer(100, VECTOR, ACTION, "cpu")
    played([(buffer, [0])], VECTOR, 60)
    rewards = np.unique(buffer.sample(4000).rewards.numpy())
    batches = [np.searchsorted(rewards, buffer.sample(32).rewards.numpy()[:, 0]) for _ in range(BATCHES)]
    check_every_place(batches, len(rewards))


def test_updated_priorities_decide_what_is_sampled() -> None:
    buffer = InnetReplayBuffer(100, VECTOR, ACTION, "cpu", priority_exponent=1.0, beta=1.0)
    played([(buffer, [0])], VECTOR, 4)
    batch = buffer.sample(64)
    numbers = {int(value): identity for value, identity in zip(batch.rewards * 1e6, batch.ids, strict=True)}
    ids = np.array(list(numbers.values()))
    buffer.update_priorities(ids, torch.tensor([[1.0], [-3.0], [0.0], [0.0]]))
    batch = buffer.sample(4000)
    shares = [float(np.mean(batch.ids == identity)) for identity in ids]
    np.testing.assert_allclose(shares, [0.25, 0.75, 0, 0], atol=0.001)
    # (N P)^-1, divided by the largest.
    weights = [float(batch.weights[batch.ids == identity][0]) for identity in ids[:2]]
    np.testing.assert_allclose(weights, [1, 1 / 3], rtol=1e-4)


def test_a_loaded_buffer_takes_steps_of_another_number_of_environments(place: dict[str, Any], tmp_path: Path) -> None:
    def made(environments: int) -> DQN:
        env = DummyVecEnv([lambda: Counting(spaces.Discrete(2))] * environments)
        return DQN(
            "MlpPolicy", env, replay_buffer_class=InnetReplayBuffer, replay_buffer_kwargs=place.copy(), **small()
        )

    first = made(2)
    first.learn(60)
    first.save_replay_buffer(tmp_path / "buffer.pkl")
    for environments in (1, 3):
        model = made(environments)
        model.load_replay_buffer(tmp_path / "buffer.pkl")
        buffer: Any = model.replay_buffer
        model.learn(30)
        assert (buffer.n_envs, buffer.buffer_size) == (environments, 500 // environments)
        assert buffer.size() == first.num_timesteps // environments + model.num_timesteps // environments
        buffer.flush()
        assert len(_rows(buffer)) >= first.num_timesteps + model.num_timesteps
        with pytest.raises(errors.SchemaError, match=r"observation has the shape \(2, 2\), and"):
            buffer.add(np.zeros((2, 2)), np.zeros((2, 2)), np.zeros(2), np.zeros(2), np.zeros(2), [{}, {}])


@pytest.mark.parametrize(("ours", "theirs"), [(PrioritizedDQN, DQN), (PrioritizedSAC, SAC)])
def test_with_equal_weights_an_update_is_that_of_sb3(ours: Any, theirs: Any) -> None:
    env = DummyVecEnv([lambda: Counting(spaces.Discrete(2) if theirs is DQN else ACTION)])
    models = [made("MlpPolicy", env, replay_buffer_class=InnetReplayBuffer, **small()) for made in (ours, theirs)]
    models[0].learn(20)
    models[1].learn(20)
    batches = [models[0].replay_buffer.sample(32) for _ in range(6)]
    for batch in batches:
        batch.weights = torch.ones(32, 1)
    for model in models:
        replayed = iter(batches)
        model.replay_buffer.sample = lambda size, env, replayed=replayed: next(replayed)
        model.replay_buffer.update_priorities = lambda ids, errors: None
        torch.manual_seed(7)
        model.train(gradient_steps=6, batch_size=32)
    for mine, reference in zip(*(model.policy.parameters() for model in models), strict=True):
        torch.testing.assert_close(mine, reference)


def test_a_transition_of_weight_0_changes_nothing() -> None:
    model = PrioritizedDQN("MlpPolicy", DummyVecEnv([lambda: Counting(spaces.Discrete(2))]), **small())
    model.learn(20)
    buffer: Any = model.replay_buffer
    batch = buffer.sample(32)
    batch.weights = torch.zeros(32, 1)
    buffer.sample = lambda size, env: batch
    before = copy.deepcopy(model.policy.state_dict())
    model.train(gradient_steps=1, batch_size=32)
    for name, values in model.policy.state_dict().items():
        torch.testing.assert_close(values, before[name])


def test_beta_rises_to_1() -> None:
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", beta=0.5, train_freq=1, **small())
    model.learn(100)
    buffer: Any = model.replay_buffer
    assert buffer.beta == pytest.approx(1.0)
    # The last rollout passes the end.
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", beta=0.5, train_freq=200, **small())
    model.learn(100)
    buffer = model.replay_buffer
    assert buffer.beta == 1.0
    assert buffer.table.priority_exponent == 0.6


COLLECTOR = """
import sys
from stable_baselines3 import DQN
from innet_drl.sb3 import InnetReplayBuffer
arguments = {"address": sys.argv[1], "connection": {"namespace": "run-7"}}
DQN("MlpPolicy", "CartPole-v1", buffer_size=500, learning_starts=1000, replay_buffer_class=InnetReplayBuffer,
    replay_buffer_kwargs=arguments).learn(130)
"""


def test_what_another_process_adds_at_a_server_is_sampled(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        # It ends without a flush.
        subprocess.run([sys.executable, "-c", COLLECTOR, address], check=True)
        cartpole = gym.make("CartPole-v1")
        spaces_ = cartpole.observation_space, cartpole.action_space
        arguments: dict[str, Any] = {"address": address, "connection": {"namespace": "run-7"}}
        learner = InnetReplayBuffer(500, *spaces_, "cpu", n_envs=3, **arguments)
        assert len(learner.sample(16).rewards) == 16
        # 130 rounded up to whole rollouts.
        assert len(set(_rows(learner))) == 132
        other = InnetReplayBuffer(300, *spaces_, "cpu", **arguments)
        with pytest.raises(errors.TableDiffersError, match="capacity"):
            other.sample(1)


PLAYER = """
import sys
from innet_drl.sb3 import PrioritizedDQN, collect
model = PrioritizedDQN("MlpPolicy", "CartPole-v1", buffer_size=20_000, learning_starts=200, seed=int(sys.argv[2]),
    replay_buffer_kwargs={"address": sys.argv[1], "samples_per_insert": 8.0})
collect(model, 10_000_000)
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_one_process_trains_on_what_others_collect_also_when_one_is_killed(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        players = [subprocess.Popen([sys.executable, "-c", PLAYER, address, str(seed)]) for seed in range(3)]
        try:
            arguments = {"address": address, "samples_per_insert": 8.0}
            model = PrioritizedDQN(
                "MlpPolicy",
                "CartPole-v1",
                buffer_size=20_000,
                replay_buffer_kwargs=arguments,
                target_update_interval=200,
            )
            before = copy.deepcopy(model.policy.state_dict())
            train(model, 300)
            replay: Any = model.replay_buffer.replay  # type: ignore[union-attr]
            inserted = replay.stats()["tables"]["sb3"]["inserted_items"]
            players[0].kill()
            train(model, 600)
            # Batches of 32, eight samples for each step; the rest is slack.
            grown = replay.stats()["tables"]["sb3"]["inserted_items"] - inserted
            assert 1200 < grown < 4800
        finally:
            for player in players:
                player.kill()
                player.wait()
        # The target network was copied, and the policy is published for players.
        names = [name for name in before if name.startswith("q_net_target")]
        assert any(not torch.equal(before[name], model.policy.state_dict()[name]) for name in names)
        published = replay.get_parameters("sb3-policy", device="cpu")
        for name, values in model.policy.state_dict().items():
            torch.testing.assert_close(published.tensors[name], values)


def test_collecting_goes_on_at_a_server_that_was_restarted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = None
    for _ in range(2):
        with Server(f"unix://{tmp_path}/server") as server:
            if model is None:
                model = PrioritizedDQN(
                    "MlpPolicy", "CartPole-v1", replay_buffer_kwargs={"address": server.address}, **small()
                )
            collect(model, 200)
            replay: Any = model.replay_buffer.replay  # type: ignore[union-attr]
            assert replay.stats()["tables"]["sb3"]["inserted_items"] > 150
    assert [message for message in caplog.messages if "collecting goes on" in message]
    replay.close()


class Rates(BaseCallback):
    """Learning rate, beta and counted steps at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, float, int]] = []

    def _on_step(self) -> bool:
        model: Any = self.model
        rate = model.policy.optimizer.param_groups[0]["lr"]
        self.seen.append((rate, model.replay_buffer.beta, self.num_timesteps))
        return len(self.seen) != 140


def test_training_in_pieces_goes_on(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        made = [
            PrioritizedDQN(
                "MlpPolicy",
                DummyVecEnv([lambda: gym.make("CartPole-v1")] * 2),
                learning_rate=lambda left: 1e-3 * left,
                train_freq=2,
                gradient_steps=1,
                replay_buffer_kwargs={"address": address},
                **small(),
            )
            for _ in range(2)
        ]
        collector, model = made
        # Neither a multiple of `pull_period` nor of the number of environments.
        for pull_period, expected in ((100, 152), (7, 304)):
            collect(collector, 151, pull_period)
            assert collector.num_timesteps == expected
        callback = Rates()
        checkpoints = CheckpointCallback(20, str(tmp_path / "saved"))
        train(model, 50, callback=[callback, checkpoints], total_updates=100)
        model.save(tmp_path / "model")
        model = PrioritizedDQN.load(tmp_path / "model", env=model.env)
        train(model, 50, 10, callback, total_updates=100)
        # Two calls an update, until the callback ends the training.
        assert model._n_updates == 70
        rates, betas, counted = (np.array(column) for column in zip(*callback.seen, strict=True))
        left = np.repeat(1.0 - np.arange(70) / 100, 2)
        np.testing.assert_allclose(rates, 1e-3 * left)
        np.testing.assert_allclose(betas, 1.0 - 0.6 * left)
        assert set(counted) == {304}
        assert model.num_timesteps == 304
        assert [path.name for path in (tmp_path / "saved").iterdir()] == ["rl_model_304_steps.zip"]
        assert model.predict(np.zeros((2, 4), np.float32))[0].shape == (2,)
        # Without a total the schedules end with the call.
        train(model, 30, callback=callback)
        np.testing.assert_allclose(
            [rate for rate, _, _ in callback.seen[140::2]], 1e-3 * (1 - np.arange(70, 100) / 100)
        )
        with pytest.raises(errors.ConfigError, match="total_updates is 100, and the model has 101 after this call"):
            train(model, 1, total_updates=100)


class Events(BaseCallback):
    """The events of a training with the calls and steps at each, and what each call saw; it ends it after `last`."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last = last
        self.seen: list[tuple[str, int, int]] = []
        self.rewards: list[list[float]] = []

    def _note(self, event: str) -> None:
        self.seen.append((event, self.n_calls, self.num_timesteps))

    def _on_training_start(self) -> None:
        self._note("begin")

    def _on_rollout_start(self) -> None:
        self._note("rollout")

    def _on_step(self) -> bool:
        self._note("step")
        self.rewards.append(self.locals["rewards"].tolist())
        return self.n_calls < self.last

    def _on_rollout_end(self) -> None:
        self._note("rollout ends")

    def _on_training_end(self) -> None:
        self._note("end")


@pytest.mark.parametrize("last", [1000, 13])
def test_callbacks_of_a_collector_are_called_as_in_learn(tmp_path: Path, last: int) -> None:
    settings: dict[str, Any] = {**small(), "learning_starts": 1000, "train_freq": 5}
    called = []
    with served_memories(tmp_path, 1) as address:
        for number in range(2):
            env = DummyVecEnv([lambda: Counting(spaces.Discrete(2))] * 2)
            memory = {"address": address, "table": f"of {number}"}
            model = PrioritizedDQN("MlpPolicy", env, replay_buffer_kwargs=memory, **settings)
            saved = tmp_path / f"saved {number}"
            events, checkpoints = Events(last), CheckpointCallback(5, str(saved))
            evaluations = EvalCallback(
                Monitor(Counting(spaces.Discrete(2))), n_eval_episodes=2, eval_freq=4, log_path=str(saved), verbose=0
            )
            callback: list[BaseCallback] = [events, checkpoints, evaluations]
            # Two steps a call, one for each environment: 20 calls.
            if number == 0:
                model.learn(40, callback)
            else:
                collect(model, 40, 5, callback=callback)
            with np.load(saved / "evaluations.npz") as found:
                evaluated = {name: found[name].tolist() for name in ("timesteps", "results", "ep_lengths")}
            called.append((events.seen, events.rewards, evaluated, sorted(path.name for path in saved.glob("*.zip"))))
            # What came before the end is on the server. SB3 does not store the step at which a callback ends it.
            buffer: Any = model.replay_buffer
            buffer.flush()
            assert buffer.replay.stats()["tables"][f"of {number}"]["inserted_items"] == 2 * min(last - 1, 20)
            buffer.replay.close()
    assert called[0] == called[1]
    events_seen, _, evaluated, saved_models = called[1]
    calls = min(last, 20)
    assert [event for event in events_seen if event[0] == "step"] == [("step", n, 2 * n) for n in range(1, calls + 1)]
    assert evaluated["timesteps"] == [8 * number for number in range(1, calls // 4 + 1)]
    assert evaluated["results"] == [[45.0, 45.0]] * (calls // 4)
    assert len(saved_models) == calls // 5


class Collecting(BaseCallback):
    """Another process: it collects ten steps after each fourth call."""

    def __init__(self, collector: PrioritizedDQN) -> None:
        super().__init__()
        self._collector = collector

    def _on_step(self) -> bool:
        if self.n_calls % 4 == 0:
            collect(self._collector, 10)
        return True


def test_training_evaluates_and_saves_as_learn_does(tmp_path: Path) -> None:
    def callbacks(folder: Path, **of_best: Any) -> list[BaseCallback]:
        path = str(tmp_path / folder)
        env = Monitor(Counting(spaces.Discrete(2)))
        evaluations = EvalCallback(
            env, n_eval_episodes=3, eval_freq=20, log_path=path, best_model_save_path=path, verbose=0, **of_best
        )
        return [CheckpointCallback(20, path), evaluations]

    def found(folder: Path) -> tuple[list[int], list[list[float]], set[int]]:
        with np.load(tmp_path / folder / "evaluations.npz") as evaluations:
            assert evaluations["ep_lengths"].tolist() == [[9] * 3] * len(evaluations["timesteps"])
            steps, results = evaluations["timesteps"].tolist(), evaluations["results"].tolist()
        saved = {int(path.name.split("_")[2]) for path in (tmp_path / folder).glob("rl_model_*_steps.zip")}
        assert (tmp_path / folder / "best_model.zip").exists()
        return steps, results, saved

    with served_memories(tmp_path, 1) as address:
        alone, collector, model = (
            PrioritizedDQN(
                "MlpPolicy",
                DummyVecEnv([lambda: Counting(spaces.Discrete(2))]),
                train_freq=2,
                gradient_steps=1,
                replay_buffer_kwargs=memory,
                **small(),
            )
            for memory in ({}, {"address": address}, {"address": address})
        )
        alone.learn(100, callbacks(Path("learn")))
        collect(collector, 60)
        # Two calls for each update. What is collected meanwhile is counted with each publication.
        train(model, 50, 4, [Collecting(collector), *callbacks(Path("train"))])
        evaluated = [[45.0] * 3] * 5
        assert found(Path("learn")) == ([20, 40, 60, 80, 100], evaluated, {20, 40, 60, 80, 100})
        steps, results, saved = found(Path("train"))
        assert results == evaluated
        assert saved == set(steps)
        assert len(saved) == 5
        assert 60 < min(steps) < max(steps) <= model.num_timesteps == collector.num_timesteps
        # A checkpoint goes on from its updates.
        loaded = PrioritizedDQN.load(tmp_path / "train" / f"rl_model_{max(steps)}_steps", env=model.env)
        assert loaded._n_updates == 50
        # An evaluation that is good enough ends it, and the policy is published.
        updates = model._n_updates
        good = StopTrainingOnRewardThreshold(44.0)
        train(model, 1000, callback=callbacks(Path("good"), callback_on_new_best=good))
        assert model._n_updates - updates == 10
        replay: Any = model.replay_buffer.replay  # type: ignore[union-attr]
        published = replay.get_parameters("sb3-policy", device="cpu")
        for name, values in model.policy.state_dict().items():
            torch.testing.assert_close(published.tensors[name], values)


def test_a_blocked_collector_ends_at_once_and_says_how_few_steps_are_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wait at the end would last beyond the timeout of this test.
    monkeypatch.setattr("innet_drl.sb3.stream._LAST_S", 1e6)
    with served_memories(tmp_path, 1) as address, innet.connect(address) as replay:
        memory = {"address": address, "samples_per_insert": 8.0, "timeout": 1e6}
        model = PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_kwargs=memory, **small())

        def blocked() -> bool:
            return bool(replay.stats()["tables"].get("sb3", {}).get("waiting_pushes"))

        def interrupt() -> None:
            until(blocked)
            _thread.interrupt_main()

        watcher = threading.Thread(target=interrupt)
        watcher.start()
        with pytest.raises(KeyboardInterrupt):
            collect(model, 10_000_000)
        watcher.join()
        table = replay.stats()["tables"]["sb3"]
        assert table["by_writer"][0]["name"] == f"collector {socket.gethostname()} {os.getpid()}"
        buffer: Any = model.replay_buffer
        buffer._stream.close()
        (warning,) = [message for message in caplog.messages if "are lost" in message]
        lost = int(warning.split("at most ")[1].split(":")[0])
        # The step that was interrupted, too, and the newest one in the table, which waits for its next observation.
        assert model.num_timesteps - table["inserted_items"] <= lost + 2 <= 35
        buffer.replay.close()


def test_statistics_of_one_process_do_not_normalise_in_others(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        env = VecNormalize(DummyVecEnv([lambda: Counting(ACTION)]))
        memory = {"address": address, "min_size": 150, "timeout": 0.3}
        model = PrioritizedSAC("MlpPolicy", env, replay_buffer_kwargs=memory, **small())
        for call in (collect, train):
            with pytest.raises(errors.ConfigError, match="VecNormalize with training=False"):
                call(model, 10)
        env.training = False
        collect(model, 100)
        # `min_size` takes the place of `learning_starts`.
        with pytest.raises(errors.DeadlineError, match="of the 150 that min_size asks for"):
            train(model, 1)
        collect(model, 100)
        train(model, 1)


def test_a_process_that_only_samples_opens_no_writer(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        collector, learner = [
            PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_kwargs={"address": address}, **small())
            for _ in range(2)
        ]
        collect(collector, 100)
        buffer: Any = learner.replay_buffer
        buffer.sample(10)
        assert len(buffer.replay.stats()["tables"]["sb3"]["by_writer"]) == 1


def test_a_policy_of_another_network_is_named(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address:
        models = [
            PrioritizedDQN(
                "MlpPolicy",
                "CartPole-v1",
                replay_buffer_kwargs={"address": address},
                **{**small(), "policy_kwargs": {"net_arch": [width]}},
            )
            for width in (8, 16)
        ]
        replay: Any = models[0].replay_buffer.replay  # type: ignore[union-attr]
        replay.put_parameters("sb3-policy", models[0].policy.state_dict())
        with pytest.raises(errors.ConfigError, match="is of another network: collectors and learner make the model"):
            collect(models[1], 10)


def test_processes_want_a_server() -> None:
    model = SAC("MlpPolicy", DummyVecEnv([lambda: Counting(ACTION)]), replay_buffer_class=InnetReplayBuffer, **small())
    for call in (collect, train):
        with pytest.raises(errors.ConfigError, match="processes share the steps by a server"):
            call(model, 10)
    for setting in ({"samples_per_insert": 8.0}, {"min_size": 9}, {"connection": {"namespace": "a"}}):
        with pytest.raises(errors.ConfigError, match="samples_per_insert and min_size need an address"):
            InnetReplayBuffer(100, VECTOR, ACTION, **setting)
    # A saved model would show it.
    with pytest.raises(errors.ConfigError, match=r"connection takes no token, .* INNET_TOKEN"):
        InnetReplayBuffer(100, VECTOR, ACTION, address="innet://nobody:1", connection={"token": "k" * 20})
    # Before the server is asked for.
    with pytest.raises(TypeError, match="unexpected keyword argument 'tls'"):
        InnetReplayBuffer(100, VECTOR, ACTION, address="innet://nobody:1", connection={"tls": "ca.pem"})


def test_a_model_is_loaded_for_its_policy_alone_while_its_server_is_away(tmp_path: Path) -> None:
    arguments = {"address": f"unix://{tmp_path}/nobody", "timeout": 0.1}
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", replay_buffer_kwargs=arguments, **small())
    model.save(tmp_path / "model")
    loaded = PrioritizedDQN.load(tmp_path / "model")
    action, _ = loaded.predict(np.zeros(4, np.float32))
    assert action in (0, 1)
    with pytest.raises(errors.ReplayError, match="nobody"):
        loaded.set_env(gym.make("CartPole-v1"))
        loaded.learn(1)


def test_a_reset_leaves_nothing_and_begins_new_episodes() -> None:
    buffer = InnetReplayBuffer(1000, VECTOR, ACTION, "cpu")
    for number in [0, 1, 2, 3, 100, 101, 102]:
        if number == 100:
            buffer.reset()
            assert (buffer.pos, buffer.size()) == (0, 0)
        observation, following = (observed(VECTOR, 0, each)[None] for each in (number, number + 1))
        buffer.add(observation, following, np.zeros((1, 2)), np.ones(1), np.zeros(1, bool), [{}])
    batch: Any = buffer.sample(64)
    numbers = {(told(mine), told(following)) for mine, following in zip(batch[0], batch[2], strict=True)}
    assert numbers == {((0, number), (0, number + 1)) for number in (100, 101, 102)}


def test_new_steps_are_sampled_soon_and_a_full_buffer_is_full() -> None:
    buffer = InnetReplayBuffer(160, VECTOR, ACTION, "cpu", n_envs=2)
    played([(buffer, [0, 1])], VECTOR, 10)
    buffer.sample(1)
    played([(buffer, [0, 1])], VECTOR, 60)
    seen = set(buffer.sample(2000).ids)
    assert 2 * (10 + 60 - 9) <= len(seen) <= 2 * 70
    played([(buffer, [0, 1])], VECTOR, 200)
    # Last observations of truncated episodes take a row, too.
    assert 120 <= len(set(buffer.sample(4000).ids)) <= 160


def _refused_steps() -> list[tuple[str, dict[str, Any]]]:
    """What the error says, and the argument that takes the place of a good one."""
    good = stacked([observed(PARTS, 0, 1)])
    nan = np.full((1, 3), np.nan, np.float32)
    lacking = {key: part for key, part in good.items() if key != "joints"}
    return [
        *((r"lacks its parts \['joints'\]", {which: lacking}) for which in ("obs", "next_obs")),
        *(("observation/joints has NaN", {which: good | {"joints": nan}}) for which in ("obs", "next_obs")),
        ("lacks its parts", {"obs": good["joints"]}),
        (r"has the shape \(3, 1\), and \(1, 3\)", {"obs": good | {"joints": np.zeros((3, 1))}}),
        (r"has the shape \(2, 3\), and \(1, 3\)", {"obs": good | {"joints": np.zeros((2, 3))}}),
        ("observation/joints is <U1, and float32", {"obs": good | {"joints": [["a", "b", "c"]]}}),
        ("observation/joints is no array", {"obs": good | {"joints": [[1], [2, 3]]}}),
        ("camera has values that uint8 cannot hold", {"obs": good | {"camera": np.full((1, 2, 4, 4), 0.5)}}),
        ("camera has values that uint8 cannot hold", {"obs": good | {"camera": np.full((1, 2, 4, 4), 256)}}),
        ("action has NaN", {"action": np.array([[0.0, np.nan]])}),
        (r"action has the shape \(1, 3\), and \(1, 2\)", {"action": np.zeros((1, 3))}),
        ("reward has NaN", {"reward": np.array([np.inf])}),
        (r"reward has the shape \(2,\), and \(1,\)", {"reward": np.zeros(2)}),
        (r"done has the shape \(2,\)", {"done": np.zeros(2, bool)}),
        ("done has values that bool cannot hold", {"done": np.array([np.nan])}),
        (r"infos has the shape \(2,\)", {"infos": [{}, {}]}),
    ]


def test_a_refused_step_changes_nothing(place: dict[str, Any]) -> None:
    buffer = InnetReplayBuffer(1000, PARTS, ACTION, "cpu", **place)

    def step(number: int, **other: Any) -> None:
        observations = {
            name: stacked([observed(PARTS, 0, number + later)]) for name, later in (("obs", 0), ("next_obs", 1))
        }
        rest = {"action": np.zeros((1, 2)), "reward": np.ones(1), "done": np.zeros(1, bool), "infos": [{}]}
        buffer.add(**{**observations, **rest, **other})

    number = 0
    # Also as the first step, and after one that is not yet complete.
    for message, other in [*_refused_steps(), *_refused_steps()]:
        with pytest.raises(errors.SchemaError, match=message):
            step(number, **other)
        step(number)
        number += 1
    # SB3 ignores parts that the space lacks.
    step(number, obs=stacked([observed(PARTS, 0, number)]) | {"other": np.zeros(1)})
    assert buffer.pos == number + 1
    buffer.flush()
    (episode,) = buffer.replay.episodes("sb3")
    np.testing.assert_array_equal(episode.reward[:-1], np.ones(number + 1))
    np.testing.assert_array_equal(episode.observation["joints"][:, 1], np.arange(number + 2))
    pickle.dumps(buffer)


def test_settings_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    def made(**arguments: Any) -> PrioritizedDQN:
        return PrioritizedDQN("MlpPolicy", "CartPole-v1", **small(), **arguments)

    for arguments, message in (
        ({"priority_exponent": None}, "priority_exponent of PrioritizedDQN is None"),
        ({"replay_buffer_kwargs": {"beta": 0.9}}, "beta of PrioritizedDQN is 0.4, and 0.9 in replay_buffer_kwargs"),
        ({"replay_buffer_kwargs": {"gamma": 0.5}, "n_steps": 3}, "gamma of PrioritizedDQN is 0.99, and 0.5 in"),
        ({"replay_buffer_kwargs": {"n_steps": 5}, "n_steps": 3}, "n_steps of PrioritizedDQN is 3, and 5 in"),
        ({"replay_buffer_class": ReplayBuffer}, "updates priorities: its replay_buffer_class is InnetReplayBuffer"),
    ):
        with pytest.raises(errors.ConfigError, match=message):
            made(**arguments)
    # Positional, as of the buffer, and in a saved model.
    model = PrioritizedDQN("MlpPolicy", "CartPole-v1", 1e-4, 500, 20, 32, 1.0, 0.5, replay_buffer_kwargs={"n_steps": 3})
    for each in (model, _reloaded(model, tmp_path)):
        buffer: Any = each.replay_buffer
        assert (buffer.n_steps, buffer.table.view.gamma, buffer.table.priority_exponent, each.n_steps) == (
            3,
            0.5,
            0.6,
            3,
        )
    other: Any = _reloaded(model, tmp_path, priority_exponent=0.9, beta=0.7).replay_buffer
    assert other.table.priority_exponent == 0.9
    uniform = DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=InnetReplayBuffer, **small())
    uniform.learn(30)
    uniform.save_replay_buffer(tmp_path / "uniform")
    with pytest.raises(errors.ConfigError, match="the loaded buffer has none"):
        model.load_replay_buffer(tmp_path / "uniform")
    uniform.save(tmp_path / "uniform")
    loaded = PrioritizedDQN.load(tmp_path / "uniform", env=uniform.env)
    loaded.learn(30)
    buffer = loaded.replay_buffer
    assert buffer.table.sampler == "prioritized"


def _reloaded(model: PrioritizedDQN, folder: Path, **arguments: Any) -> PrioritizedDQN:
    model.save(folder / "model")
    return PrioritizedDQN.load(folder / "model", **arguments)


def test_actions_are_stored_in_the_units_of_any_finite_space() -> None:
    for middle, half in ((0.0, 1.0), (72.44, 0.05), (-3.0, 1e-3), (1e4, 2e4)):
        space = spaces.Box(np.float32(middle - half), np.float32(middle + half), (1,), np.float32)
        buffer = InnetReplayBuffer(500, VECTOR, space, "cpu", n_envs=3)
        given = np.array([[-1.0], [0.5], [1.0]], np.float32)
        none = np.zeros(3)
        for _ in range(20):
            buffer.add(np.zeros((3, 3)), np.zeros((3, 3)), given, none, none.astype(bool), [{}, {}, {}])
        sampled = buffer.sample(64).actions.numpy()
        # Rounding of float32 near the middle.
        assert np.abs(sampled[:, :, None] - given[None, None, :, 0]).min(2).max() <= 1e-5 + 1e-6 * (
            1 + abs(middle) / half
        )
    with pytest.raises(errors.ConfigError, match="bounds of their space"):
        InnetReplayBuffer(500, VECTOR, spaces.Box(-np.inf, np.inf, (1,)), "cpu")


@pytest.mark.parametrize("key", ["a/b", "0", ""])
def test_a_part_that_names_no_column_is_refused(key: str) -> None:
    with pytest.raises(errors.ConfigError, match=f"the observation space has a part '{key}': a part's name is a text"):
        InnetReplayBuffer(100, spaces.Dict({key: VECTOR}), ACTION)


def test_bad_input_is_one_error() -> None:
    buffer = InnetReplayBuffer(100, VECTOR, ACTION, "cpu")
    with pytest.raises(errors.DeadlineError, match="0 items"):
        buffer.sample(4)
    with pytest.raises(TypeError, match="alpha"):
        DQN("MlpPolicy", "CartPole-v1", replay_buffer_class=InnetReplayBuffer, replay_buffer_kwargs={"alpha": 0.5})
