"""Evaluation: unclipped scores of games that the greedy agent plays in separate environments."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import nn

from innet_drl.train import environments
from innet_drl.train.config import Config
from innet_drl.train.exploration import choose
from innet_drl.train.machine import cores
from innet_drl.train.networks import q_values

PARALLEL_GAMES = 10
"""Games played at a time; fewer leave cores idle, more wait longer for the last game."""
SEED_OFFSET = 1_000_003
"""Difference between the seeds of training and evaluation."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of finished games, and the conditions of play."""

    scores: list[float]
    """Unclipped scores of whole games; the loss of a life does not end a game."""
    epsilon: float
    """Probability of random actions."""
    episode_frames: int | None
    """Emulator frames after which a game is truncated; `None` if the environment has a limit of its own."""
    cut_off: int
    """Number of truncated games."""
    no_ops: int
    """Largest number of no-ops at the start of a game, drawn at random for each; 0 outside Atari."""

    @property
    def mean(self) -> float:
        """Mean score."""
        return statistics.fmean(self.scores)

    def __str__(self) -> str:
        spread = statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0
        limit = "their time limit" if self.episode_frames is None else f"{self.episode_frames} frames"
        cut = f", {self.cut_off} ended by {limit}" if self.cut_off else ""
        if spread == 0 and 1 < len(self.scores) > self.cut_off:
            cut += "; all scores are equal: the games may be one game, repeated"
        starts = f", up to {self.no_ops} no-ops at the start" if self.no_ops else ""
        return (
            f"mean score {self.mean:.1f} (standard deviation {spread:.1f}) over {len(self.scores)} games, "
            f"epsilon {self.epsilon}{starts}{cut}"
        )


class Evaluator(Protocol):
    """Plays evaluations beside training, one at a time."""

    @property
    def idle(self) -> bool:
        """Whether `begin` may be called."""

    def begin(self, parameters: dict[str, NDArray[Any]]) -> None:
        """Begins an evaluation of a network's arrays, which nothing may change meanwhile."""

    def result(self) -> Evaluation | None:
        """Returns the evaluation that has ended since the last call, without waiting."""


def evaluate(
    config: Config,
    network: nn.Module,
    *,
    seed: int = 0,
    threads: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Plays `config.evaluation_games` games.

    Each environment plays the same number of games, so that short games do not count more than long ones.
    Atari games start with up to 30 no-ops (Mnih et al., 2015) and end at `config.evaluation_frames`.

    Args:
        config: The run's settings.
        network: The agent, on any device.
        seed: Seeds the games.
        threads: Threads that step Atari environments; all cores by default.
        stopped: Called at every step; `True` ends the evaluation without a result.
    """
    games = config.evaluation_games
    count = min(games, PARALLEL_GAMES)
    envs = environments.make(config, count, episode_frames=config.evaluation_frames, threads=threads or cores())
    was_training = network.training
    network.eval()
    try:
        return _play(config, network, envs, seed, stopped)
    finally:
        network.train(was_training)
        envs.close()


def _play(
    config: Config, network: nn.Module, envs: environments.Environments, seed: int, stopped: Callable[[], bool]
) -> Evaluation | None:
    games, count = config.evaluation_games, envs.count
    quota = -(-games // count)
    random = np.random.default_rng([seed, SEED_OFFSET])
    observation = envs.reset(seed + SEED_OFFSET)
    epsilon = np.full(count, config.evaluation_epsilon)
    running = np.zeros(count)
    scores: list[list[float]] = [[] for _ in range(count)]
    cut_off = 0
    while any(len(of_one) < quota for of_one in scores):
        if stopped():
            return None
        step = envs.step(choose(q_values(network, observation), epsilon, random))
        observation = step.observation
        running += step.reward
        for environment in np.flatnonzero(step.terminated | step.truncated):
            if len(scores[environment]) < quota:
                scores[environment].append(float(running[environment]))
                cut_off += int(step.truncated[environment] and not step.terminated[environment])
            running[environment] = 0.0
    # In the order of play, so that dropping surplus games favours no environment.
    in_order = [of_one[turn] for turn in range(quota) for of_one in scores]
    limit, no_ops = (config.evaluation_frames, environments.ATARI_NO_OPS) if config.is_atari else (None, 0)
    return Evaluation(in_order[:games], config.evaluation_epsilon, limit, cut_off, no_ops)
