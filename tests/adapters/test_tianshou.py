"""Tianshou's buffers with these priorities: its own buffers are the reference."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from order import BATCHES, check_every_place
from scipy import stats
from tianshou.algorithm.modelfree.dqn import DQN, DiscreteQLearningPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Batch, Collector, PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.trainer import OffPolicyTrainerParams
from tianshou.utils.net.common import Net

from innet_drl import errors
from innet_drl.tianshou import InnetPrioritizedReplayBuffer, InnetPrioritizedVectorReplayBuffer

PARTS, SIZE = 3, 60


def filled(kind: Any = InnetPrioritizedVectorReplayBuffer, steps: int = 20) -> Any:
    """A buffer of `PARTS` environments, whose episodes have five steps."""
    parts = {} if kind in (InnetPrioritizedReplayBuffer, PrioritizedReplayBuffer) else {"buffer_num": PARTS}
    buffer = kind(SIZE, alpha=0.7, beta=0.5, **parts)
    for step in range(steps):
        add(buffer, step)
    return buffer


def add(buffer: Any, step: int) -> None:
    vector = isinstance(buffer, PrioritizedVectorReplayBuffer)
    end, none = step % 5 == 4, False
    items = [
        Batch(obs=[step], act=0, rew=1.0, terminated=end, truncated=none, obs_next=[step + 1], info={})
        for _ in range(PARTS if vector else 1)
    ]
    buffer.add(Batch.stack(items) if vector else items[0], **({"buffer_ids": range(PARTS)} if vector else {}))


@pytest.mark.parametrize("kind", [InnetPrioritizedReplayBuffer, InnetPrioritizedVectorReplayBuffer])
def test_a_part_of_a_batch_is_as_good_as_the_whole(kind: Any) -> None:
    buffer = filled(kind)
    check_every_place([buffer.sample_indices(32) for _ in range(BATCHES)], SIZE)


@pytest.mark.parametrize("kind", [InnetPrioritizedReplayBuffer, InnetPrioritizedVectorReplayBuffer])
def test_frequencies_are_those_of_the_priorities(kind: Any) -> None:
    buffer = filled(kind)
    count = len(buffer)
    priorities = np.linspace(0.1, 4.0, count)
    places = buffer.sample_indices(0)
    buffer.update_weight(places, priorities)
    drawn = np.concatenate([buffer.sample_indices(32) for _ in range(1000)])
    expected = priorities**0.7 / (priorities**0.7).sum() * len(drawn)
    assert stats.chisquare([(drawn == place).sum() for place in places], expected).pvalue > 1e-8


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (InnetPrioritizedReplayBuffer, PrioritizedReplayBuffer),
        (InnetPrioritizedVectorReplayBuffer, PrioritizedVectorReplayBuffer),
    ],
)
def test_weights_equal_those_of_tianshou_after_the_same_calls(ours: Any, theirs: Any) -> None:
    random = np.random.default_rng(3)
    buffers = [filled(kind, 8) for kind in (ours, theirs)]
    for step in range(8, 50):
        places = random.permutation(buffers[1].sample_indices(0))[:5]
        found = random.random(5) * 3
        for buffer in buffers:
            # Numbers of either sign, and tensors, are taken.
            buffer.update_weight(places, torch.from_numpy(found) if step % 2 else -found)
            add(buffer, step)
        everything = [buffer[:] for buffer in buffers]
        np.testing.assert_allclose(everything[0].weight, everything[1].weight, rtol=1e-4)
        np.testing.assert_array_equal(everything[0].obs, everything[1].obs)
        assert buffers[0].weight.reduce() == pytest.approx(buffers[1].weight.reduce(), rel=1e-4)
        batch, index = buffers[0].sample(16)
        weight = buffers[1].get_weight(index)
        np.testing.assert_allclose(batch.weight, weight / weight.max(), rtol=1e-4)


def test_a_saved_buffer_continues(tmp_path: Path) -> None:
    buffer = filled()
    buffer.update_weight(np.arange(60), np.arange(1.0, 61.0))
    buffer.save_hdf5(str(tmp_path / "buffer.hdf5"))
    for other in (
        pickle.loads(pickle.dumps(buffer)),
        InnetPrioritizedVectorReplayBuffer.load_hdf5(str(tmp_path / "buffer.hdf5")),
    ):
        np.testing.assert_array_equal(other[:].weight, buffer[:].weight)
        assert len(set(other.sample(600)[1])) > 40
        # Copies share nothing.
        other.update_weight(np.array([0]), np.array([1e4]))
        assert buffer.weight[0] < 100


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (InnetPrioritizedReplayBuffer, PrioritizedReplayBuffer),
        (InnetPrioritizedVectorReplayBuffer, PrioritizedVectorReplayBuffer),
    ],
)
def test_a_file_of_tianshou_s_buffer_is_loaded(ours: Any, theirs: Any, tmp_path: Path) -> None:
    buffer = filled(theirs)
    places = buffer.sample_indices(0)
    buffer.update_weight(places, np.arange(1.0, 1.0 + len(places)))
    buffer.save_hdf5(str(tmp_path / "buffer.hdf5"))
    loaded = ours.load_hdf5(str(tmp_path / "buffer.hdf5"))
    np.testing.assert_allclose(loaded[:].weight, buffer[:].weight, rtol=1e-5)
    assert set(loaded.sample(600)[1]) <= set(places)


def test_weights_fit_the_probabilities_of_the_smallest_priorities() -> None:
    buffer = InnetPrioritizedReplayBuffer(10, alpha=1.0, beta=1.0)
    for step in range(10):
        add(buffer, step)
    buffer.update_weight(np.arange(10), np.linspace(0.0, 2.7e-6, 10))
    batch, index = buffer.sample(20_000)
    share = np.bincount(index, minlength=10) / len(index)
    weight = np.ones(10)
    weight[index] = batch.weight
    np.testing.assert_allclose(weight * share / (weight * share).max(), 1.0, rtol=0.1)


def test_an_emptied_buffer_has_no_old_priorities() -> None:
    buffer = filled()
    buffer.update_weight(np.arange(60), np.full(60, 1e4))
    buffer.reset()
    assert len(buffer) == 0
    for step in range(2):
        add(buffer, step)
    assert set(buffer.sample(200)[1]) == set(buffer.sample_indices(0))


def test_a_priority_that_is_no_number_changes_nothing() -> None:
    buffer = filled()
    with pytest.raises(errors.PriorityError, match="priority 1 of 2 is nan"):
        buffer.update_weight(np.array([3, 4]), np.array([1.0, float("nan")]))
    assert len(set(buffer.sample(600)[1])) == 60


def test_dqn_trains_with_it() -> None:
    environments = DummyVectorEnv([lambda: gym.make("CartPole-v1") for _ in range(4)])
    environments.seed(0)
    torch.manual_seed(0)
    space = gym.make("CartPole-v1")
    policy = DiscreteQLearningPolicy(
        model=Net(state_shape=(4,), action_shape=2, hidden_sizes=[64]),
        action_space=space.action_space,
        observation_space=space.observation_space,
        eps_training=0.2,
    )
    algorithm = DQN(
        policy=policy, optim=AdamOptimizerFactory(lr=1e-3), gamma=0.9, n_step_return_horizon=3, target_update_freq=50
    )
    buffer = InnetPrioritizedVectorReplayBuffer(4_000, buffer_num=4, alpha=0.6, beta=0.4)
    collector: Any = Collector(algorithm, environments, buffer, exploration_noise=True)
    collector.reset()
    algorithm.run_training(
        OffPolicyTrainerParams(
            training_collector=collector,
            max_epochs=1,
            epoch_num_steps=600,
            collection_step_num_env_steps=40,
            batch_size=32,
            update_step_num_gradient_steps_per_sample=0.25,
            test_step_num_episodes=0,
            test_in_training=False,
        )
    )
    priorities = buffer.weight[buffer.sample_indices(0)]
    assert len(np.unique(priorities)) > 100
