"""`innet-drl analyze what-if`: rates and bottleneck of another machine, by the model of a sweep."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from innet_drl.analysis.flags import WhatIfFlags
from innet_drl.analysis.repeats import SPREAD
from innet_drl.analysis.sweep import output
from innet_drl.analysis.sweep.knee import recommended
from innet_drl.analysis.sweep.model import Setting, fit, left_out_errors
from innet_drl.analysis.sweep.point import combined
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import check_output
from innet_drl.train.observe.display import aligned

PREDICTED, MEASURED, ASKED = ROWS = ("this machine, predicted", "this machine, measured", "asked machine, predicted")
"""The sweep's machine with the recommended setting, by the model and as it was measured, and the flags' machine."""


def run(flags: WhatIfFlags) -> None:
    """Predicts, prints and writes.

    Raises:
        ConfigurationError: An unusable flag, or a file that is no sweep or has too few points.
    """
    check_output("--json", flags.json)
    if flags.json == flags.sweep:
        raise ConfigurationError(f"--json {flags.json}: the sweep is in it: choose another file")
    sweep = Sweep.load(flags.sweep)
    prediction = predict(sweep, flags)
    print(table(prediction, sweep))
    if flags.json is not None:
        with writing(str(flags.json), "choose another file with --json"):
            flags.json.write_text(json.dumps(prediction, indent=1) + "\n")
        print(f"written anew: {flags.json}")


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
    best = recommended(sweep.points)
    here = Setting(*best.key, sweep.gpus)
    asked = Setting(
        flags.actors or best.actors,
        flags.cores or sweep.machine.threads,
        flags.environments or best.environments,
        sweep.gpus if flags.gpus is None else flags.gpus,
        flags.gpu_speed,
    )
    asked = asked if flags.actors else model.fewest_actors(asked)
    repeats = sweep.repeats[best.key]
    rates = ("frames_per_s", "updates_per_s", "cpu")
    ends = {end: {rate: getattr(combined(repeats, of), rate) for rate in rates} for end, of in SPREAD.items()}
    measured = {**ends.pop("median"), **ends, "n": len(repeats), "bottleneck": ""}
    return {
        PREDICTED: dataclasses.asdict(here) | dataclasses.asdict(model.predict(here)),
        MEASURED: dataclasses.asdict(here) | measured,
        ASKED: dataclasses.asdict(asked) | dataclasses.asdict(model.predict(asked)),
        "model": left_out_errors(sweep.points, sweep.config, sweep.gpus),
        "measured_threads": sorted({point.threads for point in sweep.points}),
    }


def table(found: dict[str, Any], sweep: Sweep) -> str:
    """A prediction as text."""
    header = ("", "threads", "GPUs", "actors", "environments", "frames/s", "updates/s", "CPU", "bottleneck")
    gpus = "{gpus} x {gpu_speed:g}" if sweep.gpus else "0"
    form = (
        "{threads}|" + gpus + "|{actors}|{environments}|{frames_per_s:,.0f}|{updates_per_s:,.1f}|{cpu:.0%}|{bottleneck}"
    )
    rows = [(row, *form.format(**found[row]).split("|")) for row in ROWS]
    repeats = sweep.repeats[recommended(sweep.points).key]
    spreads = [output.cell(repeats, column) for column in header[5:8]]
    rows[1] = (f"{MEASURED} (n = {len(repeats)})", *rows[1][1:5], *spreads, "")
    asked = found[ASKED]
    lines = [aligned([header, *rows]), output.errors(found["model"]), *output.disturbed(sweep)]
    if asked["threads"] > max(found["measured_threads"]):
        lines.append(
            f"{asked['threads']} threads are more than the {max(found['measured_threads'])} that were measured: "
            "memory bandwidth, clock rates and the network may limit a larger machine earlier, and the error grows"
        )
    if asked["gpus"] > max(1, sweep.gpus):
        lines.append("averaging the gradients of several GPUs is not part of the model: an upper bound")
    return "\n".join(lines)
