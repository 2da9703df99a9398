"""Finished sweeps in the user's cache directory, for `innet-drl train --actors auto`.

`$XDG_CACHE_HOME/innet-drl/sweeps`, by default in `~/.cache`, has a file for each release, machine and combination of
`SPEED_SETTINGS`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

import innet_drl as innet
from innet_drl.analysis.sweep.machine import Machine
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.train.errors import ConfigurationError, RunFolderError
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

SPEED_SETTINGS = (
    *("environment", "environment_args", "environment_wrappers", "async_environments", "environment_threads"),
    *("actor_threads", "pull_period", "stack", "frame_size", "full_action_set", "life_loss_ends"),
    *("network", "channels", "hidden", "layers", "layer_norm"),
    *("loss", "munchausen", "atoms", "quantiles", "samples_per_insert", "max_version_lag", "n_step", "chunk_steps"),
    *("prefetch", "batch_size", "publish_period", "device", "learners", "learner_threads", "targets_ahead"),
    *("numerics", "layout"),
)
"""Settings that affect the rates of a run, except actors and environments."""


def cache_folder() -> Path:
    """The folder of the sweeps."""
    # The XDG Base Directory Specification: a relative path is ignored.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "innet-drl" / "sweeps"


def file_of(machine: Machine, config: Config) -> Path:
    """The file of the sweep of a machine and settings."""
    settings = config.as_dict()
    key = {
        "release": innet.__version__,
        "machine": [machine.processor, machine.threads, [gpu.name for gpu in machine.gpus]],
        "settings": {name: settings[name] for name in SPEED_SETTINGS},
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return cache_folder() / f"{digest[:16]}.json"


def keep(sweep: Sweep) -> Path | None:
    """Caches a finished sweep and returns its file; `None`, with a warning, if it cannot be written.

    Other points of earlier sweeps are kept.
    """
    path = file_of(sweep.machine, sweep.config)
    earlier = read(path)
    others = [] if earlier is None else [point for point in earlier.points if sweep.point(point.key) is None]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        dataclasses.replace(sweep, points=[*others, *sweep.points], results={}).save(path)
    except (OSError, RunFolderError) as error:
        logger.warning("the sweep is not kept for --actors auto: %s", error)
        return None
    return path


def read(path: Path) -> Sweep | None:
    """Reads a cached sweep; `None` if there is none or, with a warning, if it is damaged."""
    if not path.is_file():
        return None
    try:
        return Sweep.load(path)
    except ConfigurationError as error:
        logger.warning("a kept sweep is ignored: %s", error)
        return None
