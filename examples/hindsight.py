"""Hindsight (Andrychowicz et al., 2017) with Stable-Baselines3: an episode counts once more, for the goal it reached.

python examples/hindsight.py
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from stable_baselines3.common.envs import BitFlippingEnv
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor

from innet_drl.sb3 import InnetReplayBuffer, PrioritizedDQN

BITS, STEPS = 15, 12_000  # bits to flip until they are the goal's, steps of training
Observation = dict[str, NDArray[Any]]


class Hindsight(InnetReplayBuffer):
    """Adds each episode again, with the goal that it reached at its end. For one environment.

    Args:
        compute_reward: Of the environment: (achieved goal, desired goal, info) to reward.
    """

    def __init__(self, *args: Any, compute_reward: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compute_reward = compute_reward
        self.episode: list[tuple[Observation, Observation, NDArray[Any], list[dict[str, Any]]]] = []

    def add(self, obs: Any, next_obs: Any, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Adds a step; with the last one of an episode, all its steps again."""
        super().add(obs, next_obs, action, reward, done, infos)
        self.episode.append((obs, next_obs, action, infos))
        if done[0]:
            goal = {"desired_goal": next_obs["achieved_goal"]}
            for old, new, taken, told in self.episode:
                reached = self.compute_reward(new["achieved_goal"], goal["desired_goal"], told)
                # The goal ends an episode, and no time limit does, which the information would tell.
                super().add(old | goal, new | goal, taken, reached, reached == 0, [{}])
            self.episode.clear()


def successes(kind: type[InnetReplayBuffer]) -> float:
    """Share of 100 games that a DQN solves after training."""
    bits = BitFlippingEnv(BITS, continuous=False, max_steps=BITS)
    bits.seed(0)
    env = Monitor(bits)
    model = PrioritizedDQN(
        "MultiInputPolicy",
        env,
        replay_buffer_class=kind,
        replay_buffer_kwargs={"compute_reward": bits.compute_reward} if kind is Hindsight else {},
        buffer_size=100_000,
        learning_starts=1_000,
        learning_rate=1e-3,
        train_freq=1,
        gamma=0.95,
        exploration_fraction=0.5,
        target_update_interval=500,
        seed=0,
    )
    model.learn(STEPS)
    returns, _ = evaluate_policy(model, env, 100, return_episode_rewards=True)
    return float(np.mean(np.asarray(returns) > -BITS))


torch.set_num_threads(1)
for kind in (InnetReplayBuffer, Hindsight):
    print(f"{kind.__name__}: {successes(kind):.0%} of 100 games solved", flush=True)
