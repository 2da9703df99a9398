"""The figures of the papers' evaluations, from the lines that they printed."""

from __future__ import annotations

from pathlib import Path

import tyro

from benchmarks import report
from benchmarks.gradients.tables import tables
from benchmarks.paper import figures as paper


def figures(record: tyro.conf.Positional[Path]) -> None:
    """Prints results of `paper` and `gradients` as tables. Draws the results of `paper` as an SVG file beside RECORD.

    Args:
        record: File with the lines that they printed.
    """
    of = report.read(record)
    if of["paper"]:
        print(paper.tables(of["paper"]))
        paper.draw(of["paper"], record.with_suffix(".svg"))
    if of["gradients"]:
        print(tables(of["gradients"]))
