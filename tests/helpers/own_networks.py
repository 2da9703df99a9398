"""Networks and losses as a user would write them, found by import path. `brought` has environments, without torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from innet_drl.torch_batches import TorchBatch
from innet_drl.train.losses import Loss, TransitionLoss, of_actions
from innet_drl.train.settings.config import Config


class Linear(nn.Module):
    """Q-values of a flat observation, or outputs for each action."""

    outputs = 0

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__()
        self.shape = (actions, self.outputs) if self.outputs else (actions,)
        self.layer = nn.Linear(int(np.prod(observation_space.shape)), int(np.prod(self.shape)))

    def forward(self, observation: Tensor) -> Tensor:
        assert observation.dtype == torch.float32
        q: Tensor = self.layer(observation.flatten(1)).unflatten(1, self.shape)
        return q


class Spectral(Linear):
    """A spectrally normalised layer, whose vectors are buffers."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions, config)
        spectral_norm(self.layer)


class LinearAtoms(Linear):
    """51 outputs for each action."""

    outputs = 51


class LinearDict(nn.Module):
    """Q-values of a dictionary."""

    def __init__(self, observation_space: spaces.Dict, actions: int, config: Config) -> None:
        super().__init__()
        sizes = [int(np.prod(part.shape)) for part in observation_space.values() if part.shape is not None]
        self.layer = nn.Linear(sum(sizes), actions)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        q: Tensor = self.layer(torch.cat([part.flatten(1) for part in observation.values()], 1))
        return q


class PartlyTrained(Linear):
    """One layer is frozen, and one is never used."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions, config)
        self.frozen = nn.Linear(actions, actions).requires_grad_(False)
        self.unused = nn.Linear(actions, actions)

    def forward(self, observation: Tensor) -> Tensor:
        q: Tensor = self.frozen(super().forward(observation))
        return q


class OneTooMany(Linear):
    """Returns a Q-value of an action that there is not."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions + 1, config)


def network_raises(*_: Any) -> nn.Module:
    raise RuntimeError("too small")


def squared(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error of Q-learning with the target network's own maximum."""
    with torch.no_grad():
        goal = batch.reward + batch.discount * target(batch.next_observation).max(1).values
    q = online(batch.observation)
    error = goal - q.gather(1, batch.action.long().unsqueeze(1)).squeeze(1)
    return error.square(), error.abs(), q


def squared_nan(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss * torch.nan, priority, q


def squared_mean(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss.mean(), priority, q


def squared_constant(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss.detach(), priority, q


class LossWithoutCall(Loss):
    """A loss that computes nothing."""


class LossThatRaises(LossWithoutCall):
    """A loss that cannot be made."""

    def __init__(self, config: Config) -> None:
        raise RuntimeError("no licence")

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        raise AssertionError("a loss that was not made is not called")


class Halved(Loss):
    """Half of the squared error of Q-learning, with targets by a name of its own."""

    computed = 0

    def targets(self, batch: TorchBatch, online: Any, target: Any) -> dict[str, Tensor]:
        Halved.computed += 1
        return {"goal": batch.reward + batch.discount * target(batch.next_observation).max(1).values}

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        q = online(batch.observation)
        error = batch.goal - of_actions(q, batch.action)
        return TransitionLoss(0.5 * error.square(), error.detach().abs(), q.detach())


class LossOfTargets(Halved):
    """Reads a target that it does not compute."""

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        return TransitionLoss(batch.missing, batch.missing, batch.missing)


class LaterNan:
    """A loss that is NaN from its third batch on."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
        self.batches += 1
        return (squared if self.batches < 3 else squared_nan)(online, target, batch)


later_nan = LaterNan()
