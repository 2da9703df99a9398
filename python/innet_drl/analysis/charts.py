"""The charts of one or several runs of one environment, from the panels of training, as SVG by matplotlib."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from markupsafe import Markup
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from innet_drl.analysis import pictures
from innet_drl.analysis.recorded_run import RecordedRun
from innet_drl.train.observe.display import Progress
from innet_drl.train.observe.metrics import PANELS, Panel

POINTS = 200
"""Largest number of points of an area: matplotlib simplifies lines, and not areas."""
COLOURS = ("#2a78d6", "#e2601f", "#17936a", "#b87900", "#cf5186", "#5a8f2f", "#7668d0", "#d03b3b")
GREY, PALE = "#7d7c78", "#80808055"
"""Colours of text and grid, for light and dark pages."""
SETTINGS: dict[Any, object] = pictures.SETTINGS | {
    "font.size": 9,
    "axes.prop_cycle": cycler(linestyle=["-", "--", ":"]) * cycler(color=COLOURS),
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": GREY,
    "axes.edgecolor": PALE,
    "axes.labelcolor": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": PALE,
    "grid.linewidth": 0.5,
    "axes.formatter.limits": (-3, 4),
    "axes.spines.left": False,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 3,
    # Long curves keep about two points for each pixel.
    "path.simplify_threshold": 1.0,
}
STYLES: dict[str, dict[str, str]] = {
    "evaluation_mean": {"drawstyle": "steps-post"},
    "samples_per_insert_target": {"color": GREY, "linestyle": "--"},
}
"""Styles of metrics: an evaluation holds until the next one."""


@dataclass(frozen=True)
class Curve:
    """A curve, or an area of a stack."""

    label: str
    x: NDArray[np.float64]
    y: NDArray[np.float64]
    style: Mapping[str, str]


@dataclass(frozen=True)
class Chart:
    """A chart of the report."""

    title: str
    unit: str
    svg: Markup | None
    """`None` if it has no values."""


def charts(runs: Sequence[RecordedRun], progress: Progress) -> list[Chart]:
    """Draws the charts of runs of one environment."""
    planned = [plan for title, panel in PANELS.items() for plan in _charts(title, panel, runs)]
    found = []
    for number, (title, panel, curves) in enumerate(planned):
        progress(f"drawing {runs[0].config.environment_name}", f"{number} of {len(planned)} charts")
        found.append(Chart(title, panel.unit, draw(panel, curves)))
    longest = max(run.last("time_s") or 0.0 for run in runs)
    label, unit = ("hours", 3600) if longest >= 3 * 3600 else ("minutes", 60)
    panel = Panel("mean of the last 100 games", {"return_mean": ""})
    by_time = [Curve(_name(run, runs), run.column("time_s") / unit, run.column("return_mean"), {}) for run in runs]
    return [found[0], Chart("Score by time", panel.unit, draw(panel, by_time, label)), *found[1:]]


def _charts(title: str, panel: Panel, runs: Sequence[RecordedRun]) -> Iterator[tuple[str, Panel, list[Curve]]]:
    """Yields the titles and curves of a panel: a chart of each run, or of each metric."""
    if len(runs) == 1 or panel.runs == "by run":
        for run in runs:
            named: dict[str, str] = {}
            for metric, label in panel.curves.items():
                keys = {f"{metric}/{key}": f"{label} {key}".strip() for key in run.keys(metric)}
                named |= keys or {metric: label or _name(run, [run])}
            curves = [_curve(run, name, label) for name, label in named.items()]
            yield title if len(runs) == 1 else f"{title}: {run.name}", panel, curves
    elif panel.runs == "by metric":
        for name, label in panel.curves.items():
            curves = [_curve(run, name, run.name) for run in runs]
            yield f"{title}: {label}" if len(panel.curves) > 1 else title, panel, curves


def _name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    return run.name if len(runs) > 1 else "at the end"


def _curve(run: RecordedRun, name: str, label: str) -> Curve:
    return Curve(label, run.column("agent_steps"), run.column(name), STYLES.get(name, {}))


def draw(panel: Panel, curves: Sequence[Curve], x_label: str = "agent steps") -> Markup | None:
    """Draws a chart as an SVG element, whose legend has the last value of each curve; `None` without values."""
    if not any(np.isfinite(curve.y).any() for curve in curves):
        return None
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(layout="constrained")
        axis = figure.add_subplot(xlabel=x_label)
        if panel.is_stacked:
            _draw_stack(axis, panel, curves)
        else:
            _draw_lines(axis, panel, curves)
        if panel.is_share:
            axis.set_ylim(0, 1)
            axis.yaxis.set_major_formatter(PercentFormatter(1.0))
        elif panel.is_logarithmic and any((curve.y > 0).any() for curve in curves):
            axis.set_yscale("log")
        _, labels = axis.get_legend_handles_labels()
        columns = 2 if max(map(len, labels), default=0) > 20 else 3
        figure.legend(loc="outside upper left", ncols=columns)
        figure.set_size_inches(4.6, 2.1 + 0.18 * -(-len(labels) // columns))
        return Markup(pictures.svg_of(figure))


def _draw_lines(axis: Any, panel: Panel, curves: Sequence[Curve]) -> None:
    named = [number for number, curve in enumerate(curves) if np.isfinite(curve.y).any()]
    if len(curves) > len(COLOURS):
        axis.set_prop_cycle(color=matplotlib.colormaps["viridis"](np.linspace(0, 1, len(curves))))
        # The legend of many actors has the first and the last.
        named = [named[0], named[-1]]
    # Curves without values also take a colour, so that a run has the same one in all charts.
    for number, curve in enumerate(curves):
        kept = np.isfinite(curve.x) & np.isfinite(curve.y)
        label = _with_value(panel, curve) if number in named else None
        marker = "o" if kept.sum() == 1 else None
        axis.plot(curve.x[kept], curve.y[kept], marker=marker, label=label, **curve.style)


def _draw_stack(axis: Any, panel: Panel, curves: Sequence[Curve]) -> None:
    # Lines without measured time, such as the first, have no shares.
    measured = np.isfinite([curve.y for curve in curves]).any(0)
    step = 1 + int(measured.sum()) // POINTS
    areas = [np.nan_to_num(curve.y[measured][::step]) for curve in curves]
    labels = [_with_value(panel, curve) for curve in curves]
    colours = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    axis.stackplot(curves[0].x[measured][::step], *areas, labels=labels, colors=colours, lw=0)


def _with_value(panel: Panel, curve: Curve) -> str:
    value = curve.y[np.isfinite(curve.y)][-1]
    shown = f"{value:.0%}" if panel.is_share else f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    # matplotlib leaves out labels that begin with an underscore: a space of no width precedes those.
    before = "\u200b" if curve.label.startswith("_") else ""
    return f"{before}{curve.label} {shown}"
