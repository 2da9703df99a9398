"""Tables and picture of `python -m benchmarks gradients`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.charts import CURVES, GREY, OTHER, OURS, STYLE
from benchmarks.repeated import cell, grouped, repeats, tail
from benchmarks.report import Line, markdown
from innet_drl.analysis import pictures

FIGURES: dict[str, tuple[str, Callable[[Line], str]]] = {
    "sum": ("ms of a sum", lambda line: f"{cell(line, ',.2f')}, {tail(line, ',.2f')} of {line['count']}"),
    "processor": ("ms of processors", lambda line: cell(line, ",.2f")),
    "datagrams": ("datagrams for a second of the server's processor", lambda line: cell(line, ",.0f")),
    "iteration": ("ms of an iteration", cell),
    "computing": ("computing", cell),
    "communication": ("communication", cell),
    "share": ("its share", lambda line: cell(line, ".0%")),
    "updates": ("updates/s", cell),
    "counted": ("counted gradients", lambda line: cell(line, ".0%")),
    "score": ("score", cell),
    "to the goal": ("s to the goal", lambda line: f"{cell(line)}, n = {line['n']}"),
}
"""Figures by name: title and cell of a table."""
PARTS = {"computing": GREY, "communication": OURS}
"""Colours of an iteration's parts."""
SUMS = ("innet", "innet-fixed", "innet-racks", "gloo", "parameter-server")
MARKS = dict(zip(SUMS, zip(CURVES, "os^Dv", strict=False), strict=False))
"""Colour and marker of a system's sums."""
COLUMNS, PANEL = 2, 3.6
"""Most panels side by side, and inches of one: the text of two is readable on a page of 700 pixels."""


def tables(lines: list[Line], path: str) -> str:
    """Returns the figures as Markdown; `path` is the network between workers and servers."""
    parts = []
    for (task, workers), found in grouped(lines, "task", "workers"):
        columns = [what for what in FIGURES if any(line["what"] == what for line in found)]
        rows = []
        for (size, system, loss), row in grouped(found, "bytes", "system", "loss"):
            name = system if loss is None else f"{system}, one by one, {loss:.1%} lost"
            cells = {line["what"]: FIGURES[line["what"]][1](line) for line in row}
            rows.append([name, f"{size:,}", *(cells.get(what, "-") for what in columns)])
        head = [f"{workers} workers, {path}: {task}, {repeats(found)}", "bytes"]
        parts.append(markdown([*head, *(FIGURES[what][0] for what in columns)], rows))
    return "\n".join(parts)


def draw(lines: list[Line], picture: Path, path: str) -> None:
    """Draws the times of sums, a panel for each number of workers, and the parts of iterations, one for each size."""
    sums = [line for line in lines if line["what"] == "sum" and line["loss"] is None]
    panels: list[tuple[Any, str, list[Line]]] = [
        *((_draw_sums, f"{workers} workers", found) for (workers,), found in grouped(sums, "workers")),
        *(
            (_draw_iterations, f"{workers} workers, {size:,} bytes", found)
            for (task, workers, size), found in grouped(lines, "task", "workers", "bytes")
            if task == "iterations"
        ),
    ]
    columns, rows = min(COLUMNS, len(panels)) or 1, -(-len(panels) // COLUMNS) or 1
    with pictures.drawing(picture, PANEL * columns, 2.6 * rows + 0.9, STYLE) as figure:
        axes = list(figure.subplots(rows, columns, squeeze=False).flat)
        for axis, (draw_panel, title, found) in zip(axes, panels, strict=False):
            draw_panel(axis, found)
            axis.set_title(f"{title}, {repeats(found)}")
        for axis in axes[len(panels) :]:
            axis.remove()
        figure.suptitle(f"Medians, {path};\nwhiskers: where 95 of 100 such medians fall", fontsize="medium")
        pictures.legend(figure, ncols=2 * columns, frameon=False)


def _draw_sums(axis: Any, lines: list[Line]) -> None:
    from matplotlib.ticker import LogLocator

    for (system,), found in grouped(lines, "system"):
        colour, marker = MARKS[system]
        whiskers = [[line["value"] - line["low"] for line in found], [line["high"] - line["value"] for line in found]]
        at, values = [line["bytes"] for line in found], [line["value"] for line in found]
        axis.errorbar(at, values, whiskers, marker=marker, color=colour, ms=4, lw=1, capsize=3, label=system)
    axis.loglog()
    sizes = sorted({line["bytes"] for line in lines})
    axis.set_xticks(sizes, [f"{size:,}" for size in sizes], rotation=30, ha="right")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.minorticks_off()
    axis.set_xlabel("bytes of a gradient (logarithmic)")
    axis.set_ylabel("ms of a sum (logarithmic)")
    axis.grid(alpha=0.3)


def _draw_iterations(axis: Any, lines: list[Line]) -> None:
    found = {(line["what"], line["system"]): line for line in lines}
    systems = [system for what, system in found if what == "iteration"]
    left = np.zeros(len(systems))
    for part, colour in PARTS.items():
        values = np.array([found[part, system]["value"] for system in systems])
        axis.barh(systems, values, left=left, color=colour, label=part)
        left += values
    ends = [[found["iteration", each][end] for each in systems] for end in ("value", "low", "high")]
    value, low, high = np.array(ends)
    axis.errorbar(value, systems, xerr=[value - low, high - value], fmt="none", ecolor=OTHER, capsize=3)
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("ms of a training iteration")
