"""Q-values of the actors' actions against the returns that followed, in both ways of resetting environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from innet_drl.train.play.prediction import Predicting

GAMMA = 0.9
ENVIRONMENTS = 6
ACTIONS = 3


@dataclass
class Episode:
    """The steps of an episode, whose returns are added up one by one."""

    q: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def ended(self, bootstrap: float = 0.0) -> tuple[int, float, float]:
        total, value = 0.0, bootstrap
        for reward in reversed(self.rewards):
            value = reward + GAMMA * value
            total += value
        return len(self.q), sum(self.q), total


def rows(random: np.random.Generator, *, at_once: bool) -> tuple[list[dict[str, Any]], list[tuple[int, float, float]]]:
    """Rows of environments as an actor writes them, and the sums of the last half's episodes that have ended."""
    episodes = [Episode() for _ in range(ENVIRONMENTS)]
    made: list[dict[str, Any]] = []
    ended: list[tuple[int, float, float]] = []
    final = np.zeros(ENVIRONMENTS, np.bool_)
    cut = np.zeros(ENVIRONMENTS, np.bool_)
    for _ in range(200):
        q = random.normal(size=(ENVIRONMENTS, ACTIONS)).astype(np.float32)
        final_q = random.normal(size=(ENVIRONMENTS, ACTIONS)).astype(np.float32)
        action = random.integers(0, ACTIONS, ENVIRONMENTS)
        reward = np.where(final, 0.0, random.normal(size=ENVIRONMENTS)).astype(np.float32)
        life_lost = (random.random(ENVIRONMENTS) < 0.05) & ~final
        over = (random.random(ENVIRONMENTS) < 0.05) & ~final
        terminated = life_lost | (over & (random.random(ENVIRONMENTS) < 0.5))
        truncated = over & ~terminated
        made.append(
            {
                "q": q,
                "action": action,
                "reward": reward,
                "terminated": terminated,
                "truncated": truncated,
                "final": np.zeros_like(final) if at_once else final,
                "final_q": final_q if at_once else None,
            }
        )
        for number, episode in enumerate(episodes):
            counts = number >= ENVIRONMENTS // 2
            if final[number]:
                if cut[number] and counts:
                    ended.append(episode.ended(float(q[number].max())))
                episodes[number] = Episode()
                continue
            episode.q.append(float(q[number, action[number]]))
            episode.rewards.append(float(reward[number]))
            if terminated[number] or (at_once and truncated[number]):
                if counts:
                    ended.append(episode.ended(0.0 if terminated[number] else float(final_q[number].max())))
                episodes[number] = Episode()
        # The row of a last observation follows the end of a game, not the loss of a life.
        final, cut = (np.zeros_like(final), cut) if at_once else (over, truncated)
    return made, ended


def half() -> NDArray[np.bool_]:
    return np.arange(ENVIRONMENTS) >= ENVIRONMENTS // 2


@pytest.mark.parametrize("at_once", [False, True])
def test_sums_are_those_of_returns_counted_backwards(at_once: bool) -> None:
    given, ended = rows(np.random.default_rng(3), at_once=at_once)
    predicting, taken = Predicting(half(), GAMMA), []
    for number, row in enumerate(given):
        predicting.add(**row)
        if number % 30 == 0:
            taken.append(predicting.take())
    taken.append(predicting.take())
    assert len(ended) > 20
    steps, q, discounted = np.array(ended).sum(0)
    found = [means for means in taken if means]
    assert sum(means["q_predicted"][1] for means in found) == steps
    for name, total in (("q_predicted", q), ("return_discounted", discounted)):
        assert sum(mean * count for mean, count in (means[name] for means in found)) == pytest.approx(total, rel=1e-5)
    assert predicting.take() == {}
