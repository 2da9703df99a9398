"""Evaluation: unclipped scores of games that the greedy agent plays in separate environments."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from innet_drl.train import environments
from innet_drl.train.observe.display import Progress, score, silent
from innet_drl.train.observe.metrics import score_of
from innet_drl.train.play.exploration import choose
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores

if TYPE_CHECKING:
    # This module must not import torch at run time: callbacks and checks of arguments use it before that import.
    from torch import nn

PARALLEL_GAMES = 10
"""Games played in parallel; fewer leave cores idle, more wait longer for the last game."""
SEED_OFFSET = 1_000_003
"""Difference between the seeds of training and evaluation."""
SEEDS = 100_000_000
"""Number of different seeds of evaluations: the seeds of their environments fit Atari's 31 bits."""
STICKY_ACTIONS = 0.25
"""Sticky actions of the second evaluation after training, which reveals scores that depend on deterministic games
(Machado et al., 2018, section 5)."""


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
    """Number of games that were truncated, by the environment or at `evaluation_frames`."""
    no_ops: int
    """Largest number of no-ops at the start of a game, of which each game has a random number; 0 outside
    `atari/<game>`."""
    sticky_actions: float | None = None
    """Probability that the emulator repeats the last action; `None` outside `atari/<game>`."""
    full_action_set: bool | None = None
    """Whether the agent had all 18 actions, or the game's minimal set; `None` outside `atari/<game>`."""

    @property
    def mean(self) -> float:
        """Mean score."""
        return statistics.fmean(self.scores)

    @property
    def standard_error(self) -> float | None:
        """Standard error of the mean; `None` of one game."""
        return statistics.stdev(self.scores) / math.sqrt(len(self.scores)) if len(self.scores) > 1 else None

    def __str__(self) -> str:
        error, spread = self.standard_error, statistics.stdev(self.scores) if len(self.scores) > 1 else 0.0
        limit = "a time limit" if self.episode_frames is None else f"{self.episode_frames} frames"
        cut = f", {self.cut_off} ended by {limit}" if self.cut_off else ""
        if spread == 0 and 1 < len(self.scores) > self.cut_off:
            cut += "; all scores are equal: the games may be one game, repeated"
        starts = f", up to {self.no_ops} no-ops at the start" if self.no_ops else ""
        starts += f", sticky actions {self.sticky_actions}" if self.sticky_actions else ""
        starts += ", full action set" if self.full_action_set else ""
        return (
            f"mean score {score(self.mean)} (standard error {score(error)}, deviation {score(spread)}) over "
            f"{len(self.scores)} games, epsilon {self.epsilon}{starts}{cut}"
        )


def joined(evaluations: Sequence[Evaluation]) -> Evaluation:
    """Merges evaluations under equal conditions."""
    return dataclasses.replace(
        evaluations[0],
        scores=[score for evaluation in evaluations for score in evaluation.scores],
        cut_off=sum(evaluation.cut_off for evaluation in evaluations),
    )


class Evaluator(Protocol):
    """Plays evaluations in parallel with training, one at a time."""

    @property
    def idle(self) -> bool:
        """Whether `begin` may be called."""

    def begin(self, parameters: dict[str, NDArray[Any]]) -> None:
        """Begins an evaluation of a network's arrays, which must not change meanwhile."""

    def result(self) -> Evaluation | None:
        """Returns the evaluation that has ended since the last call, without waiting."""


def evaluate(
    config: Config,
    network: nn.Module,
    *,
    seed: int = 0,
    threads: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    progress: Progress = silent,
) -> Evaluation | None:
    """Plays `config.evaluation_games` games.

    Each environment plays the same number of games, so that short games do not count more than long ones.
    Atari games start with up to `config.no_ops` no-ops. Games end at `config.evaluation_frames`. The network is in
    evaluation mode afterwards.
    """
    config = config.evaluated
    games = config.evaluation_games
    count = min(games, PARALLEL_GAMES)
    envs = environments.make(config, count, episode_frames=config.evaluation_frames, threads=threads or cores())
    try:
        return _play(config, network.eval(), envs, seed, stopped, progress)
    finally:
        envs.close()


def _play(
    config: Config,
    network: nn.Module,
    envs: environments.Environments,
    seed: int,
    stopped: Callable[[], bool],
    progress: Progress,
) -> Evaluation | None:
    from innet_drl.train.networks import q_values

    games, count = config.evaluation_games, envs.count
    quota = -(-games // count)
    random = np.random.default_rng([seed, SEED_OFFSET])
    # Environment i has the seed of the vector environment plus i. Different evaluations share no seeds.
    observation = envs.reset(SEED_OFFSET + seed % SEEDS * PARALLEL_GAMES)
    epsilon = np.full(count, config.evaluation_epsilon)
    running = np.zeros(count)
    scores: list[list[float]] = [[] for _ in range(count)]
    cut_off = steps = 0
    # Atari games end at their limit; in other environments a greedy agent may play forever.
    longest = math.inf if config.is_atari else max(1, config.evaluation_frames // envs.spec.frames_per_step)
    lengths = np.zeros(count)
    while any(len(of_one) < quota for of_one in scores):
        if stopped():
            return None
        if all(len(of_one) >= quota or length >= longest for of_one, length in zip(scores, lengths, strict=True)):
            # Environments are only reset together, once all with remaining games have reached the limit.
            observation = envs.reset(int(random.integers(2**30)))
            running[:] = lengths[:] = 0.0
        step = envs.step(choose(q_values(network, observation), epsilon, random))
        observation = step.observation
        running += step.reward
        steps += 1
        lengths += 1
        ended = step.terminated | step.truncated
        for environment in np.flatnonzero(ended | (lengths == longest)):
            # A game beyond the limit has its score already.
            if len(scores[environment]) < quota and lengths[environment] <= longest:
                scores[environment].append(score_of(running[environment]))
                cut_off += int(not step.terminated[environment])
            running[environment] = 0.0
        # In NEXT_STEP the step after an end is a reset, which does not count.
        lengths[ended] = 0 if envs.resets_at_once else -1
        progress("evaluation", f"{sum(map(len, scores)):,} of {quota * count:,} games, step {steps:,}")
    # In the order of play, so that dropped surplus games favour no environment.
    in_order = [of_one[turn] for turn in range(quota) for of_one in scores]
    if not config.is_atari:
        return Evaluation(in_order[:games], config.evaluation_epsilon, None, cut_off, 0)
    return Evaluation(
        in_order[:games],
        config.evaluation_epsilon,
        config.evaluation_frames,
        cut_off,
        config.no_ops,
        config.sticky_actions,
        config.full_action_set,
    )
