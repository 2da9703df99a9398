"""Training with each system: A2C (Mnih et al., 2016) on CartPole.

Synchronous systems sum gradients in a communication hook of `DistributedDataParallel`; an asynchronous worker is a
`Replica`.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from math import sqrt
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

from benchmarks.gradients.workers import Place, Training
from benchmarks.repeated import Figure, figure
from innet_drl.distributed import Replica
from innet_drl.errors import GradientError

ENVIRONMENTS = 8
STEPS = 16
DISCOUNT = 0.99
SCORE_GAMES = 20
"""Number of last games whose mean is the score."""
CHECK_PERIOD = 10
"""Iterations between checks of the common score."""


class ActorCritic(nn.Module):
    """Policy and value of an observation. A gradient has about `size` bytes."""

    def __init__(self, inputs: int, actions: int, size: int) -> None:
        super().__init__()
        # Both perceptrons together have 2 h^2 + linear h + actions + 1 values for h hidden units.
        linear = 2 * inputs + actions + 5
        hidden = max(1, round((sqrt(linear**2 + 2 * size) - linear) / 4))
        # Policy and value share no weights: gradients of values near 100 would dominate.
        self.policy, self.value = _perceptron(inputs, hidden, actions), _perceptron(inputs, hidden, 1)

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Computes logits [B, actions] and values [B] of observations [B, inputs]."""
        return self.policy(observation), self.value(observation).squeeze(-1)


def _perceptron(inputs: int, hidden: int, outputs: int) -> nn.Module:
    layers = (nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh())
    return nn.Sequential(*layers, nn.Linear(hidden, outputs))


class _Stopwatch:
    """Seconds of an iteration's communication."""

    seconds = 0.0

    @contextlib.contextmanager
    def timed(self, sign: int = 1) -> Iterator[None]:
        """Adds the time of the context, or subtracts it inside another one."""
        began = time.perf_counter()
        yield
        self.seconds += sign * (time.perf_counter() - began)


class _End:
    """The end of a training, which all workers decide by the same numbers."""

    def __init__(self, order: Training, rank: int, workers: int, rollout: "_Rollout") -> None:
        self._order, self._rank, self._workers, self._rollout = order, rank, workers, rollout
        self.began, self.score = time.perf_counter(), 0.0
        self.pending: Any = None
        """Collective whose numbers have not been read."""

    def reached(self, *, wait: bool) -> bool:
        """Whether the goal is reached or the time over; without `wait` also false until all workers have asked."""
        if self.pending is None:
            # The first worker's clock decides for all workers.
            over = self._rank == 0 and time.perf_counter() - self.began > self._order.seconds
            self._status = torch.tensor([self._rollout.score, float(over)])
            self.pending = dist.all_reduce(self._status, async_op=True)
        if wait:
            self.pending.wait()
        elif not self.pending.is_completed():
            return False
        self.pending = None
        self.score = float(self._status[0]) / self._workers
        return self.score >= self._order.goal or bool(self._status[1] > 0)


def train(order: Training, place: Place, sum_once: Callable[[NDArray[np.float32]], Any] | None) -> list[Figure]:
    """Trains until the mean score of all workers reaches the goal, or until the time limit.

    `sum_once` replaces values by their sum over all workers; `None` for an asynchronous worker.
    """
    torch.manual_seed(order.seed)
    model = ActorCritic(4, 2, order.bytes)
    own = 1000 * order.seed + place.rank
    torch.manual_seed(own)
    optimizer, watch = torch.optim.Adam(model.parameters(), 1e-3), _Stopwatch()
    envs = gymnasium.make_vec("CartPole-v1", ENVIRONMENTS, vectorization_mode="vector_entry_point")
    rollout = _Rollout(envs, seed=1000 * own)

    def apply() -> None:
        with watch.timed(-1):
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()

    def hook(_: None, bucket: GradBucket) -> Future[Tensor]:
        assert sum_once is not None
        with watch.timed():
            sum_once(bucket.buffer().numpy())
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer().div_(place.workers))
        return future

    with contextlib.ExitStack() as running:
        forward: Any = model
        update, replica = apply, None
        if sum_once is None:
            replica = Replica(
                model, optimizer, place.server, order.job, worker=place.rank, workers=place.workers, apply=apply
            )
            update = running.enter_context(replica).step
        else:
            forward = DistributedDataParallel(model)
            forward.register_comm_hook(None, hook)
        dist.barrier()
        end = _End(order, place.rank, place.workers, rollout)
        laps: list[tuple[float, float]] = []
        while not laps or len(laps) % CHECK_PERIOD or not end.reached(wait=replica is None):
            began, watch.seconds = time.perf_counter(), 0.0
            optimizer.zero_grad()
            _loss(forward, model, rollout).backward()  # type: ignore[no-untyped-call]
            try:
                with watch.timed():
                    update()
            except GradientError:
                # Others have ended, and the update lacks their gradients.
                if end.pending and end.reached(wait=True):
                    break
                raise
            laps.append((time.perf_counter() - began, watch.seconds))
        seconds = time.perf_counter() - end.began
        # The first iteration allocates.
        iteration, communication = (1e3 * np.mean(laps[1:], axis=0)).tolist()
        figures = [
            figure("iteration", iteration, "ms", count=len(laps)),
            figure("computing", iteration - communication, "ms"),
            figure("communication", communication, "ms"),
            figure("share", communication / iteration, "share"),
            figure("updates", (replica.index if replica else len(laps)) / seconds, "updates/s"),
        ]
        if replica:
            made = replica.contributions
            figures.append(figure("counted", made.counted / made.offered, "share"))
        if order.goal < np.inf:
            figures.append(figure("score", end.score, "score"))
            if end.score >= order.goal:
                figures.append(figure("to the goal", seconds, "s"))
        return figures


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


def _loss(forward: nn.Module, model: nn.Module, rollout: _Rollout) -> Tensor:
    steps: list[Any] = []
    for _ in range(STEPS):
        observation = torch.from_numpy(rollout.observation)
        with torch.no_grad():
            logits, _ = model(observation)
        action = torch.distributions.Categorical(logits=logits).sample()  # type: ignore[no-untyped-call]
        reward, continues, is_step = rollout.step(action.numpy())
        steps.append((observation, action, reward, continues, is_step))
    observations, actions, rewards, continued, valid = zip(*steps, strict=True)
    with torch.no_grad():
        _, following = model(torch.from_numpy(rollout.observation))
    returns = []
    for reward, continues in zip(reversed(rewards), reversed(continued), strict=True):
        following = reward + DISCOUNT * continues * following
        returns.append(following)
    mask = torch.cat(valid)
    logits, values = forward(torch.cat(observations)[mask])
    target = torch.cat(returns[::-1])[mask]
    policy = torch.distributions.Categorical(logits=logits)
    advantage = target - values.detach()
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    chosen = policy.log_prob(torch.cat(actions)[mask])  # type: ignore[no-untyped-call]
    entropy = policy.entropy().mean()  # type: ignore[no-untyped-call]
    loss: Tensor = 0.5 * functional.huber_loss(values, target) - (chosen * advantage).mean() - 0.01 * entropy
    return loss
