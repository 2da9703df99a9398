"""Prioritized double DQN learns CartPole in one process: a network, a loss and a loop around a replay memory.

python examples/dqn_cartpole.py                  # until 20 greedy games reach 475 on average, about a minute
python examples/dqn_cartpole.py --uniform        # all transitions with equal probability, to compare
"""

import argparse
import copy
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import innet_drl as innet

GAME, TABLE, GOAL = "CartPole-v1", "dqn", 475.0
NUM_ENVS, BATCH_SIZE, MIN_SIZE = 8, 128, 1_000
VIEW = innet.NStep(n=3, gamma=0.99)


def make_table(uniform: bool = False) -> innet.Table:
    """The definition of the memory: columns from the game's spaces, one row a step."""
    with gymnasium.make(GAME) as env:
        spaces = env.observation_space, env.action_space
    sampler = "uniform" if uniform else "prioritized"
    return innet.Table.from_spaces(TABLE, *spaces, 50_000, sampler=sampler, min_size=MIN_SIZE)


def make_network() -> nn.Module:
    """Q-values of both actions."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def act(network: nn.Module, observation: NDArray[Any], epsilon: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """One action for each observation: a random one with probability epsilon, otherwise the best one."""
    with torch.no_grad():
        best = network(torch.as_tensor(observation)).argmax(1).numpy()
    return np.where(rng.random(len(best)) < epsilon, rng.integers(2, size=len(best)), best)


def evaluate(network: nn.Module, games: int = 20) -> float:
    """Mean score of greedy games, each in an environment of its own."""
    envs = gymnasium.make_vec(GAME, games, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=1)
    scores, playing, rng = np.zeros(games), np.ones(games, bool), np.random.default_rng()
    while playing.any():
        observation, reward, terminated, truncated, _ = envs.step(act(network, observation, 0.0, rng))
        scores += reward * playing
        playing &= ~(terminated | truncated)
    return float(scores.mean())


class Learner:
    """A network, its target network, and an update that returns the new priorities."""

    def __init__(self) -> None:
        self.network = make_network()
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)

    def update(self, batch: Any) -> NDArray[np.float32]:
        """Makes one update of double Q-learning from a batch of tensors; returns the absolute TD errors."""
        with torch.no_grad():
            # Double Q-learning: the network chooses the action, its older copy rates the action.
            best = self.network(batch.next_observation).argmax(1, keepdim=True)
            # The discount is gamma^3, less where the episode ended earlier, and 0 where the pole fell.
            goal = batch.reward + batch.discount * self.target(batch.next_observation).gather(1, best).squeeze(1)
        error = goal - self.network(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        # The weights correct for the items that prioritized sampling prefers.
        loss = (batch.weights * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        for old, new in zip(self.target.parameters(), self.network.parameters(), strict=True):
            old.data.lerp_(new.data, 0.01)
        priorities: NDArray[np.float32] = error.detach().abs().numpy()
        return priorities


def main() -> None:
    """Plays, learns and evaluates until the goal or the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uniform", action="store_true", help="sample uniformly instead of by priority")
    parser.add_argument("--steps", type=int, default=200_000, help="steps of all environments at most")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    torch.set_num_threads(1)  # more threads than one cost time with a network this small
    rng, learner, start = np.random.default_rng(flags.seed), Learner(), time.monotonic()
    replay = innet.Memory(make_table(flags.uniform), seed=flags.seed)
    envs = gymnasium.make_vec(GAME, NUM_ENVS, vectorization_mode="vector_entry_point")
    # Without prefetch a batch is sampled when it is asked for, so that runs with a seed repeat.
    batches = replay.batches(TABLE, BATCH_SIZE, VIEW, prefetch=0, device="cpu")
    with replay, innet.Recorder(envs, replay.writer(TABLE, NUM_ENVS, VIEW, chunk_steps=10)) as recorder, batches:
        observation, _ = recorder.reset(seed=flags.seed)
        for step in range(NUM_ENVS, flags.steps + 1, NUM_ENVS):
            epsilon = max(0.05, 1.0 - step / 10_000)
            observation, *_ = recorder.step(act(learner.network, observation, epsilon, rng))
            if step >= 2 * MIN_SIZE:
                for _ in range(2):
                    batch = next(batches)
                    replay.update_priorities(TABLE, batch.ids, learner.update(batch))
            if step % 4_000 == 0:
                score = evaluate(learner.network)
                print(f"step {step:6}: mean score of 20 greedy games {score:.1f}, {time.monotonic() - start:.0f} s")
                if score >= GOAL:
                    break


if __name__ == "__main__":
    main()
