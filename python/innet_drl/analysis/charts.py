"""The charts of one or several runs of one environment, from the panels of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from innet_drl.analysis.drawing import NEUTRAL, SERIES, Chart, Curve
from innet_drl.analysis.recorded_run import RecordedRun
from innet_drl.train.observe.panels import PANELS, Panel


def charts(runs: Sequence[RecordedRun]) -> list[Chart]:
    """Returns the charts of runs of one environment."""
    found = [chart for title, panel in PANELS.items() for chart in _charts(title, panel, runs)]
    return [found[0], _by_time(runs), *found[1:]]


def _charts(title: str, panel: Panel, runs: Sequence[RecordedRun]) -> Iterator[Chart]:
    if len(runs) == 1:
        yield _of_run(title, panel, runs[0])
    elif panel.runs == "by run":
        yield from (_of_run(f"{title}: {run.name}", panel, run) for run in runs)
    elif panel.runs == "by metric":
        for name, label in panel.curves.items():
            curves = [_curve(run, name, run.name, run.index) for run in runs]
            yield _chart(f"{title}: {label}" if len(panel.curves) > 1 else title, panel, curves)


def _of_run(title: str, panel: Panel, run: RecordedRun) -> Chart:
    """A curve for each metric, or for each key of a metric with several values."""
    ((first, label), *others) = panel.curves.items()
    if panel.is_stacked:
        curves = _stacked(run, first)
    elif keys := run.keys(first):
        curves = _by_key(run, first, label, keys)
    else:
        names = [(first, label or "at the end"), *others]
        curves = [_curve(run, name, label, number) for number, (name, label) in enumerate(names)]
    return _chart(title, panel, curves)


def _chart(title: str, panel: Panel, curves: list[Curve]) -> Chart:
    return Chart(
        title,
        panel.unit,
        curves,
        stacked=panel.is_stacked,
        may_be_logarithmic=panel.may_be_logarithmic,
        is_share=panel.is_share,
    )


def _curve(run: RecordedRun, name: str, label: str, series: int) -> Curve:
    series = NEUTRAL if name.endswith("_target") else series
    return Curve(label, run.column("agent_steps"), run.column(name), series, is_step=name == "evaluation_mean")


def _by_key(run: RecordedRun, name: str, label: str, keys: list[str]) -> list[Curve]:
    """A curve for each key. With more than colours, opacity rises with the number, as exploration of actors falls."""
    many = len(keys) > SERIES
    return [
        Curve(
            f"{label} {key}".strip(),
            run.column("agent_steps"),
            run.column(f"{name}/{key}"),
            0 if many else number,
            0.2 + 0.8 * number / (len(keys) - 1) if many else 1.0,
        )
        for number, key in enumerate(keys)
    ]


def _by_time(runs: Sequence[RecordedRun]) -> Chart:
    longest = max(run.last("time_s") or 0.0 for run in runs)
    label, unit = ("hours", 3600) if longest >= 3 * 3600 else ("minutes", 60)
    curves = [
        Curve(
            run.name if len(runs) > 1 else "at the end",
            run.column("time_s") / unit,
            run.column("return_mean"),
            run.index,
        )
        for run in runs
    ]
    return Chart("Score by time", "mean of the last 100 games", curves, x_label=label)


def _stacked(run: RecordedRun, name: str) -> list[Curve]:
    """Shares of time; the smallest activities beyond the number of colours are merged."""
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
    return curves if len(x) > 1 else []
