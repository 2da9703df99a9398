"""The pictures of a sweep: speed-up, utilization and power over actors, threads and environments."""

from __future__ import annotations

from pathlib import Path

from innet_drl.analysis import pictures
from innet_drl.analysis.sweep.knee import NUMBERS, curve_of
from innet_drl.analysis.sweep.sweep_file import Sweep

GREY = "#888888"
SPEED_UP = "speed-up"
ROWS = {
    SPEED_UP: {"frames/s": "frames_per_s", "updates/s": "updates_per_s"},
    "utilization": {"CPU": "cpu", "GPU": "gpu"},
    "power, W": {"CPU": "cpu_watts", "GPU": "gpu_watts", "both": "watts"},
}
"""Rows of the picture, with the curves of each."""


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
