"""Exploration: the epsilon ladder of Ape-X over all environments of all actors."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from innet_drl.train.settings.config import Config


def epsilon_ladder(environments: int, base: float = 0.4, exponent: float = 7.0) -> NDArray[np.float64]:
    """Returns the epsilon of each of N environments: base^(1 + exponent i / (N - 1)) (Horgan et al., 2018, section 4).

    Environment 0 explores most. A single environment has the middle of the ladder.

    Args:
        environments: N, over all actors of all machines.
        base: Epsilon of environment 0.
        exponent: Exponent of the last environment, less 1.
    """
    positions = np.linspace(0.0, 1.0, environments) if environments > 1 else np.array([0.5])
    return np.asarray(base ** (1.0 + exponent * positions))


def annealed(epsilon: NDArray[np.float64], step: int, anneal_steps: int) -> NDArray[np.float64]:
    """Interpolates epsilon from 1 at step 0 to its final value at `anneal_steps` agent steps of all actors."""
    if step >= anneal_steps:
        return epsilon
    return 1.0 + (epsilon - 1.0) * (step / anneal_steps)


def choose(q: NDArray[np.float32], epsilon: NDArray[np.float64], random: np.random.Generator) -> NDArray[np.int64]:
    """Returns epsilon-greedy actions int64 [N] for Q-values [N, actions]."""
    count, actions = q.shape
    explores = random.random(count) < epsilon
    return np.where(explores, random.integers(0, actions, count), q.argmax(1)).astype(np.int64)


def unfinished_schedules(config: Config) -> Iterator[str]:
    """Yields a warning for each schedule that is longer than the run's steps."""
    steps, over = config.steps, config.epsilon_anneal_steps
    if steps is None:
        return
    if steps < over:
        ladder = epsilon_ladder(config.all_environments, config.epsilon_base, config.epsilon_exponent)
        yield (
            f"epsilon falls over {over:,} steps, and the run ends at {steps:,}: actors then take "
            f"{annealed(ladder, steps, over).mean():.0%} random actions, and not {ladder.mean():.0%}; lower "
            "epsilon_anneal_steps"
        )
    samples = config.samples_per_insert * max(0, steps - config.min_size)
    updates = samples / (config.learners * (config.batch_size - config.demonstrations))
    if updates < config.learning_rate_anneal_updates:
        yield (
            f"the learning rate changes over {config.learning_rate_anneal_updates:,} updates, and a run of {steps:,} "
            f"steps has some {updates:,.0f}: lower learning_rate_anneal_updates"
        )
