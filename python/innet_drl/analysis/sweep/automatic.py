"""`innet-drl train --actors auto`: the recommendation of a sweep of this machine and settings, or a rule of thumb."""

from __future__ import annotations

import dataclasses
import json
import logging
import shlex
from typing import Any

from innet_drl.analysis.flags import RatioFlags
from innet_drl.analysis.sweep import cache
from innet_drl.analysis.sweep.knee import recommended
from innet_drl.analysis.sweep.machine import Machine, this_machine
from innet_drl.analysis.sweep.ratio import lists_of
from innet_drl.train import preset
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

POINT_SECONDS = 30.0
"""Approximate time of a sweep's point with its start, for a message."""


def with_recommendation(config: Config, chosen: tuple[str, ...], preset_name: str) -> Config:
    """Returns settings with the recommended actors and environments, and logs the reason.

    Args:
        config: The run's settings.
        chosen: Settings to choose: `actors`, and `environments` unless the user has given them.
        preset_name: Preset of the settings, for the suggested command.

    Raises:
        ConfigurationError: A serial run has no actors to choose.
    """
    if config.serial:
        raise ConfigurationError("--actors auto: a serial run has one actor: omit --actors or --serial")
    machine = this_machine(config.device)
    path = cache.file_of(machine, config)
    sweep = cache.read(path)
    points = [] if sweep is None else sweep.points
    if "environments" not in chosen:
        points = [point for point in points if point.environments == config.environments]
    if sweep is None or not points:
        actors, reason = rule(config, machine)
        logger.info(
            "--actors auto: %d, with %d environments each: %s %s; measure with `%s` (about %d minutes), and auto takes "
            "its recommendation",
            actors,
            config.environments,
            "no sweep of these settings was measured on this machine, so a rule applies:"
            if sweep is None
            else f"{path} has no point with so many environments, so a rule applies:",
            reason,
            _command(config, preset_name, environments=sweep is not None),
            round(_seconds(config, machine) / 60),
        )
        return dataclasses.replace(config, actors=actors)
    best = recommended(points)
    logger.info(
        "--actors auto: %d, with %d environments each: recommended by the sweep of %s with %d points, where it reached "
        "%s frames/s on %d of %d hardware threads (%s)",
        best.actors,
        best.environments,
        sweep.measured,
        len(sweep.points),
        f"{best.frames_per_s:,.0f}",
        best.threads,
        machine.threads,
        path,
    )
    return dataclasses.replace(config, actors=best.actors, environments=best.environments)


def rule(config: Config, machine: Machine) -> tuple[int, str]:
    """Returns the number of actors without a sweep, from the threads that learners do not use, and the reason."""
    each = max(config.actor_threads, config.environment_threads)
    if machine.gpus:
        left, reason = machine.threads - config.learners, "all hardware threads but one for each learner"
    else:
        left, reason = machine.threads // 2, "half of the hardware threads, as the learner computes on the others"
    return max(1, left // each), reason if each == 1 else f"{reason}, divided by {each} threads of an actor"


def _command(config: Config, preset_name: str, *, environments: bool) -> str:
    """The command that measures these settings; with `environments`, only for their number of environments."""
    ours, theirs = config.as_dict(), preset(preset_name).as_dict()
    changed = [f"{name}={_text(ours[name])}" for name in cache.SPEED_SETTINGS if ours[name] != theirs[name]]
    settings = ["--settings", *changed] if changed else []
    only = ["--environments", str(config.environments)] if environments else []
    return shlex.join(["innet-drl", "analyze", "ratio", "--preset", preset_name, *only, *settings])


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _seconds(config: Config, machine: Machine) -> float:
    return POINT_SECONDS * lists_of(RatioFlags(), config, machine.threads).most_points(grid=False)
