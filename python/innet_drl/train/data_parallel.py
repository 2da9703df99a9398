"""Data parallelism: several learners apply the mean of their gradients, computed in the network."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import nn

from innet_drl.gradients import GradientWorker


class TrainingEnded(Exception):  # noqa: N818 - a signal, not an error
    """The first learner has ended training: no learner applies the update in progress."""


class SharedGradients:
    """The mean of all learners' gradients. An additional value of the sum signals the end of training."""

    def __init__(self, worker: GradientWorker, network: nn.Module) -> None:
        self._worker = worker
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._values = np.zeros(sum(sizes) + 1, np.float32)
        self._parts = torch.split(torch.from_numpy(self._values[:-1]), sizes)

    def mean(self) -> None:
        """Replaces every `grad` by its mean over all learners; a missing `grad` counts as 0.

        Raises:
            TrainingEnded: The first learner has called `end`.
            innet_drl.errors.GradientError: A learner has left; the message names it.
        """
        self._values[-1] = 0.0
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Copied in logical order, as learners may use different memory layouts.
            part.view(parameter.shape).copy_(parameter.grad)
        self._worker.sum(self._values, mean=True)
        if self._values[-1] > 0.0:
            raise TrainingEnded
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view(parameter.shape))

    def end(self) -> None:
        """Ends training in all learners, instead of the next mean."""
        self._values[:] = 0.0
        self._values[-1] = 1.0
        self._worker.sum(self._values, mean=True)


def digest(network: nn.Module) -> bytes:
    """SHA-256 of a network's parameters."""
    sha = hashlib.sha256()
    for parameter in network.parameters():
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.digest()
