"""`innet-drl analyze what-if`: rates and bottleneck of another machine, by the model of a sweep."""

from __future__ import annotations

import dataclasses
import json
import statistics
from typing import Any

from innet_drl.analysis.flags import WhatIfFlags
from innet_drl.analysis.sweep.knee import recommended
from innet_drl.analysis.sweep.model import Setting, fit, left_out_errors
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.observe.display import aligned


def run(flags: WhatIfFlags) -> None:
    """Predicts, prints and writes.

    Raises:
        ConfigurationError: An unusable flag, or a file that is no sweep or has too few points.
    """
    sweep = Sweep.load(flags.sweep)
    prediction = predict(sweep, flags)
    print(table(prediction, sweep))
    if flags.json is not None:
        with writing(str(flags.json), "choose another file with --json"):
            flags.json.write_text(json.dumps(prediction, indent=1) + "\n")


def predict(sweep: Sweep, flags: WhatIfFlags) -> dict[str, Any]:
    """Returns the prediction for the flags' machine beside the one for the measured machine, as plain JSON values."""
    if sweep.gpus == 0 and (flags.gpus or flags.gpu_speed != 1.0):
        raise ConfigurationError(
            f"{flags.sweep} was measured without a GPU, and how much faster one updates is unknown: leave --gpus and "
            "--gpu-speed away, or sweep on a machine with a GPU"
        )
    if sweep.gpus and flags.gpus is not None and flags.gpus < 1:
        raise ConfigurationError(
            f"--gpus {flags.gpus}: {flags.sweep} has no update on a CPU: sweep with --settings device=cpu for that"
        )
    if sweep.gpus and flags.gpu_speed != 1.0 and any(point.gpu is None for point in sweep.points):
        reason = sweep.missing.get("NVML", "no reason is known")
        raise ConfigurationError(
            f"--gpu-speed {flags.gpu_speed:g}: {flags.sweep} has no utilization of the GPU ({reason}): sweep with NVML"
        )
    model = fit(sweep.points, sweep.config, sweep.gpus)
    errors = left_out_errors(sweep.points, sweep.config, sweep.gpus)
    best = recommended(sweep.points)
    here = Setting(best.actors, sweep.machine.threads, best.environments, sweep.gpus)
    asked = Setting(
        flags.actors or best.actors,
        flags.cores or here.threads,
        flags.environments or best.environments,
        sweep.gpus if flags.gpus is None else flags.gpus,
        flags.gpu_speed,
    )
    settings = {
        "measured machine": model.fewest_actors(here),
        "asked machine": asked if flags.actors else model.fewest_actors(asked),
    }
    return {
        name: dataclasses.asdict(setting) | dataclasses.asdict(model.predict(setting))
        for name, setting in settings.items()
    } | {
        "left_out_error_median": statistics.median(errors) if errors else None,
        "measured_threads": sorted({point.threads for point in sweep.points}),
    }


def table(found: dict[str, Any], sweep: Sweep) -> str:
    """A prediction as text."""
    header = ("", "threads", "GPUs", "actors", "environments", "frames/s", "updates/s", "CPU", "bottleneck")
    rows = [
        (
            what,
            str(row["threads"]),
            f"{row['gpus']} x {row['gpu_speed']:g}" if row["gpus"] else "0",
            str(row["actors"]),
            str(row["environments"]),
            f"{row['frames_per_s']:,.0f}",
            f"{row['updates_per_s']:,.1f}",
            f"{row['cpu']:.0%}",
            row["bottleneck"],
        )
        for what, row in ((what, found[what]) for what in ("measured machine", "asked machine"))
    ]
    error, asked = found["left_out_error_median"], found["asked machine"]
    known = "unknown" if error is None else f"{error:.0%} at the median of points that were left out of the fit"
    lines = [aligned([header, *rows]), f"error: {known}, on the measured machine"]
    if asked["threads"] > max(found["measured_threads"]):
        lines.append(
            f"{asked['threads']} threads are more than the {max(found['measured_threads'])} that were measured: "
            "memory bandwidth, clock rates and the network may limit a larger machine earlier, and the error grows"
        )
    if asked["gpus"] > max(1, sweep.gpus):
        lines.append("averaging the gradients of several GPUs is not part of the model: an upper bound")
    return "\n".join(lines)
