"""The flags of `innet-drl analyze`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from innet_drl.train.settings.slices import Count, Natural, Positive


@dataclass(frozen=True)
class BreakdownFlags:
    """Show the time of the actors and learners of runs: environment, inference, update, communication, waiting."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, which may be training."""
    json: Path | None = None
    """File for the shares of every process."""


@dataclass(frozen=True)
class RatioFlags:
    """Sweep actors, hardware threads and environments of short training runs: which of them does this machine need?"""

    preset: str = "breakout"
    """Settings of the runs."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """File of settings, YAML or TOML, which changes the preset."""
    settings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="[KEY=VALUE ...]")] = ()
    """Settings that differ from the preset's, such as `batch_size=512 device=cpu`."""
    actors: tuple[Count, ...] = ()
    """Numbers of actors, such as 1 2 4; by default up to twice the hardware threads."""
    threads: tuple[Count, ...] = ()
    """Numbers of hardware threads for all processes of a run, by CPU affinity; by default halves of all."""
    environments: tuple[Count, ...] = ()
    """Numbers of environments of an actor; by default from a quarter to twice the preset's."""
    grid: bool = False
    """Measure every combination, and not one list after the other."""
    seconds: Positive = 10.0
    """Measured time of a point."""
    warm_up: Positive = 3.0
    """Seconds from a point's first update to its measured time, at least: it begins once the replay ratio was reached
    for so long, or after ten times as long."""
    repeats: Count = 3
    """Measurements of each point, whose medians decide. Each time the points of a list have another order."""
    seed: int = 0
    """Seed of the order."""
    json: Path = Path("ratio.json")
    """File for all measurements and the results. If it exists, the missing measurements are added."""
    csv: Path | None = None
    """File for all measurements as a table, a row each. It is written anew, as is the picture."""
    plot: Path | None = None
    """Picture, .svg, .png or .pdf; needs matplotlib. Beside the JSON file by default."""


@dataclass(frozen=True)
class WhatIfFlags:
    """Predict rates and the bottleneck for another machine from a sweep of `innet-drl analyze ratio`."""

    sweep: tyro.conf.Positional[Path]
    """The sweep's JSON file."""
    cores: Count | None = None
    """Hardware threads; the measured machine's by default."""
    gpus: Natural | None = None
    """GPUs, each with a learner; the measured number by default. 0 or more, and only if a GPU was measured."""
    gpu_speed: Positive = 1.0
    """Speed of a GPU, as a multiple of the measured one's."""
    actors: Count | None = None
    """Actors; by default the fewest that reach 99 % of the highest rate."""
    environments: Count | None = None
    """Environments of an actor; the recommended number of the sweep by default."""
    json: Path | None = None
    """File for the prediction, which is written anew."""
