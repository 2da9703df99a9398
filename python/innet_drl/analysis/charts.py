"""The charts of one or several runs of one environment: scores, losses, memory, throughput, and waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from innet_drl.analysis.drawing import NEUTRAL, SERIES, Chart, Curve, Values
from innet_drl.analysis.recorded_run import RecordedRun

Metrics = str | dict[str, str]
"""Name of a metric, or names of metrics by their labels."""
AT_END = "at the end"
"""Label of the only curve of a chart; the legend has its last value."""
AVERAGE = "mean of the last 100 games"


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Returns the charts of runs of one environment.

    With one run a chart has a curve for each of its metrics. With several it has a curve for each run, of the first
    metric, and charts of details are left out.
    """
    of = functools.partial(_chart, runs)
    ratios = {"reached": "samples_per_insert_now", "reached since the start": "samples_per_insert"}
    by_target = {run.last("samples_per_insert_target"): run for run in runs}
    targets = [_curve(run, "samples_per_insert_target", "target", NEUTRAL) for run in by_target.values()]
    drawn = [
        of("Score", "", {AVERAGE: "return_mean", "evaluation": "evaluation_mean", "best game": "return_best"}),
        _by_time(runs),
        *([of("Evaluations", "mean score", "evaluation_mean")] if len(runs) > 1 else []),
        *_of_each(runs, _by_actor, "actor_scores", "Score of each actor", "mean of its last 20 games"),
        of("Q-loss", "weighted", "td_loss", may_be_logarithmic=True),
        of("Memory", "steps in the replay memory", "replay_steps"),
        of("Replay ratio", "samples per insert", ratios, beside=targets),
        of("Throughput", "steps/s", "agent_steps_per_s"),
        of("Updates", "updates/s", "learner_updates_per_s"),
        *_of_each(runs, _predicted, "Values of the actors' actions"),
        of("The learner waits for samples", "share of its time", "learner_time/wait for a batch", is_share=True),
        of("The actors wait for the learner", "share of their time", "actor_waits", is_share=True),
        of("Q-value", "sampled actions", "q_mean"),
        of("Priorities", "sum, after the exponent", "priority_total"),
        of("Concentration of priorities", "1 if uniform", "priority_concentration"),
        of("Gradient norm", "before clipping", "gradient_norm"),
        of("Age of samples", "steps", "sample_age"),
        of("Lag of the actors' parameters", "updates", "parameter_lag"),
        of("Exploration", "probability of random actions", "epsilon"),
        of("Memory of all processes", "bytes", "resident_bytes"),
    ]
    if len(runs) > 1:
        return drawn
    (run,) = runs
    policy = {"best action changed": "policy_churn", "newest agrees with average": "policy_agreement"}
    signs = {
        "steps without motion": "equal_frames",
        "weights below Adam's epsilon": "adam_epsilon_share",
        "effective batch": "effective_sample_size",
    }
    return [
        *drawn,
        _by_actor(run, "actor_steps_per_s", "Throughput of each actor", "steps/s"),
        of("Policy", "share of states", policy, is_share=True),
        _by_key(run, "dead_units", "Dead units of each ReLU", "share of units", is_share=True),
        of("Signs of mistakes", "share", signs, is_share=True),
        of("Spread of normalised features", "over the root of epsilon", "feature_spread"),
        _by_key(run, "priority_percentiles", "Percentiles of the priorities", "before the exponent"),
        _stack(run, "learner_time", "The learner's time"),
        _stack(run, "actor_time", "The actors' time"),
    ]


def _chart(
    runs: Sequence[RecordedRun], title: str, unit: str, metrics: Metrics, beside: Sequence[Curve] = (), **scale: Any
) -> Chart:
    by_label = {AT_END: metrics} if isinstance(metrics, str) else metrics
    if len(runs) > 1:
        label, name = next(iter(by_label.items()))
        curves = [_curve(run, name, run.name, run.index) for run in runs]
        return Chart(title, unit or label, [*curves, *beside], **scale)
    curves = [_curve(runs[0], name, label, number) for number, (label, name) in enumerate(by_label.items())]
    return Chart(title, unit, [*curves, *beside], **scale)


def _of_each(runs: Sequence[RecordedRun], chart: Callable[..., Chart], *arguments: str) -> list[Chart]:
    """A chart for each run, whose title has its name if there are several."""
    found = [chart(run, *arguments) for run in runs]
    named = [replace(each, title=f"{each.title}: {run.name}") for each, run in zip(found, runs, strict=True)]
    return found if len(runs) == 1 else named


def _curve(run: RecordedRun, name: str, label: str, series: int) -> Curve:
    """The curve of a metric; of one by actor, the mean of the actors."""
    values = _mean_of_actors(run, name) if run.keys(name) else run.column(name)
    return Curve(label, run.column("agent_steps"), values, series, is_step=name == "evaluation_mean")


def _predicted(run: RecordedRun, title: str) -> Chart:
    """Charts predicted Q-values against returns: values above the returns are overestimates."""
    curves = [_curve(run, "q_predicted", "Q-value", 0), _curve(run, "return_discounted", "return that followed", 1)]
    return Chart(title, "discounted", curves)


def _by_time(runs: Sequence[RecordedRun]) -> Chart:
    longest = max(run.last("time_s") or 0.0 for run in runs)
    label, unit = ("hours", 3600) if longest >= 3 * 3600 else ("minutes", 60)
    curves = [
        Curve(run.name if len(runs) > 1 else AT_END, run.column("time_s") / unit, run.column("return_mean"), run.index)
        for run in runs
    ]
    return Chart("Score by time", AVERAGE, curves, x_label=label)


def _by_actor(run: RecordedRun, name: str, title: str, unit: str) -> Chart:
    """A curve for each actor. With more actors than colours, opacity rises with the number, as exploration falls."""
    actors, x = run.keys(name), run.column("agent_steps")
    many = len(actors) > SERIES
    return Chart(
        title,
        unit,
        [
            Curve(
                f"actor {actor}",
                x,
                run.column(f"{name}/{actor}"),
                0 if many else number,
                0.2 + 0.8 * number / (len(actors) - 1) if many else 1.0,
            )
            for number, actor in enumerate(actors)
        ],
    )


def _by_key(run: RecordedRun, name: str, title: str, unit: str, *, is_share: bool = False) -> Chart:
    x = run.column("agent_steps")
    curves = [Curve(key, x, run.column(f"{name}/{key}"), number) for number, key in enumerate(run.keys(name)[:SERIES])]
    return Chart(title, unit, curves, is_share=is_share)


def _mean_of_actors(run: RecordedRun, name: str) -> Values:
    values = np.array([run.column(f"{name}/{actor}") for actor in run.keys(name)])
    counts = np.isfinite(values).sum(0)
    return np.where(counts > 0, np.nansum(values, 0) / np.maximum(counts, 1), np.nan)


def _stack(run: RecordedRun, name: str, title: str) -> Chart:
    """Stacked shares of time; the smallest activities beyond the number of colours are merged."""
    # The activity "other" is last, and merged with the smallest activities.
    keys = sorted(run.keys(name), key=lambda key: key == "other")
    first, rest = (keys, []) if len(keys) <= SERIES else (keys[: SERIES - 1], keys[SERIES - 1 :])
    parts = {key: run.column(f"{name}/{key}") for key in first}
    # Lines without measured time, such as the first, have no shares.
    measured = np.isfinite(np.array(list(parts.values()))).any(0) if parts else np.zeros(run.lines, np.bool_)
    if rest:
        parts["other"] = np.nansum([run.column(f"{name}/{key}") for key in rest], 0)
    x = run.column("agent_steps")[measured]
    curves = [
        Curve(key, x, np.nan_to_num(values[measured]), number) for number, (key, values) in enumerate(parts.items())
    ]
    return Chart(title, "shares", curves if len(x) > 1 else [], stacked=True, is_share=True)
