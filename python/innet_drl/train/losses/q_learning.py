"""The contract of losses, and double Q-learning with its Munchausen form.

The priority of a transition is |TD error| of its Q-value, r + discount * max Q(s') - Q(s, a), for every loss of this
package: with equal parameters it equals the initial priority that the writer computes from an actor's Q-values.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from innet_drl.torch_batches import TorchBatch
from innet_drl.train.settings.slices import NetworkSettings

PRIORITY_FLOOR = 1e-6
"""Added to |TD error|, so that every transition can be sampled again (Schaul et al., 2016, section 3.3)."""

Outputs = Callable[[Tensor], Tensor]
"""A network from observations [B, ...] to outputs [B, actions] or [B, actions, outputs]."""


class TransitionLoss(NamedTuple):
    """The loss of each transition of a batch."""

    loss: Tensor
    """[B], not weighted."""
    priority: Tensor
    """[B], |TD error|, without a gradient."""
    q: Tensor
    """[B, actions], Q-values of the observations, from which actors compute initial priorities."""


class Loss(abc.ABC):
    """A loss, made once for each learner and each actor.

    Args:
        config: The run's settings.
    """

    outputs: int | None = 1
    """Number of network outputs for each action: 1 is Q-values [B, actions], others [B, actions, outputs]. `None`
    accepts any number."""
    reads_policy = False
    """Whether `targets` reads `batch.observation` beside `batch.next_observation`."""
    has_targets = True
    """Whether `targets` computes anything."""

    def __init__(self, config: NetworkSettings) -> None:
        self.config = config

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Copies of a network share its loss, whose `q` they call.
        return self

    def q(self, outputs: Tensor) -> Tensor:
        """Q-values [B, actions] of a network's outputs, for the actors' actions and initial priorities."""
        return outputs

    def targets(self, batch: TorchBatch, online: Outputs, target: Outputs) -> dict[str, Tensor]:
        """Computes the tensors that need no gradient, for the batch; may run in a thread one update ahead.

        Args:
            batch: Transitions; arrays of the memory, with observations as networks read them.
            online: The network that is trained.
            target: The target network.
        """
        return {}

    @abc.abstractmethod
    def __call__(self, online: Outputs, target: Outputs, batch: TorchBatch) -> TransitionLoss:
        """Computes the loss of each transition, with the batch's targets."""


def of_actions(values: Tensor, action: Tensor) -> Tensor:
    """The values of the actions taken: [B] of [B, actions], and [B, outputs] of [B, actions, outputs]."""
    index = action.long().view(-1, *[1] * (values.dim() - 1)).expand(-1, 1, *values.shape[2:])
    return values.gather(1, index).squeeze(1)


class Munchausen:
    """The terms of Munchausen reinforcement learning (Vieillard et al., 2020), with n-step returns.

    The policy is softmax(Q_target / tau). alpha * [tau log pi(a|s)] is added to the reward of the first step only: a
    batch lacks the steps between it and s'. The bootstrap is the soft value, the mean of Q - tau log pi under pi.
    """

    def __init__(self, config: NetworkSettings) -> None:
        self._scale = config.munchausen_scale
        self._temperature = config.munchausen_temperature
        self._floor = config.munchausen_floor

    def log_policy(self, q: Tensor) -> Tensor:
        """Tau times the log-policy [B, actions]."""
        return self._temperature * functional.log_softmax(q / self._temperature, 1)

    def policy(self, q: Tensor) -> Tensor:
        """The policy's probabilities [B, actions]."""
        return functional.softmax(q / self._temperature, 1)

    def reward(self, reward: Tensor, q: Tensor, action: Tensor) -> Tensor:
        """Rewards [B] with the bounded log-policy of the actions taken."""
        return reward + self._scale * of_actions(self.log_policy(q), action).clamp(self._floor, 0.0)


class QLearning(Loss):
    """Huber's loss, with its threshold at 1, of the TD error of double Q-learning."""

    def __init__(self, config: NetworkSettings) -> None:
        super().__init__(config)
        self._munchausen = Munchausen(config) if config.munchausen else None
        self.reads_policy = config.munchausen

    def targets(self, batch: TorchBatch, online: Outputs, target: Outputs) -> dict[str, Tensor]:
        """Computes `target` [B], and if it has Munchausen terms also `td_target` [B] without them."""
        if self._munchausen is None:
            # r + discount * Q_target(s', argmax_a Q_online(s', a)) (van Hasselt et al., 2016).
            best = online(batch.next_observation).argmax(1)
            bootstrap = of_actions(target(batch.next_observation), best).float()
            return {"target": batch.reward + batch.discount * bootstrap}
        terms, q = self._munchausen, target(batch.next_observation).float()
        value = (terms.policy(q) * (q - terms.log_policy(q))).sum(1)
        reward = terms.reward(batch.reward, target(batch.observation).float(), batch.action)
        return {
            "target": reward + batch.discount * value,
            "td_target": batch.reward + batch.discount * q.max(1).values,
        }

    def __call__(self, online: Outputs, target: Outputs, batch: TorchBatch) -> TransitionLoss:
        """Computes the loss of each transition."""
        q = online(batch.observation)
        taken = of_actions(q, batch.action).float()
        loss = functional.huber_loss(taken, batch.target, reduction="none")
        with torch.no_grad():
            td_target = batch.target if self._munchausen is None else batch.td_target
            return TransitionLoss(loss, (td_target - taken).abs(), q.detach())
