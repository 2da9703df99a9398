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
        shown = dict.fromkeys(activity for _, bar in rows for activity in bar.shares)
        for kind, activities in KINDS.items():
            present = [activity for activity in activities if activity in shown]
            for number, activity in enumerate(present):
                colour = mpl.colormaps[COLOURS[kind]](0.1 + 0.7 * (number + 1) / (len(present) + 1))
                for row, (_, bar) in enumerate(rows):
                    share = bar.shares.get(activity, 0.0)
                    left = _left(bar.shares, activity)
                    label = activity if row == 0 else None
                    axis.barh(row, share, THIN if bar.thread else HEIGHT, left, color=colour, label=label)
                    if share >= LABELLED:
                        axis.text(left + share / 2, row, f"{share:.0%}", ha="center", va="center", fontsize=6)
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


def _left(shares: dict[str, float], activity: str) -> float:
    """Sum of the shares before an activity, in the order of the kinds."""
    order = [name for activities in KINDS.values() for name in activities]
    return sum(shares.get(name, 0.0) for name in order[: order.index(activity)])
