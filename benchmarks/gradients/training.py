"""Training with each system: A2C (Mnih et al., 2016) on CartPole with `DistributedDataParallel`.

The network has the size of the paper's for A2C: a gradient of 3.3 MB, which a communication hook sums.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

HIDDEN = 640
ENVIRONMENTS = 8
STEPS = 16
DISCOUNT = 0.99
SCORE_GAMES = 20
"""Number of last games whose mean is the score."""
CHECK_PERIOD = 10
"""Updates between checks of the common score."""


@dataclass(frozen=True)
class TrainingResult:
    """Result of a training, by one worker."""

    updates: int
    seconds: float
    communication: float
    """Share of the time for sums, including waiting for other workers."""
    score: float
    """Mean score of all workers at the end."""
    bytes: int


class ActorCritic(nn.Module):
    """Policy and value of an observation."""

    def __init__(self, inputs: int, actions: int) -> None:
        super().__init__()
        # Policy and value share no weights: gradients of values near 100 would dominate.
        self.policy, self.value = _perceptron(inputs, actions), _perceptron(inputs, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Computes logits [B, actions] and values [B] of observations [B, inputs]."""
        return self.policy(observation), self.value(observation).squeeze(-1)


def _perceptron(inputs: int, outputs: int) -> nn.Module:
    hidden = (nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
    return nn.Sequential(*hidden, nn.Linear(HIDDEN, outputs))


class _HookState:
    """State of the hook: sums buckets and measures the time."""

    def __init__(self, sum_once: Callable[[NDArray[np.float32]], Any], workers: int) -> None:
        self.sum_once, self.workers, self.seconds = sum_once, workers, 0.0


def _hook(state: _HookState, bucket: GradBucket) -> Future[Tensor]:
    buffer = bucket.buffer()
    began = time.perf_counter()
    state.sum_once(buffer.numpy())
    state.seconds += time.perf_counter() - began
    future: Future[Tensor] = Future()
    future.set_result(buffer.div_(state.workers))
    return future


def train(
    sum_once: Callable[[NDArray[np.float32]], Any], rank: int, workers: int, *, goal: float, seconds: float
) -> TrainingResult:
    """Trains until the mean score of all workers reaches the goal, or until the time limit."""
    torch.manual_seed(rank)
    envs = gymnasium.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="vector_entry_point")
    torch.manual_seed(0)
    model = DistributedDataParallel(ActorCritic(4, 2))
    torch.manual_seed(rank)
    state = _HookState(sum_once, workers)
    model.register_comm_hook(state, _hook)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    rollout = _Rollout(envs, seed=1000 * rank)
    dist.barrier()
    began, updates, score = time.perf_counter(), 0, 0.0
    while True:
        optimizer.zero_grad()
        _loss(model, rollout).backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        updates += 1
        if updates % CHECK_PERIOD == 0:
            # The first worker's clock decides for all workers.
            status = torch.tensor([rollout.score, float(rank == 0 and time.perf_counter() - began > seconds)])
            dist.all_reduce(status)
            score = float(status[0]) / workers
            if score >= goal or status[1] > 0:
                break
    took = time.perf_counter() - began
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    return TrainingResult(updates, took, state.seconds / took, score, size)


class _Rollout:
    """Steps of the environments, and the scores of their games."""

    def __init__(self, envs: Any, seed: int) -> None:
        self._arena = envs
        self.observation, _ = envs.reset(seed=seed)
        self._returns = np.zeros(ENVIRONMENTS)
        self._resets = np.zeros(ENVIRONMENTS, np.bool_)
        self._last: deque[float] = deque(maxlen=SCORE_GAMES)

    @property
    def score(self) -> float:
        return sum(self._last) / SCORE_GAMES

    def step(self, action: NDArray[np.int64]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns rewards, whether games continue, and whether steps are valid: resets are not."""
        valid = torch.from_numpy(~self._resets)
        self.observation, reward, terminated, truncated, _ = self._arena.step(action)
        self._resets = terminated | truncated
        self._returns += reward
        self._last.extend(self._returns[self._resets].tolist())
        self._returns[self._resets] = 0.0
        return torch.from_numpy(reward.astype(np.float32)), torch.from_numpy(~self._resets).float(), valid


def _loss(model: DistributedDataParallel, rollout: _Rollout) -> Tensor:
    observations, actions, rewards, continued, valid = [], [], [], [], []
    for _ in range(STEPS):
        observation = torch.from_numpy(rollout.observation)
        with torch.no_grad():
            logits, _ = model.module(observation)
        action = torch.distributions.Categorical(logits=logits).sample()  # type: ignore[no-untyped-call]
        reward, continues, is_step = rollout.step(action.numpy())
        observations.append(observation)
        actions.append(action)
        rewards.append(reward)
        continued.append(continues)
        valid.append(is_step)
    with torch.no_grad():
        _, following = model.module(torch.from_numpy(rollout.observation))
    returns = []
    for reward, continues in zip(reversed(rewards), reversed(continued), strict=True):
        following = reward + DISCOUNT * continues * following
        returns.append(following)
    mask = torch.cat(valid)
    logits, values = model(torch.cat(observations)[mask])
    target = torch.cat(returns[::-1])[mask]
    policy = torch.distributions.Categorical(logits=logits)
    advantage = target - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    chosen = policy.log_prob(torch.cat(actions)[mask])  # type: ignore[no-untyped-call]
    entropy = policy.entropy().mean()  # type: ignore[no-untyped-call]
    loss: Tensor = 0.5 * functional.huber_loss(values, target) - (chosen * advantage).mean() - 0.01 * entropy
    return loss
