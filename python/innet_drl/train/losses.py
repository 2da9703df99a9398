"""Losses: the loss and the priority of each transition of a batch.

The priority of a transition is |TD error| of its Q-value, r + discount * max Q(s') - Q(s, a), for every loss of this
file: with equal parameters it equals the initial priority that the writer computes from an actor's Q-values.
"""

from __future__ import annotations

import abc
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from innet_drl.torch_batches import TorchBatch
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.slices import NetworkSettings
from innet_drl.train.settings.values import is_path, load, path_of

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


_LOSSES: dict[str, type[Loss]] = {"double_q": QLearning, "categorical": Categorical, "quantile": Quantile}


class FunctionLoss(Loss):
    """A user's loss function: (online, target, batch) to (loss [B], priority [B], Q-values [B, actions]).

    Actors use network outputs [B, actions] as Q-values, and otherwise the means of their last dimension. The first
    batch is checked.
    """

    outputs = None
    has_targets = False

    def __init__(self, config: NetworkSettings, function: Callable[[Outputs, Outputs, TorchBatch], Any]) -> None:
        super().__init__(config)
        self.function = function
        self._checked = False

    def q(self, outputs: Tensor) -> Tensor:
        """The outputs, or the means of their last dimension."""
        return outputs if outputs.dim() == 2 else outputs.mean(2)

    def __call__(self, online: Outputs, target: Outputs, batch: TorchBatch) -> TransitionLoss:
        """Calls the function."""
        if self._checked:
            loss, priority, q = self.function(online, target, batch)
        else:
            loss, priority, q = tried(self, self.function, online, target, batch, "the first batch")
            self._check(loss=loss, priority=priority, q=q)
            self._checked = True
        # A NaN loss would reach the weights before a priority reveals it.
        priority = torch.where(loss.detach().isfinite(), priority.detach(), torch.nan)
        return TransitionLoss(loss, priority, q.detach())

    def _check(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if not bool(tensor.isfinite().all()):
                raise _unusable(
                    self.config,
                    f"its {name} is infinite or NaN on the first batch: look for a division by 0 or a logarithm of 0, "
                    "and try it on a batch of your own",
                )
        if bool((tensors["priority"] < 0).any()):
            raise _unusable(self.config, "its priority is negative: return |TD error|")


def tried(
    loss: Loss, compute: Callable[..., Any], online: Outputs, target: Outputs, batch: TorchBatch, which: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns `compute(online, target, batch)` of a user's loss, and explains its errors."""
    config = loss.config
    try:
        result = compute(online, target, batch)
        q_shape = tuple(loss.q(online(batch.observation)).shape)
    except Exception as error:
        raise _unusable(config, f"on {which} it raises {type(error).__name__}: {error}") from error
    names = ("loss", "priority", "q")
    if not isinstance(result, tuple) or len(result) != 3 or not all(isinstance(item, Tensor) for item in result):
        raise _unusable(
            config,
            f"it returned {type(result).__name__}, and has to return three tensors: loss [batch], priority [batch], "
            "Q-values [batch, actions]",
        )
    for name, tensor, expected in zip(names, result, ((len(batch),), (len(batch),), q_shape), strict=True):
        if tuple(tensor.shape) != expected:
            raise _unusable(config, f"its {name} has the shape {tuple(tensor.shape)}, and has to have {expected}")
    if not result[0].requires_grad:
        raise _unusable(config, "its loss has no gradient: compute it from online(batch.observation)")
    return result


def _unusable(config: NetworkSettings, reason: str) -> ConfigurationError:
    """The error of a user's loss."""
    return ConfigurationError(f"loss {path_of(config.loss)}: {reason}")


def make_loss(config: NetworkSettings) -> Loss:
    """Makes the configured loss."""
    if isinstance(config.loss, str) and not is_path(config.loss):
        return _LOSSES[config.loss](config)
    made = load(config.loss, "loss")
    if not inspect.isclass(made):
        return FunctionLoss(config, made)
    if not issubclass(made, Loss):
        raise _unusable(
            config,
            "it is a class, and has to be a function (online, target, batch) or a subclass of "
            "innet_drl.train.losses.Loss",
        )
    if missing := ", ".join(sorted(made.__abstractmethods__)):
        raise _unusable(config, f"the class has to define {missing}")
    try:
        return made(config)
    except Exception as error:
        raise _unusable(config, f"called with the settings it raises {type(error).__name__}: {error}") from error
