"""Losses: what a batch of transitions costs, and the TD errors that become its priorities.

The learner calls `double_q_target` without a gradient, `taken_q` with one, and `huber` on both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

PRIORITY_FLOOR = 1e-6
"""Added to |TD error|, so that every transition can be sampled again (Schaul et al., 2016, section 3.3)."""

QFunction = Callable[[Tensor], Tensor]
"""Q-values [B, actions] of observations [B, ...]."""


@dataclass(frozen=True)
class TransitionLoss:
    """The loss of each transition of a batch."""

    loss: Tensor
    """[B], not weighted."""
    td_error: Tensor
    """[B], |target - Q|, without a gradient."""


def double_q_target(
    reward: Tensor, discount: Tensor, next_observation: Tensor, online: QFunction, target: QFunction
) -> Tensor:
    """Returns r + discount * Q_target(s', argmax_a Q_online(s', a)) (van Hasselt et al., 2016): float32 [B]."""
    best = online(next_observation).argmax(1, keepdim=True)
    bootstrap = target(next_observation).gather(1, best).squeeze(1).float()
    return reward + discount * bootstrap


def taken_q(network: QFunction, observation: Tensor, action: Tensor) -> Tensor:
    """Returns the Q-values of the actions taken: float32 [B]."""
    return network(observation).gather(1, action.long().unsqueeze(1)).squeeze(1).float()


def huber(q: Tensor, target: Tensor) -> TransitionLoss:
    """Huber's loss with its threshold at 1."""
    loss = functional.huber_loss(q, target, reduction="none")
    with torch.no_grad():
        return TransitionLoss(loss, (target - q).abs())
