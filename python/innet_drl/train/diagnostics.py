"""Diagnosis of the learner: what a few hundred stored states show of mistakes in learning, every `PERIOD` updates.

`signs.py` says in sentences what is out of the ordinary.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from innet_drl.batches import TorchBatch

if TYPE_CHECKING:
    from innet_drl.train.learner import Learner, Update

PERIOD = 500
"""Updates between two diagnoses."""
STATES = 256
"""States of a diagnosis: of the batches before it."""
QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)
"""Percentiles of the priorities that a diagnosis has."""

aten = torch.ops.aten


@dataclass(frozen=True)
class Diagnosis:
    """What the learner's newest batches show; the metrics of the same names have the meanings."""

    policy_churn: float | None
    policy_agreement: float
    dead_units: dict[str, float]
    feature_spread: float | None
    adam_epsilon_share: float
    equal_frames: float | None
    effective_sample_size: float
    priority_percentiles: dict[str, float]

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        values = (value.values() if isinstance(value, dict) else (value,) for value in vars(self).values())
        return all(value is None or math.isfinite(value) for some in values for value in some)


class Diagnostics:
    """Collects states of the last batches before every `PERIOD`th update, and diagnoses the learner on them.

    Nothing is sampled for it, and the networks are only read: training is the same without it.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        batches = -(-STATES // learner.config.batch_size)
        self._batches = min(batches, PERIOD)
        self._seen: deque[tuple[Tensor, Tensor, Tensor, Update]] = deque(maxlen=self._batches)
        """Observations, probabilities and weights of the batches before the next diagnosis, and their updates."""
        self._before: tuple[Tensor, Tensor] | None = None

    def add(self, batch: TorchBatch, update: Update) -> Diagnosis | None:
        """Adds an update and its batch; returns a diagnosis if one is due."""
        until = -self._learner.updates % PERIOD
        if until >= self._batches:
            return None
        # The batch's memory is used again.
        self._seen.append((batch.observation.clone(), batch.probabilities.clone(), batch.weights.clone(), update))
        if until != 0:
            return None
        modes = [(network, network.training) for network in (self._learner.network, self._learner.average)]
        try:
            # Dropout and the statistics of normalisers change nothing, and nothing changes them.
            for network, _ in modes:
                network.eval()
            found = self._diagnose()
        finally:
            for network, training in modes:
                network.train(training)
        # A run that diverges has its own error.
        return found if found.is_finite else None

    def _diagnose(self) -> Diagnosis:
        learner = self._learner
        observations, probability, batches, updates = zip(*self._seen, strict=True)
        self._seen.clear()
        states = torch.cat(observations)[:STATES].clone()
        probabilities = torch.cat(probability)[:STATES].double()
        weights = [batch.double() for batch in batches]
        priorities = np.concatenate([update.priorities() for update in updates])
        with Watch() as watch:
            newest = learner.q(learner.network, states).argmax(1)
        average = learner.q(learner.average, states).argmax(1)
        acting, acting_network = (
            (average, learner.average) if learner.config.publish == "average" else (newest, learner.network)
        )
        churn = None
        if self._before is not None:
            earlier_states, earlier = self._before
            churn = _share(learner.q(acting_network, earlier_states).argmax(1) != earlier)
        self._before = states, acting
        return Diagnosis(
            policy_churn=churn,
            policy_agreement=_share(newest == average),
            dead_units=watch.dead_units,
            feature_spread=min(watch.spreads, default=None),
            adam_epsilon_share=adam_epsilon_share(learner.optimizer),
            equal_frames=_equal_frames(states, probabilities) if learner.spec.stack > 1 else None,
            effective_sample_size=float(np.mean([float(w.sum() ** 2 / (len(w) * (w**2).sum())) for w in weights])),
            priority_percentiles=dict(
                zip(map(str, QUANTILES), np.percentile(priorities, QUANTILES).tolist(), strict=True)
            ),
        )


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches ReLUs and normalisers of the networks that are computed in its context, whosoever they are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dead_units: dict[str, float] = {}
        """Share of units, or filters, of each ReLU that are 0 in all states, by its number in the computing order."""
        self.spreads: list[float] = []
        """Standard deviation of each normaliser's input as it is normalised, mean over states, over sqrt(epsilon)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes an operation, and notes what it shows."""
        result = func(*args, **(kwargs or {}))
        if func in (aten.relu.default, aten.relu_.default) and result.dim() > 1:
            active = (result > 0).transpose(0, 1).flatten(1).any(1)
            self.dead_units[str(len(self.dead_units) + 1)] = _share(~active)
        elif func is aten.native_layer_norm.default:
            shape = args[1]
            self._add_spread(args[0].flatten(-len(shape)), args[4])
        elif func is aten.native_group_norm.default:
            count, groups, epsilon = args[3], args[6], args[7]
            self._add_spread(args[0].reshape(count, groups, -1), epsilon)
        return result

    def _add_spread(self, normalised: Tensor, epsilon: float) -> None:
        self.spreads.append(float(normalised.float().std(-1, correction=0).mean()) / epsilon**0.5)


def adam_epsilon_share(optimizer: torch.optim.Optimizer) -> float:
    """Share of the weights whose root of the second moment, sqrt(v), is below Adam's epsilon (Kingma and Ba, 2015).

    Their steps are smaller than the learning rate for any gradient.
    """
    below = total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            if state:
                corrected = state["exp_avg_sq"] / (1 - group["betas"][1] ** float(state["step"]))
                below += int((corrected < group["eps"] ** 2).sum())
                total += parameter.numel()
    return below / total if total else 0.0


def _equal_frames(states: Tensor, probabilities: Tensor) -> float:
    """Share of the stored stacks of which all frames are equal, by sampled ones [B, stack, ...].

    Args:
        states: Sampled stacks.
        probabilities: Probability of each sample, by whose inverse it counts.
    """
    equal = (states == states[:, :1]).flatten(1).all(1)
    return float((equal / probabilities).sum() / probabilities.reciprocal().sum())


def _share(true: Tensor) -> float:
    return float(true.float().mean())
