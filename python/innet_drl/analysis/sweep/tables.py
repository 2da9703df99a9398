"""The output of `innet-drl analyze` as text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from innet_drl.analysis.sweep.machine import Machine
from innet_drl.analysis.sweep.point import Point
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.train.observe.display import aligned


def machine(found: Machine) -> str:
    """A machine in one line."""
    cores = "" if found.cores is None else f" of {found.cores} cores"
    gpus = ", ".join(f"{gpu.name} with {gpu.multiprocessors} multiprocessors" for gpu in found.gpus)
    learner = gpus or "no GPU for the learner: a CPU learner beside CPU actors is measured"
    return f"{found.processor}, {found.threads} hardware threads{cores}, {found.memory_bytes >> 30} GiB; {learner}"


def name(key: tuple[int, int, int]) -> str:
    """A point's actors, threads and environments."""
    return f"{key[0]} actors, {key[1]} threads, {key[2]} environments"


def line(point: Point) -> str:
    """A point in one line."""
    return f"{name(point.key)}: {point.frames_per_s:,.0f} frames/s, {point.updates_per_s:,.1f} updates/s"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


COLUMNS: dict[str, Callable[[Point], str]] = {
    "actors": lambda point: str(point.actors),
    "threads": lambda point: str(point.threads),
    "environments": lambda point: str(point.environments),
    "frames/s": lambda point: f"{point.frames_per_s:,.0f}",
    "updates/s": lambda point: f"{point.updates_per_s:,.1f}",
    "ratio": lambda point: f"{point.samples_per_insert:.2f}",
    "CPU": lambda point: f"{point.cpu:.0%}",
    "GPU": lambda point: _optional(point.gpu, ".0%"),
    "CPU W": lambda point: _optional(point.cpu_watts, ".1f"),
    "GPU W": lambda point: _optional(point.gpu_watts, ".1f"),
    "frames/J": lambda point: _optional(point.frames_per_joule, ",.1f"),
    "others": lambda point: f"{point.others:.0%}",
}
"""Columns of the table of points."""


def points(found: Sequence[Point]) -> str:
    """All points as a table."""
    ordered = sorted(found, key=lambda point: (point.threads, point.environments, point.actors))
    return aligned([list(COLUMNS), *([cell(point) for cell in COLUMNS.values()] for point in ordered)])


def summary(sweep: Sweep) -> str:
    """The results of the points, and the missing counters."""
    found = sweep.results
    lines = [f"no {counter}, whose columns are empty: {reason}" for counter, reason in sweep.missing.items()]
    for what, at in found["knee"].items():
        reached = "beyond the swept numbers" if at is None else f"{at:g}"
        lines.append(f"knee, where 10 % more {what} buy less than 5 % more frames: {reached}")
    if found["threads_per_sm"] is None:
        lines.append("hardware threads per GPU multiprocessor: none, the learner has no GPU")
    else:
        bound = "" if found["knee"]["threads"] is not None else "at least "
        lines.append(f"hardware threads per GPU multiprocessor: {bound}{found['threads_per_sm']:g}")
    chosen = found["recommended"]
    lines.append(
        f"recommended: --actors {chosen['actors']} --environments {chosen['environments']} on {chosen['threads']} "
        f"hardware threads, {chosen['share_of_best']:.0%} of the highest rates"
    )
    model = found["model"]
    if model is not None:
        lines.append(
            "model: frames/s of a point that is left out of the fit are off by "
            f"{model['left_out_error_median']:.0%} at the median, {model['left_out_error_largest']:.0%} at most"
        )
    return "\n".join(lines)


def prediction(found: dict[str, Any], sweep: Sweep) -> str:
    """The prediction of `innet-drl analyze what-if`."""
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
