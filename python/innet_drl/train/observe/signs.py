"""Signs of mistakes in learning: sentences on unusual metrics, for the log and the report.

Bounds are between the values of successful runs and those with the mistake; docs/how-to/training.md has both.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping

from innet_drl.train.observe.metrics import Metrics
from innet_drl.train.settings.config import Config

WARM_UP = 4_000
"""Updates before which metrics are ignored, as a fresh network values all actions equally."""
LAST_LAYERS = 2
"""Layers whose dead units are a sign. The first filters of a network are dead where a game shows little, as Pong."""
RECENT = 5
"""Number of last values that are averaged; with fewer, a metric is ignored."""
RECENT_EPISODES = 15
"""`RECENT` for `q_predicted` and `return_discounted`, as a line has few episodes."""


def signs(recent: Mapping[str, float], config: Config) -> dict[str, str]:
    """Returns a sentence for each unusual metric, by its name.

    `recent` has the mean of the last `values_of` values of each metric that has enough; keys of metrics with several
    values are `metric/key`.
    """
    found: dict[str, str] = {}

    def sign(name: str, sentence: str, *, above: float = math.inf, below: float = -math.inf) -> None:
        value = recent.get(name)
        if value is not None and (value > above or value < below):
            found[name] = sentence.format(value=value, percent=f"{100 * value:.0f} %")

    wrapper = f"environment_wrappers{', of ALE/<Game>-v5' if config.is_atari else ''}"
    motion = (
        f"{{percent}} of the steps show no motion in {config.stack} frames: does the game wait for a key? A wrapper "
    )
    sign("equal_frames", f"{motion}can press it ({wrapper})", above=0.2)
    if config.publish == "newest":
        sign(
            "policy_agreement",
            "actors play with the newest weights, and their greedy actions match the evaluated policy in only "
            "{percent} of the states: publish average",
            below=0.5,
        )
    sign(
        "policy_churn",
        "the best action changes in {percent} of the states within some hundred updates: a lower learning_rate, or a "
        "larger average_decay",
        above=0.65,
    )
    layers = sorted(int(name.partition("/")[2]) for name in recent if name.startswith("dead_units/"))
    for layer in layers[-LAST_LAYERS:]:
        units = f"{{percent}} of the units of ReLU {layer} are 0 in all states"
        sign(f"dead_units/{layer}", f"{units}: a lower learning_rate, or other initial weights", above=0.25)
    sign(
        "feature_spread",
        "a normaliser's input has a standard deviation of {value:.2g} times the root of its epsilon, and it multiplies "
        "noise and gradients: normalise another layer, or with a smaller epsilon",
        below=1.0,
    )
    sign(
        "adam_epsilon_share",
        "Adam's epsilon is above the gradients of {percent} of the weights, which learn more slowly than "
        "learning_rate says: a smaller adam_epsilon",
        above=0.9,
    )
    sign(
        "effective_sample_size",
        "an update learns as much as from {percent} of its batch, so unequal are the weights: a lower "
        "priority_exponent",
        below=0.5,
    )
    predicted, returned = recent.get("q_predicted"), recent.get("return_discounted")
    if predicted is None or returned is None or config.munchausen:
        # Munchausen adds a term to Q-values that returns lack.
        return found
    # Q-values that begin near 0 approach negative returns from above.
    if predicted > returned + 0.1 * abs(returned) + 0.05 and abs(predicted) > abs(returned):
        found["q_predicted"] = (
            f"Q-values of {predicted:.3g} are above the returns that follow, {returned:.3g}: a lower "
            "samples_per_insert or learning_rate, or a longer target_period"
        )
    return found


def values_of(name: str) -> int:
    """Number of averaged values of a metric."""
    return RECENT_EPISODES if name in ("q_predicted", "return_discounted") else RECENT


class SignsOfRun:
    """Signs of a running run, each reported once."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._values: dict[str, deque[float]] = {}
        self._said: set[str] = set()

    def add(self, metrics: Metrics) -> list[str]:
        """Adds a line of metrics; returns new sentences."""
        if metrics["learner_updates"] < WARM_UP:
            return []
        for name, value in metrics.items():
            self._values.setdefault(name, deque(maxlen=values_of(name))).append(value)
        recent = {
            name: sum(values) / len(values) for name, values in self._values.items() if len(values) == values.maxlen
        }
        found = signs(recent, self._config)
        new = found.keys() - self._said
        self._said |= new
        return [sentence for name, sentence in found.items() if name in new]
