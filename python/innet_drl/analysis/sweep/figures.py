"""The pictures of a sweep: speed-up, utilization and power over actors, threads and environments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from innet_drl.analysis import pictures
from innet_drl.analysis.sweep.knee import NUMBERS, curve_of
from innet_drl.analysis.sweep.point import Point
from innet_drl.analysis.sweep.sweep_file import Sweep

GREY = "#888888"


def draw(sweep: Sweep, path: Path) -> None:
    """Draws speed-up, utilization and power over actors, threads and environments.

    Raises:
        RunFolderError: The file cannot be written.
    """
    with pictures.drawing(path, 11, 7) as figure:
        axes = figure.subplots(3, 3)
        for column, name in enumerate(NUMBERS):
            curve = curve_of(sweep.points, name)
            _speed_up(axes[0][column], curve, name, sweep.results["knee"].get(name))
            _lines(axes[1][column], curve, name, {"CPU": "cpu", "GPU": "gpu"}, "utilization")
            _lines(axes[2][column], curve, name, {"CPU": "cpu_watts", "GPU": "gpu_watts", "both": "watts"}, "power, W")


def _speed_up(axis: Any, curve: Sequence[Point], name: str, knee: float | None) -> None:
    counts, first = [getattr(point, name) for point in curve], curve[0]
    for attribute, label, style in (("frames_per_s", "frames/s", "o-"), ("updates_per_s", "updates/s", "s--")):
        base = getattr(first, attribute) or 1.0
        axis.plot(counts, [getattr(point, attribute) / base for point in curve], style, label=label, ms=4)
    axis.plot(counts, [count / counts[0] for count in counts], ":", color=GREY, label="ideal")
    if knee is not None:
        axis.axvline(knee, color=GREY, lw=0.8)
        axis.annotate("knee", (knee, 1.0), color=GREY)
    _name(axis, name, "speed-up")


def _lines(axis: Any, curve: Sequence[Point], name: str, shown: dict[str, str], title: str) -> None:
    counts = [getattr(point, name) for point in curve]
    for label, attribute in shown.items():
        values = [getattr(point, attribute) for point in curve]
        if None not in values:
            axis.plot(counts, values, "o-", label=label, ms=4)
    if not axis.lines:
        axis.text(0.5, 0.5, "no counter", transform=axis.transAxes, ha="center", color=GREY)
    _name(axis, name, title)


def _name(axis: Any, name: str, title: str) -> None:
    axis.set_ylim(bottom=0)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel(name)
    axis.set_title(title)
    if axis.lines:
        axis.legend(fontsize=7)
