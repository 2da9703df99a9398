"""The output of `innet-drl analyze ratio`: text, and a picture of speed-up, utilization and power."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from innet_drl.analysis import pictures
from innet_drl.analysis.sweep.knee import NUMBERS, curve_of
from innet_drl.analysis.sweep.point import Point
from innet_drl.analysis.sweep.sweep_file import Machine, Sweep
from innet_drl.train.observe.display import aligned

GREY = "#888888"
SPEED_UP = "speed-up"
ROWS = {
    SPEED_UP: {"frames/s": "frames_per_s", "updates/s": "updates_per_s"},
    "utilization": {"CPU": "cpu", "GPU": "gpu"},
    "power, W": {"CPU": "cpu_watts", "GPU": "gpu_watts", "both": "watts"},
}
"""Rows of the picture, with the curves of each."""


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


def draw(sweep: Sweep, path: Path) -> None:
    """Draws speed-up, utilization and power over actors, threads and environments.

    Raises:
        RunFolderError: The file cannot be written.
    """
    with pictures.drawing(path, 11, 7) as figure:
        for across, name in zip(figure.subplots(3, 3).T, NUMBERS, strict=True):
            curve = curve_of(sweep.points, name)
            counts = [getattr(point, name) for point in curve]
            for axis, (title, shown) in zip(across, ROWS.items(), strict=True):
                for label, attribute in shown.items():
                    values = [getattr(point, attribute) for point in curve]
                    if None not in values:
                        base = (values[0] or 1.0) if title == SPEED_UP else 1.0
                        axis.plot(counts, [value / base for value in values], "o-", label=label, ms=4)
                if not axis.lines:
                    axis.text(0.5, 0.5, "no counter", transform=axis.transAxes, ha="center", color=GREY)
                axis.set_ylim(bottom=0)
                axis.xaxis.get_major_locator().set_params(integer=True)
                axis.set_xlabel(name)
                axis.set_title(title)
            across[0].plot(counts, [count / counts[0] for count in counts], ":", color=GREY, label="ideal")
            if (knee := sweep.results["knee"].get(name)) is not None:
                across[0].axvline(knee, color=GREY, lw=0.8, label="knee")
            for axis in across:
                if axis.lines:
                    axis.legend(fontsize=7)
