"""The configured loss: of this package, or a user's function or class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from innet_drl.torch_batches import TorchBatch
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.losses.distributional import Categorical, Quantile
from innet_drl.train.losses.q_learning import Loss, Outputs, QLearning, TransitionLoss
from innet_drl.train.settings import importing
from innet_drl.train.settings.slices import NetworkSettings

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
    return ConfigurationError(f"loss {importing.path_of(config.loss)}: {reason}")


def make_loss(config: NetworkSettings) -> Loss:
    """Makes the configured loss."""
    if isinstance(config.loss, str) and not importing.is_path(config.loss):
        return _LOSSES[config.loss](config)
    made = importing.load(config.loss, "loss")
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
