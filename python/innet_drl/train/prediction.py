"""Predicted Q-values of an actor's actions against their discounted returns, to reveal overestimation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Predictions:
    """Sums over the steps of ended episodes, as the learner sees them."""

    steps: int = 0
    q: float = 0.0
    """Q-values of the actions taken."""
    discounted: float = 0.0
    """Discounted returns from these steps on."""

    def __add__(self, other: Predictions) -> Predictions:
        return Predictions(self.steps + other.steps, self.q + other.q, self.discounted + other.discounted)


NONE = Predictions()
"""Sums of zero steps."""


class Predicting:
    """Sums predictions and returns of each environment until its episode ends.

    With w(t) = 1 + gamma w(t - 1), the sum of the discounted returns of all steps of an episode is the sum of
    w(t) r(t), so that no steps are stored. A truncated episode bootstraps from the largest Q-value of its last
    observation.

    Args:
        counted: Environments whose episodes count, [N].
        gamma: Discount of one step.
    """

    def __init__(self, counted: NDArray[np.bool_], gamma: float) -> None:
        self._counted = counted
        self._gamma = gamma
        self._weight, self._q, self._discounted = np.zeros((3, len(counted)))
        self._steps = np.zeros(len(counted), np.int64)
        self._truncated = np.zeros(len(counted), np.bool_)
        self._ended = NONE

    def add(
        self,
        q: NDArray[np.float32],
        action: NDArray[np.int64],
        reward: NDArray[Any],
        *,
        terminated: NDArray[np.bool_],
        truncated: NDArray[np.bool_],
        final: NDArray[np.bool_],
        final_q: NDArray[np.float32] | None = None,
    ) -> None:
        """Adds a row with the arguments of `RowWriter.append`.

        Args:
            q: Q-values [N, actions] of the observations.
            action: Actions taken, [N].
            reward: Rewards as the learner sees them, [N].
            terminated: [N]
            truncated: [N], and not terminated.
            final: [N], rows with only a last observation, which are not steps.
            final_q: Q-values [N, actions] of last observations, if rows also have the step (SAME_STEP).
        """
        self._end(final & self._truncated, q)
        steps = ~final
        self._weight = np.where(steps, 1.0 + self._gamma * self._weight, 0.0)
        self._q += np.where(steps, q[np.arange(len(q)), action], 0.0)
        self._discounted += self._weight * reward
        self._steps += steps
        self._end(terminated)
        if final_q is None:
            self._truncated[:] = truncated
        else:
            self._end(truncated, final_q)

    def take(self) -> Predictions:
        """Returns the sums of the episodes that have ended since the last call."""
        ended, self._ended = self._ended, NONE
        return ended

    def _end(self, ended: NDArray[np.bool_], bootstrap: NDArray[np.float32] | None = None) -> None:
        if not ended.any():
            return
        if bootstrap is not None:
            self._discounted += np.where(ended, self._gamma * self._weight * bootstrap.max(1), 0.0)
        counted = ended & self._counted
        self._ended += Predictions(
            int(self._steps[counted].sum()), float(self._q[counted].sum()), float(self._discounted[counted].sum())
        )
        for array in (self._weight, self._q, self._discounted, self._steps, self._truncated):
            array[ended] = 0
