"""Diagnosis of the learner every `PERIOD` updates: metrics of a few hundred stored states that reveal mistakes.

`signs.py` turns unusual metrics into sentences.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from innet_drl.batches import TorchBatch
from innet_drl.structures import map_leaves

if TYPE_CHECKING:
    from innet_drl.train.learn.learner import Learner, Update

PERIOD = 500
"""Updates between two diagnoses."""
STATES = 256
"""States of a diagnosis, from the preceding batches."""
QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)
"""Percentiles of the priorities in a diagnosis."""

aten = torch.ops.aten


class Diagnostics:
    """Collects states of the last batches before every `PERIOD`th update, and diagnoses the learner on them.

    It does not sample, and only reads the networks, so that training is unaffected.
    """

    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        batches = -(-STATES // learner.config.batch_size)
        self._batches = min(batches, PERIOD)
        self._seen: deque[tuple[Any, Tensor, Tensor, Update]] = deque(maxlen=self._batches)
        """Observations, probabilities and weights of batches for the next diagnosis, and their updates."""
        self._before: tuple[Any, Tensor] | None = None

    def add(self, batch: TorchBatch, update: Update) -> dict[str, float]:
        """Adds an update and its batch; returns the metrics of a diagnosis if one is due."""
        until = -self._learner.updates % PERIOD
        if until >= self._batches:
            return {}
        # Cloned, because the batch's memory is reused.
        observation = map_leaves(torch.clone, batch.observation)
        self._seen.append((observation, batch.probabilities.clone(), batch.weights.clone(), update))
        if until != 0:
            return {}
        try:
            # Evaluation mode: dropout is off, and statistics of normalisers stay unchanged.
            self._learner.network.eval()
            return self._diagnose()
        finally:
            self._learner.network.train()

    def _diagnose(self) -> dict[str, float]:
        learner = self._learner
        observations, probability, batches, updates = zip(*self._seen, strict=True)
        self._seen.clear()
        states = map_leaves(lambda *parts: torch.cat(parts)[:STATES].clone(), *observations)
        probabilities = torch.cat(probability)[:STATES].double()
        weights = [batch.double() for batch in batches]
        priorities = np.concatenate([update.priorities() for update in updates])
        with Watch() as watch:
            newest = learner.q(learner.network, states).argmax(1)
        average = learner.q(learner.average, states).argmax(1)
        acting, acting_network = (
            (average, learner.average) if learner.config.publish == "average" else (newest, learner.network)
        )
        found = {
            "policy_agreement": _share(newest == average),
            "adam_epsilon_share": adam_epsilon_share(learner.optimizer),
            "effective_sample_size": float(np.mean([float(w.sum() ** 2 / (len(w) * (w**2).sum())) for w in weights])),
        }
        if self._before is not None:
            earlier_states, earlier = self._before
            found["policy_churn"] = _share(learner.q(acting_network, earlier_states).argmax(1) != earlier)
        self._before = states, acting
        if watch.spreads:
            found["feature_spread"] = min(watch.spreads)
        if learner.spec.stack > 1:
            found["equal_frames"] = _equal_frames(states, probabilities)
        found |= {f"dead_units/{relu}": share for relu, share in watch.dead_units.items()}
        percentiles = zip(QUANTILES, np.percentile(priorities, QUANTILES).tolist(), strict=True)
        return found | {f"priority_percentiles/{percent}": value for percent, value in percentiles}


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records ReLUs and normalisers of all networks computed in its context, including user modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dead_units: dict[str, float] = {}
        """Share of units, or filters, that are 0 in all states, by the number of the ReLU in execution order."""
        self.spreads: list[float] = []
        """Standard deviation of each normaliser's input, mean over states, divided by sqrt(epsilon)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Computes an operation, and records its metrics."""
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


def _equal_frames(states: Tensor | tuple[Tensor, ...], probabilities: Tensor) -> float:
    """Estimates the share of stored stacks with equal frames from sampled stacks [B, stack, ...].

    Args:
        states: Sampled stacks, of each part of an observation.
        probabilities: Probability of each sample; samples are weighted by the inverse.
    """
    parts = states if isinstance(states, tuple) else (states,)
    equal = torch.stack([(part == part[:, :1]).flatten(1).all(1) for part in parts]).all(0)
    return float((equal / probabilities).sum() / probabilities.reciprocal().sum())


def _share(true: Tensor) -> float:
    return float(true.float().mean())
