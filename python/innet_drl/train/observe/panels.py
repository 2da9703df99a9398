"""The charts of metrics: of a report, and of TensorBoard's tab CUSTOM SCALARS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from innet_drl.train.observe.metrics import METRICS
from innet_drl.train.observe.stopwatch import WAITING


@dataclass(frozen=True)
class Panel:
    """A chart over the agent steps."""

    unit: str
    curves: Mapping[str, str]
    """Label of each metric; of a metric with several values that of the key, such as `actor`."""
    runs: Literal["by metric", "by run", "one"] = "by metric"
    """Charts of several runs: one of each metric, with the runs as curves, or one of each run, or none."""
    is_share: bool = False
    is_stacked: bool = False
    may_be_logarithmic: bool = False

    @property
    def tags(self) -> list[str]:
        """TensorBoard's tags of the curves, as regular expressions."""
        found = []
        for name in self.curves:
            metric, slash, key = name.partition("/")
            found.append(f"{METRICS[metric].tag}{slash}{key}(/.*)?$")
        return found


PANELS = {
    "Score": Panel(
        "", {"return_mean": "mean of the last 100 games", "evaluation_mean": "evaluation", "return_best": "best game"}
    ),
    "Score of each actor": Panel("mean of its last 20 games", {"actor_scores": "actor"}, "by run"),
    "Q-loss": Panel("weighted", {"td_loss": ""}, may_be_logarithmic=True),
    "Memory": Panel("steps in the replay memory", {"replay_steps": ""}),
    "Replay ratio": Panel(
        "samples per insert",
        {
            "samples_per_insert_now": "reached",
            "samples_per_insert": "reached since the start",
            "samples_per_insert_target": "target",
        },
    ),
    "Throughput": Panel("steps/s", {"agent_steps_per_s": ""}),
    "Throughput of each actor": Panel("steps/s", {"actor_steps_per_s": "actor"}, "one"),
    "Updates": Panel("updates/s", {"learner_updates_per_s": ""}),
    "Values of the actors' actions": Panel(
        "discounted", {"q_predicted": "Q-value", "return_discounted": "return that followed"}, "by run"
    ),
    "The learner waits for samples": Panel("share of its time", {f"learner_time/{WAITING}": ""}, is_share=True),
    "The actors wait for the learner": Panel("share of their time", {"actor_waits": "actor"}, "by run", is_share=True),
    "Q-value": Panel("sampled actions", {"q_mean": ""}),
    "Priorities": Panel("sum, after the exponent", {"priority_total": ""}),
    "Concentration of priorities": Panel("1 if uniform", {"priority_concentration": ""}),
    "Percentiles of the priorities": Panel("before the exponent", {"priority_percentiles": ""}, "one"),
    "Gradient norm": Panel("before clipping", {"gradient_norm": ""}),
    "Age of samples": Panel("steps", {"sample_age": ""}),
    "Lag of the actors' parameters": Panel("updates", {"parameter_lag": ""}),
    "Exploration": Panel("probability of random actions", {"epsilon": ""}),
    "Policy": Panel(
        "share of states",
        {"policy_churn": "best action changed", "policy_agreement": "newest agrees with average"},
        is_share=True,
    ),
    "Dead units of each ReLU": Panel("share of units", {"dead_units": ""}, "one", is_share=True),
    "Signs of mistakes": Panel(
        "share",
        {
            "equal_frames": "steps without motion",
            "adam_epsilon_share": "weights below Adam's epsilon",
            "effective_sample_size": "effective batch",
        },
        is_share=True,
    ),
    "Spread of normalised features": Panel("over the root of epsilon", {"feature_spread": ""}),
    "Memory of all processes": Panel("bytes", {"resident_bytes": ""}),
    "Time left": Panel("seconds", {"seconds_left": ""}, "one"),
    "The learner's time": Panel("shares", {"learner_time": ""}, "one", is_share=True, is_stacked=True),
    "The actors' time": Panel("shares", {"actor_time": ""}, "one", is_share=True, is_stacked=True),
}
"""Charts by title."""
