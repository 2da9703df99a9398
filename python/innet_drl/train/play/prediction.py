"""Predicted Q-values of an actor's actions against their discounted returns, to reveal overestimation."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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
        self._ended = np.zeros(3)
        """Steps of ended episodes, and the sums of their Q-values and returns."""

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

    def take(self) -> dict[str, tuple[float, int]]:
        """Returns mean and count of both metrics, over the steps of episodes that have ended since the last call."""
        (steps, q, discounted), self._ended = self._ended.tolist(), np.zeros(3)
        if not steps:
            return {}
        return {"q_predicted": (q / steps, int(steps)), "return_discounted": (discounted / steps, int(steps))}

    def _end(self, ended: NDArray[np.bool_], bootstrap: NDArray[np.float32] | None = None) -> None:
        if not ended.any():
            return
        if bootstrap is not None:
            self._discounted += np.where(ended, self._gamma * self._weight * bootstrap.max(1), 0.0)
        counted = ended & self._counted
        self._ended += [of[counted].sum() for of in (self._steps, self._q, self._discounted)]
        for array in (self._weight, self._q, self._discounted, self._steps, self._truncated):
            array[ended] = 0
