"""Losses on distributions of returns: categorical (C51) and quantile (QR-DQN), each also in its Munchausen form."""

from __future__ import annotations

import abc

import torch
from torch import Tensor
from torch.nn import functional

from innet_drl.torch_batches import TorchBatch
from innet_drl.train.losses.q_learning import Loss, Munchausen, Outputs, TransitionLoss, of_actions
from innet_drl.train.settings.slices import NetworkSettings


class DistributionalLoss(Loss):
    """Base class: the next action is chosen as in double Q-learning, by mean returns."""

    def __init__(self, config: NetworkSettings) -> None:
        super().__init__(config)
        self._munchausen = Munchausen(config) if config.munchausen else None
        self.reads_policy = config.munchausen

    @abc.abstractmethod
    def _target(
        self, reward: Tensor, discount: Tensor, outputs: Tensor, policy: Tensor | None, bonus: Tensor | None
    ) -> Tensor:
        """The target distribution.

        Args:
            reward: [B]
            discount: [B]
            outputs: Outputs for the next observation: [B, outputs] of the chosen action, or [B, actions, outputs] with
                a policy.
            policy: Probabilities [B, actions] of the next actions.
            bonus: Added to each action's returns, [B, actions].
        """

    @abc.abstractmethod
    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        """Loss [B] of the outputs [B, outputs] of the actions taken."""

    def targets(self, batch: TorchBatch, online: Outputs, target: Outputs) -> dict[str, Tensor]:
        """Computes `target`, the distribution of returns, and `td_target` [B], for priorities."""
        outputs = target(batch.next_observation)
        q = self.q(outputs)
        if self._munchausen is None:
            best = self.q(online(batch.next_observation)).argmax(1)
            wanted = self._target(batch.reward, batch.discount, of_actions(outputs, best), None, None)
            value = of_actions(q, best)
        else:
            reward = self._munchausen.reward(batch.reward, self.q(target(batch.observation)), batch.action)
            policy, bonus = self._munchausen.policy(q), -self._munchausen.log_policy(q)
            wanted = self._target(reward, batch.discount, outputs, policy, bonus)
            value = q.max(1).values
        return {"target": wanted, "td_target": batch.reward + batch.discount * value}

    def __call__(self, online: Outputs, target: Outputs, batch: TorchBatch) -> TransitionLoss:
        """Computes the loss of each transition."""
        outputs = online(batch.observation)
        loss = self._loss(of_actions(outputs, batch.action), batch.target)
        with torch.no_grad():
            q = self.q(outputs)
            return TransitionLoss(loss, (batch.td_target - of_actions(q, batch.action)).abs(), q)


class Categorical(DistributionalLoss):
    """Cross-entropy to the projected distribution of returns on fixed atoms (C51; Bellemare et al., 2017)."""

    def __init__(self, config: NetworkSettings) -> None:
        super().__init__(config)
        self.outputs = config.atoms
        self._low, self._high = config.value_range
        self._support = torch.linspace(self._low, self._high, config.atoms)

    def _atoms(self, device: torch.device) -> Tensor:
        if self._support.device != device:
            self._support = self._support.to(device)
        return self._support

    def q(self, outputs: Tensor) -> Tensor:
        """Mean returns of the distributions whose logits the network returns."""
        return (functional.softmax(outputs.float(), 2) * self._atoms(outputs.device)).sum(2)

    def _target(
        self, reward: Tensor, discount: Tensor, outputs: Tensor, policy: Tensor | None, bonus: Tensor | None
    ) -> Tensor:
        probabilities = functional.softmax(outputs.float(), -1)
        returns = self._atoms(outputs.device).expand_as(probabilities)
        if policy is not None and bonus is not None:
            # The mixture of the actions' distributions, each shifted by its bonus.
            probabilities = (probabilities * policy.unsqueeze(2)).flatten(1)
            returns = (returns + bonus.unsqueeze(2)).flatten(1)
        return self._projected(reward.unsqueeze(1) + discount.unsqueeze(1) * returns, probabilities)

    def _projected(self, returns: Tensor, probabilities: Tensor) -> Tensor:
        """Probabilities [B, atoms] of returns [B, n], each shared between the two atoms around it."""
        last = self.config.atoms - 1
        position = (returns.clamp(self._low, self._high) - self._low) * (last / (self._high - self._low))
        below = position.floor().clamp(0, last - 1)
        share = position - below
        projected = torch.zeros(len(returns), last + 1, device=returns.device)
        projected.scatter_add_(1, below.long(), probabilities * (1 - share))
        projected.scatter_add_(1, below.long() + 1, probabilities * share)
        return projected

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        return -(target * functional.log_softmax(outputs.float(), 1)).sum(1)


class Quantile(DistributionalLoss):
    """Huber quantile regression, with Huber's threshold at 1 (QR-DQN; Dabney et al., 2018)."""

    def __init__(self, config: NetworkSettings) -> None:
        super().__init__(config)
        self.outputs = config.quantiles

    def q(self, outputs: Tensor) -> Tensor:
        """Mean returns: the means of the quantiles."""
        return outputs.float().mean(2)

    def _target(
        self, reward: Tensor, discount: Tensor, outputs: Tensor, policy: Tensor | None, bonus: Tensor | None
    ) -> Tensor:
        returns = outputs.float()
        if policy is not None and bonus is not None:
            returns = (policy.unsqueeze(2) * (returns + bonus.unsqueeze(2))).sum(1)
        return reward.unsqueeze(1) + discount.unsqueeze(1) * returns

    def _loss(self, outputs: Tensor, target: Tensor) -> Tensor:
        quantiles = outputs.float()
        count = quantiles.shape[1]
        shares = (torch.arange(count, device=quantiles.device) + 0.5) / count
        # [B, quantile of the network, quantile of the target]
        error = target.unsqueeze(1) - quantiles.unsqueeze(2)
        huber = functional.huber_loss(error, torch.zeros_like(error), reduction="none")
        return ((shares.view(1, -1, 1) - (error.detach() < 0).float()).abs() * huber).mean(2).sum(1)
