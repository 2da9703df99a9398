"""The contract of losses: loss and priority of each transition of a batch, and the Q-values of actors.

The priority of a transition is |TD error| of its Q-value, r + discount * max Q(s') - Q(s, a), for every loss of this
package: with equal parameters it equals the initial priority that the writer computes from an actor's Q-values.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, NamedTuple, Self

from torch import Tensor

from innet_drl.batches import TorchBatch
from innet_drl.train.settings.config import Config

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

    def __init__(self, config: Config) -> None:
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
