"""The flags of `innet-drl analyze breakdown`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import tyro


@dataclass(frozen=True)
class BreakdownFlags:
    """Show the time of the actors and learners of runs: environment, inference, update, communication, waiting."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, which may be training."""
    json: Path | None = None
    """File for the shares of every process."""
    plot: Path | None = None
    """Picture of the bars, .svg or .png; needs matplotlib."""
    trace: Path | None = None
    """File for a trace in the JSON format of Chrome, which ui.perfetto.dev opens, of runs trained with
    `--trace-seconds`."""
