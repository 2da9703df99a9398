"""The charts of one or several runs of one environment: scores, losses, memory, throughput, and waits."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from innet_drl.analysis.drawing import NEUTRAL, SERIES, Chart, Curve, Values
from innet_drl.analysis.recorded_run import RecordedRun

WAITS_FOR_SAMPLES = "learner_time/wait for a batch"


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Returns the charts of runs of one environment. With several runs each run is a curve."""
    return _of_one(runs[0]) if len(runs) == 1 else _of_several(runs)


def _of_one(run: RecordedRun) -> list[Chart]:
    score = [
        _curve(run, "return_mean", "mean of the last 100 games", 0),
        _curve(run, "evaluation_mean", "evaluation", 1, markers=True),
        _curve(run, "return_best", "best game", 2),
    ]
    ratio = [
        _curve(run, "samples_per_insert_now", "reached", 0),
        _curve(run, "samples_per_insert", "reached since the start", 2),
        _curve(run, "samples_per_insert_target", "target", NEUTRAL),
    ]
    throughput = _by_actor(run, "actor_steps_per_s", "Throughput of each actor", "steps/s")
    waits = [
        _curve(run, WAITS_FOR_SAMPLES, "learner for samples", 0),
        Curve("actors for the learner", run.column("agent_steps"), _mean_of_actors(run, "actor_waits"), 1),
    ]
    policy = [
        _curve(run, "policy_churn", "best action changed", 0),
        _curve(run, "policy_agreement", "newest agrees with average", 1),
    ]
    shares = [
        _curve(run, "equal_frames", "steps without motion", 0),
        _curve(run, "adam_epsilon_share", "weights below Adam's epsilon", 1),
        _curve(run, "effective_sample_size", "effective batch", 2),
    ]
    single = [
        ("q_mean", "Q-value", "sampled actions"),
        ("priority_total", "Priorities", "sum, after the exponent"),
        ("priority_concentration", "Concentration of priorities", "1 if uniform"),
        ("gradient_norm", "Gradient norm", "before clipping"),
        ("sample_age", "Age of samples", "steps"),
        ("parameter_lag", "Lag of the actors' parameters", "updates"),
        ("epsilon", "Exploration", "probability of random actions"),
        ("resident_bytes", "Memory of all processes", "bytes"),
    ]
    return [
        Chart("Score", "", score),
        _by_time([run]),
        _by_actor(run, "actor_scores", "Score of each actor", "mean of its last 20 games"),
        _chart([run], "td_loss", "Q-loss", "weighted", may_be_logarithmic=True),
        _chart([run], "replay_steps", "Memory", "steps in the replay memory"),
        Chart("Replay ratio", "samples per insert", ratio),
        throughput if throughput.drawn else _chart([run], "agent_steps_per_s", "Throughput", "steps/s"),
        _chart([run], "learner_updates_per_s", "Updates", "updates/s"),
        _predicted(run, "Values of the actors' actions"),
        Chart("Who waits", "share of the time", waits, is_share=True),
        *(_chart([run], name, title, unit) for name, title, unit in single),
        Chart("Policy", "share of states", policy, is_share=True),
        _by_key(run, "dead_units", "Dead units of each ReLU", "share of units", is_share=True),
        Chart("Signs of mistakes", "share", shares, is_share=True),
        _chart([run], "feature_spread", "Spread of normalised features", "over the root of epsilon"),
        _by_key(run, "priority_percentiles", "Percentiles of the priorities", "before the exponent"),
        _stack(run, "learner_time", "The learner's time"),
        _stack(run, "actor_time", "The actors' time"),
    ]


def _of_several(runs: Sequence[RecordedRun]) -> list[Chart]:
    each = functools.partial(_chart, runs)

    ratio = [_curve(run, "samples_per_insert_now", run.name, run.index) for run in runs]
    by_target = {run.last("samples_per_insert_target"): run for run in runs}
    ratio += [_curve(run, "samples_per_insert_target", "target", NEUTRAL) for run in by_target.values()]
    waits = [Curve(run.name, run.column("agent_steps"), _mean_of_actors(run, "actor_waits"), run.index) for run in runs]
    evaluations = [_curve(run, "evaluation_mean", run.name, run.index, markers=True) for run in runs]
    return [
        each("return_mean", "Score", "mean of the last 100 games"),
        _by_time(runs),
        Chart("Evaluations", "mean score", evaluations),
        *(
            _by_actor(run, "actor_scores", f"Score of each actor: {run.name}", "mean of its last 20 games")
            for run in runs
        ),
        each("td_loss", "Q-loss", "weighted", may_be_logarithmic=True),
        each("q_mean", "Q-value", "sampled actions"),
        *(_predicted(run, f"Values of the actors' actions: {run.name}") for run in runs),
        each("priority_total", "Priorities", "sum, after the exponent"),
        each("priority_concentration", "Concentration of priorities", "1 if uniform"),
        each("replay_steps", "Memory", "steps in the replay memory"),
        Chart("Replay ratio", "samples per insert", ratio),
        each("agent_steps_per_s", "Throughput", "steps/s"),
        each("learner_updates_per_s", "Updates", "updates/s"),
        each(WAITS_FOR_SAMPLES, "The learner waits for samples", "share of its time", is_share=True),
        Chart("The actors wait for the learner", "share of their time", waits, is_share=True),
        each("gradient_norm", "Gradient norm", "before clipping"),
        each("sample_age", "Age of samples", "steps"),
        each("parameter_lag", "Lag of the actors' parameters", "updates"),
        each("epsilon", "Exploration", "probability of random actions"),
    ]


def _chart(
    runs: Sequence[RecordedRun],
    name: str,
    title: str,
    unit: str,
    *,
    may_be_logarithmic: bool = False,
    is_share: bool = False,
) -> Chart:
    curves = [_curve(run, name, _label(runs, run), run.index) for run in runs]
    return Chart(title, unit, curves, may_be_logarithmic=may_be_logarithmic, is_share=is_share)


def _curve(run: RecordedRun, name: str, label: str, series: int, *, markers: bool = False) -> Curve:
    return Curve(label, run.column("agent_steps"), run.column(name), series, markers=markers)


def _predicted(run: RecordedRun, title: str) -> Chart:
    """Charts predicted Q-values against returns: values above the returns are overestimates."""
    curves = [_curve(run, "q_predicted", "Q-value", 0), _curve(run, "return_discounted", "return that followed", 1)]
    return Chart(title, "discounted", curves)


def _by_time(runs: Sequence[RecordedRun]) -> Chart:
    longest = max(run.last("time_s") or 0.0 for run in runs)
    label, unit = ("hours", 3600) if longest >= 3 * 3600 else ("minutes", 60)
    curves = [
        Curve(_label(runs, run), run.column("time_s") / unit, run.column("return_mean"), run.index) for run in runs
    ]
    return Chart("Score by time", "mean of the last 100 games", curves, x_label=label)


def _label(runs: Sequence[RecordedRun], run: RecordedRun) -> str:
    return run.name if len(runs) > 1 else "at the end"


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
    columns = [run.column(f"{name}/{actor}") for actor in run.keys(name)]
    if not columns:
        return run.column(name)
    values = np.array(columns)
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
