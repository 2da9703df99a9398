"""Line charts as SVG, in colours for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib import ticker
from matplotlib.figure import Figure
from numpy.typing import NDArray

from innet_drl.analysis import pictures

Values = NDArray[np.float64]

POINTS = 300
"""Largest number of points of an area."""
COLOURS = ("#2a78d6", "#e2601f", "#17936a", "#b87900", "#cf5186", "#5a8f2f", "#7668d0", "#d03b3b")
"""Colours of curves."""
SERIES = len(COLOURS)
NEUTRAL = -1
"""Series of a dashed grey curve, such as a target."""
GREY, PALE = "#7d7c78", "#80808055"
"""Colours of text and grid."""
DASHES = ("solid", "dashed", "dotted")
"""Styles of curves, for more curves than colours."""
LOGARITHMIC = 300.0
"""Ratio of the largest to the smallest value above which a chart may have a logarithmic axis."""
SETTINGS: dict[Any, object] = pictures.SETTINGS | {
    "font.size": 9,
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
    "axes.spines.left": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 3,
    # Long curves keep about two points for each pixel.
    "path.simplify_threshold": 1.0,
}


@dataclass(frozen=True)
class Curve:
    """One curve of a chart."""

    label: str
    x: Values
    y: Values
    series: int
    """Number of its colour and style."""
    opacity: float = 1.0
    is_step: bool = False
    """Whether its values hold until the next one."""

    @property
    def dash(self) -> str:
        """Its style."""
        return DASHES[1] if self.series == NEUTRAL else DASHES[self.series // SERIES % len(DASHES)]

    @property
    def colour(self) -> str:
        """Its colour."""
        return GREY if self.series == NEUTRAL else COLOURS[self.series % SERIES]

    @property
    def last(self) -> float | None:
        """Its last value."""
        values = self.y[np.isfinite(self.y)]
        return float(values[-1]) if len(values) else None


@dataclass(frozen=True)
class Chart:
    """A chart with one axis of each kind."""

    title: str
    unit: str
    curves: Sequence[Curve]
    x_label: str = "agent steps"
    may_be_logarithmic: bool = False
    stacked: bool = False
    is_share: bool = False
    """Whether values are shares of 1."""

    @property
    def drawn(self) -> list[Curve]:
        """Curves with values."""
        return [curve for curve in self.curves if curve.last is not None]


def draw(chart: Chart) -> str:
    """Draws a chart as an SVG element."""
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axis = figure.add_subplot()
        if chart.stacked:
            _draw_stack(axis, chart)
        else:
            for curve in chart.drawn:
                _draw_curve(axis, curve)
        _label(axis, chart)
        return pictures.svg_of(figure)


def _draw_curve(axis: Any, curve: Curve) -> None:
    kept = np.isfinite(curve.x) & np.isfinite(curve.y)
    axis.plot(
        curve.x[kept],
        curve.y[kept],
        drawstyle="steps-post" if curve.is_step else "default",
        linestyle=curve.dash,
        marker="o" if kept.sum() == 1 else None,
        color=curve.colour,
        alpha=curve.opacity,
    )


def _draw_stack(axis: Any, chart: Chart) -> None:
    if not chart.drawn:
        return
    # matplotlib simplifies lines, and not areas.
    step = 1 + len(chart.drawn[0].x) // POINTS
    parts = [np.nan_to_num(curve.y[::step]) for curve in chart.drawn]
    colours = [curve.colour for curve in chart.drawn]
    axis.stackplot(chart.drawn[0].x[::step], *parts, colors=colours, alpha=0.8, lw=0)
    axis.set_ylim(0, 1)


def _label(axis: Any, chart: Chart) -> None:
    axis.set_xlabel(chart.x_label)
    axis.ticklabel_format(scilimits=(-3, 4))
    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.drawn] or [np.ones(1)])
    if chart.is_share:
        axis.set_ylim(0, 1)
        axis.yaxis.set_major_formatter(ticker.PercentFormatter(1.0))
        return
    if chart.may_be_logarithmic and values.min() > 0 and values.max() > LOGARITHMIC * values.min():
        axis.set_yscale("log")
    elif 0 <= values.min() <= values.max() / 2:
        axis.set_ylim(bottom=0)
