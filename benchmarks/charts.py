"""Pictures of recorded results, readable on light and on dark pages."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.growth import AXES
from benchmarks.report import Line
from innet_drl.analysis import pictures

GREY = "#768390"
OURS = "#2f81f7"
OTHER = "#bc6c25"
CURVES = (OURS, "#1a5fb4", "#79b8ff", OTHER, "#2ea043", "#8250df", GREY)
LEARNING_AXES = (("seconds", 60.0, "minutes of training on two cores"), ("frames", 1e6, "million frames"))
STYLE = {
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "legend.labelcolor": GREY,
    "savefig.transparent": True,
    "text.color": GREY,
    "xtick.color": GREY,
    "ytick.color": GREY,
}


def results(ratios: list[tuple[str, float, str]], path: Path) -> None:
    """Draws a bar for each benchmark: the ratio to the best peer, with the peer's name."""
    with pictures.drawing(path, 7.2, 0.34 * len(ratios) + 0.7, STYLE) as figure:
        axes = figure.subplots()
        places = range(len(ratios))
        axes.barh(places, [ratio - 1 for _, ratio, _ in ratios], left=1, color=OURS, height=0.62)
        for place, (_, ratio, text) in zip(places, ratios, strict=True):
            axes.text(1.05 * ratio, place, text, va="center", in_layout=False)
        axes.set_xscale("log")
        axes.set_xlim(1, 40 * max(ratio for _, ratio, _ in ratios))  # the texts need room
        axes.set_xticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
        axes.set_xlabel("times as good as the best peer", loc="left")
        axes.minorticks_off()
        axes.set_yticks(places, [work for work, _, _ in ratios])
        axes.invert_yaxis()


def learning(record: Path, path: Path) -> None:
    """Draws scores over minutes of training and over frames, a curve for each run."""
    curves: dict[str, list[Line]] = {}
    for text in record.read_text().splitlines():
        if "score" in (line := json.loads(text)):
            curves.setdefault(line["run"], []).append(line)
    with pictures.drawing(path, 7.2, 2.8, STYLE) as figure:
        panels = figure.subplots(1, 2, sharey=True)
        for axes, (name, scale, label) in zip(panels, LEARNING_AXES, strict=True):
            for number, (run, lines) in enumerate(curves.items()):
                at = [line[name] / scale for line in lines]
                colour = CURVES[number % len(CURVES)]
                axes.plot(at, [line["score"] for line in lines], color=colour, linewidth=1.3, label=run)
            axes.set_xlabel(label)
            axes.set_xlim(0)
            axes.grid(alpha=0.3, color=GREY)
        panels[0].set_ylabel("mean score of the last 100 games")
        panels[0].legend(frameon=False)


def growth(of: dict[str, list[Line]], path: Path) -> None:
    """Draws cost over size for each axis, with the expected slope."""
    columns = 5
    with pictures.drawing(path, 13, 6.4, STYLE) as figure:
        places = figure.subplots(-(-len(AXES) // columns), columns, squeeze=False)
        for place in places.flat[len(AXES) :]:
            place.remove()
        for axis, place in zip(AXES, places.flat, strict=False):
            points = [(line["at"], line["value"]) for line in of[f"growth_{axis.name}"] if "value" in line]
            if not points:
                continue
            at, cost = zip(*points, strict=True)
            place.loglog(at, cost, "o-", color=OURS, markersize=4)
            expected = [cost[0] * (each / at[0]) ** axis.order for each in at]
            place.loglog(at, expected, "--", color=GREY, linewidth=1)
            place.set_title(axis.name.replace("_", " "), fontsize=10)
            place.set_ylabel("µs")
            place.yaxis.set_major_formatter("{x:,g}")
            place.set_xticks(at, [f"{each:,}" if each < 1e4 else f"{each:.0e}" for each in at], fontsize=7)
            place.minorticks_off()
            place.grid(alpha=0.3)
            place.set_ylim(min(cost) / 3, max(*cost, *expected) * 3)
