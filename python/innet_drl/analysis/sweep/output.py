"""The output of `innet-drl analyze ratio`: text, and a picture of speed-up, utilization and power."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from innet_drl.analysis import pictures
from innet_drl.analysis.repeats import NOISY, SPREAD, spread, unsteady, write_csv
from innet_drl.analysis.sweep.knee import curve_of
from innet_drl.analysis.sweep.point import ROLES, SWEPT, Key, Point, combined
from innet_drl.analysis.sweep.sweep_file import Machine, Sweep
from innet_drl.train.observe.display import aligned

GREY = "#888888"
SPEED_UP = "rate, first point = 1"
ROWS = {
    SPEED_UP: {"frames/s": "frames_per_s", "updates/s": "updates_per_s"},
    "utilization, share of 1": {"CPU": "cpu", "GPU": "gpu", "other programs": "others"},
    "power, W": {"CPU": "cpu_watts", "GPU": "gpu_watts", "both": "watts"},
}
"""Rows of the picture, with the curves of each."""
COLUMNS = {
    "actors": ("actors", ".0f"),
    "threads": ("threads", ".0f"),
    "environments": ("environments", ".0f"),
    "frames/s": ("frames_per_s", ",.0f"),
    "updates/s": ("updates_per_s", ",.1f"),
    "ratio": ("samples_per_insert", ".2f"),
    "CPU": ("cpu", ".0%"),
    "GPU": ("gpu", ".0%"),
    "CPU W": ("cpu_watts", ".1f"),
    "GPU W": ("gpu_watts", ".1f"),
    "frames/J": ("frames_per_joule", ",.1f"),
    "others": ("others", ".0%"),
}
"""Columns of the table of points, with their formats."""


def machine(found: Machine) -> str:
    """A machine in one line."""
    cores = "" if found.cores is None else f" of {found.cores} cores"
    gpus = ", ".join(f"{gpu.name} with {gpu.multiprocessors} multiprocessors" for gpu in found.gpus)
    learner = gpus or "no GPU for the learner: a CPU learner beside CPU actors is measured"
    return f"{found.processor}, {found.threads} hardware threads{cores}, {found.memory_bytes >> 30} GiB; {learner}"


def name(key: Key) -> str:
    """A point's actors, threads and environments."""
    return f"{key[0]} actors, {key[1]} threads, {key[2]} environments"


def cell(repeats: Sequence[Point], column: str) -> str:
    """The median of a point's repeats with its spread: `12.0 (11.5-12.6)`."""
    attribute, form = COLUMNS[column]
    values = [getattr(combined(repeats, of), attribute) for of in SPREAD.values()]
    median, least, most = ("" if None in values else format(value, form) for value in values)
    return median if least == most else f"{median} ({least}-{most})"


def points(sweep: Sweep) -> str:
    """All points as a table, without columns of missing counters."""
    columns = [column for column in COLUMNS if cell(sweep.measured[:1], column)]
    rows = [(*(cell(repeats, column) for column in columns), str(len(repeats))) for repeats in sweep.repeats.values()]
    return aligned([(*columns, "n"), *rows])


def disturbed(sweep: Sweep) -> list[str]:
    """The points that other programs may have disturbed, as a line if there are any."""
    most = {key: max(point.others for point in repeats) for key, repeats in sweep.repeats.items()}
    noisy = "; ".join(f"{name(key)} ({share:.0%})" for key, share in most.items() if share > NOISY)
    return [f"disturbed by other programs, end them and measure into another file: {noisy}"] if noisy else []


def errors(model: dict[str, Any] | None) -> str:
    """The model's errors."""
    if model is None:
        return "error of the model: unknown with so few points"
    median, largest = model["left_out_error_median"], model["left_out_error_largest"]
    where = f"median {median:.0%}, largest {largest:.0%} ({name((*model['largest_at'].values(),))})"
    return f"error of the model's frames/s on this machine, at points that are left out of the fit: {where}"


def summary(sweep: Sweep) -> str:
    """The results of the points, and the missing counters."""
    found = sweep.results
    lines = [f"no {counter}, and no columns of it: {reason}" for counter, reason in sweep.missing.items()]
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
    rates = [[point.frames_per_s for point in repeats] for repeats in sweep.repeats.values()]
    more = unsteady([(statistics.median(each), *spread(each)) for each in rates], max(map(len, rates)))
    return "\n".join([*lines, errors(found["model"]), *disturbed(sweep), *more])


def report(sweep: Sweep, table: Path | None, plot: Path) -> None:
    """Prints the results, and writes the files beside the sweep's own."""
    print(points(sweep), "medians of n measurements (where 95 of 100 such medians fall)", summary(sweep), sep="\n")
    if table is not None:
        rows = map(dataclasses.asdict, sweep.measured)
        write_csv(table, [{name: each[name] for name in each if name not in ROLES} for each in rows])
    if pictures.can_draw():
        draw(sweep, plot)
        print(f"written anew: {plot}")
    else:
        print("no picture: matplotlib is not installed (pip install 'innet-drl[bench]')")


def draw(sweep: Sweep, path: Path) -> None:
    """Draws speed-up, utilization and power over actors, threads and environments.

    Raises:
        RunFolderError: The file cannot be written.
    """
    rows = [row for row in ROWS if any(getattr(sweep.measured[0], name) is not None for name in ROWS[row].values())]
    n = " or ".join(map(str, sorted({len(repeats) for repeats in sweep.repeats.values()})))
    several = [name for name in SWEPT if len(curve_of(sweep.points, name)) > 1] or SWEPT[:1]
    style: dict[Any, object] = {"lines.markersize": 4, "errorbar.capsize": 3}
    with pictures.drawing(path, 2.4 * len(several), 0.5 + 2.6 * len(rows), style) as figure:
        figure.suptitle(f"{sweep.config.environment_name}: median and spread of n = {n}")
        for across, swept in zip(figure.subplots(len(rows), len(several), squeeze=False).T, several, strict=True):
            curve = curve_of(sweep.points, swept)
            spreads = [[combined(sweep.repeats[point.key], of) for point in curve] for of in SPREAD.values()]
            numbers = [getattr(point, swept) for point in curve]
            others = ", ".join(f"{getattr(curve[0], other)} {other}" for other in SWEPT if other != swept)
            for axis, row in zip(across, rows, strict=True):
                for label, attribute in ROWS[row].items():
                    values = np.array([[getattr(point, attribute) for point in points] for points in spreads], float)
                    # A missing counter has no values.
                    if not np.isnan(values).any():
                        middle, low, high = values / ((values[0, 0] or 1.0) if row == SPEED_UP else 1.0)
                        axis.errorbar(numbers, middle, (middle - low, high - middle), fmt="o-", label=label)
                axis.set_ylim(bottom=0)
                axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
                axis.set_xlabel(f"{swept} ({others})")
                axis.set_ylabel(row)
            ideal = [number / numbers[0] for number in numbers]
            across[0].plot(numbers, ideal, ":", color=GREY, label="ideal", scaley=False)
            if (knee := sweep.results["knee"].get(swept)) is not None:
                across[0].axvline(knee, color=GREY, lw=0.8, label="knee")
            for axis in across:
                axis.legend(fontsize=7)
