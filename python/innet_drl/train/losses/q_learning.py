"""Losses on Q-values: double Q-learning, and its Munchausen form."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from innet_drl.batches import TorchBatch
from innet_drl.train.losses.base import Loss, Outputs, TransitionLoss, of_actions
from innet_drl.train.settings.config import Config


def double_q_target(
    reward: Tensor, discount: Tensor, next_observation: Tensor, online: Outputs, target: Outputs
) -> Tensor:
    """Returns r + discount * Q_target(s', argmax_a Q_online(s', a)) (van Hasselt et al., 2016): float32 [B]."""
    best = online(next_observation).argmax(1, keepdim=True)
    bootstrap = target(next_observation).gather(1, best).squeeze(1).float()
    return reward + discount * bootstrap


class Munchausen:
    """The terms of Munchausen reinforcement learning (Vieillard et al., 2020), with n-step returns.

    The policy is softmax(Q_target / tau). alpha * [tau log pi(a|s)] is added to the reward of the first step only: a
    batch lacks the steps between it and s'. The bootstrap is the soft value, the mean of Q - tau log pi under pi.
    """

    def __init__(self, config: Config) -> None:
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

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._munchausen = Munchausen(config) if config.munchausen else None
        self.reads_policy = config.munchausen

    def targets(self, batch: TorchBatch, online: Outputs, target: Outputs) -> dict[str, Tensor]:
        """Computes `target` [B], and if it has Munchausen terms also `td_target` [B] without them."""
        if self._munchausen is None:
            return {"target": double_q_target(batch.reward, batch.discount, batch.next_observation, online, target)}
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
