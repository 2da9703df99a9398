"""Data parallelism: several learners apply the mean of their gradients, computed in the network."""

from __future__ import annotations

import concurrent.futures
import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

from innet_drl.gradients import GradientWorker

ATTEND_SECONDS = 0.25
"""Seconds between two calls of `attend` while a sum waits."""


class TrainingEnded(Exception):  # noqa: N818 - a signal, not an error
    """A learner has ended training: no learner applies the update in progress."""


class SharedGradients:
    """The mean of all learners' gradients. An additional value of the sum signals the end of training.

    Args:
        worker: The learner's membership in the job.
        network: The network whose gradients are averaged.
        attend: Called every `ATTEND_SECONDS` while a sum waits for other learners. After an exception of `attend` the
            sum goes on until `worker` leaves its job, and no other may begin.
    """

    def __init__(self, worker: GradientWorker, network: nn.Module, attend: Callable[[], None] | None = None) -> None:
        self._worker, self._attend = worker, attend
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "gradients")
        self.ended = False
        """Whether a sum has ended training."""
        self._parameters = [parameter for parameter in network.parameters() if parameter.requires_grad]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._values = np.zeros(sum(sizes) + 1, np.float32)
        self._parts = torch.split(torch.from_numpy(self._values[:-1]), sizes)

    def mean(self) -> None:
        """Replaces every `grad` by its mean over all learners; a missing `grad` counts as 0.

        Raises:
            TrainingEnded: A learner has called `end`.
            innet_drl.errors.GradientError: A learner has left; the message names it.
        """
        self._values[-1] = 0.0
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            # Copied in logical order, as learners may use different memory layouts.
            part.view(parameter.shape).copy_(parameter.grad)
        self._sum()
        if self.ended:
            raise TrainingEnded
        for parameter, part in zip(self._parameters, self._parts, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view(parameter.shape))

    def end(self) -> None:
        """Ends training in all learners, instead of the next mean."""
        self._values[:] = 0.0
        self._values[-1] = 1.0
        self._sum()

    def _sum(self) -> None:
        if self._attend is None:
            self._worker.sum(self._values, mean=True)
        else:
            self._sum_attending(self._attend)
        self.ended = bool(self._values[-1] > 0.0)

    def _sum_attending(self, attend: Callable[[], None]) -> None:
        future = self._thread.submit(self._worker.sum, self._values, mean=True)
        while not concurrent.futures.wait([future], ATTEND_SECONDS).done:
            attend()
        future.result()


def digest(network: nn.Module) -> bytes:
    """SHA-256 of a network's parameters."""
    sha = hashlib.sha256()
    for parameter in network.parameters():
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.digest()
