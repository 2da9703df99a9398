"""The picture of a breakdown: a bar for each process with a segment for each activity; side threads are thinner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl

from innet_drl.analysis import pictures
from innet_drl.analysis.bars import KINDS, Breakdown

COLOURS = {"computation": "Blues", "communication": "Oranges", "waiting": "Greys", "bookkeeping": "Purples"}
"""Colour map of each kind of activity."""
HEIGHT, THIN = 0.8, 0.4
"""Heights of the bars of main threads and of side threads."""
LABELLED = 0.05
"""Smallest share that has a label in the bar."""


def draw(breakdowns: Sequence[Breakdown], path: Path) -> None:
    """Draws the bars of runs, one below the other.

    Raises:
        RunFolderError: The file cannot be written.
    """
    rows = [(breakdown, bar) for breakdown in breakdowns for bar in breakdown.shown]
    with pictures.drawing(path, 8, 1.4 + 0.32 * len(rows)) as figure:
        axis = figure.add_subplot()
        left = [0.0] * len(rows)
        for kind, activities in KINDS.items():
            present = [activity for activity in activities if any(activity in bar.shares for _, bar in rows)]
            for number, activity in enumerate(present):
                colour = mpl.colormaps[COLOURS[kind]](0.1 + 0.7 * (number + 1) / (len(present) + 1))
                shares = [bar.shares.get(activity, 0.0) for _, bar in rows]
                heights = [THIN if bar.thread else HEIGHT for _, bar in rows]
                drawn = axis.barh(range(len(rows)), shares, heights, left, color=colour, label=activity)
                labels = [f"{share:.0%}" if share >= LABELLED else "" for share in shares]
                axis.bar_label(drawn, labels, label_type="center", fontsize=6)
                left = [before + share for before, share in zip(left, shares, strict=True)]
        several = len(breakdowns) > 1
        names = [f"{breakdown.path.name}: {bar.name}" if several else bar.name for breakdown, bar in rows]
        axis.set_yticks(
            range(len(rows)),
            [f"{name} (overlapped)" if bar.thread else name for name, (_, bar) in zip(names, rows, strict=True)],
        )
        axis.invert_yaxis()
        axis.set_xlim(0, 1)
        axis.xaxis.set_major_formatter("{x:.0%}")
        axis.set_xlabel("share of the process's time")
        figure.legend(loc="outside lower center", ncols=5, fontsize=7)
