"""A run as recorded in its folder: settings, metrics, evaluation, sessions and video."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl.train.errors import RunFolderError
from innet_drl.train.run_folder import FINISHED, RunFolder
from innet_drl.train.settings.config import Config


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run's folder."""

    path: Path
    name: str
    """Label in the report."""
    config: Config
    columns: dict[str, NDArray[np.float64]]
    """Values of each metric by line, NaN where missing; metrics of several values as `<metric>/<key>`."""
    evaluation: dict[str, Any] | None
    """`evaluation.json`."""
    sessions: list[dict[str, Any]]
    """`sessions.jsonl`."""
    video: Path | None
    """The newest video."""
    is_training: bool

    @property
    def lines(self) -> int:
        """Number of lines of metrics."""
        return len(self.columns.get("agent_steps", ()))

    def column(self, name: str) -> NDArray[np.float64]:
        """Returns a metric by line; NaN everywhere if no line has it."""
        return self.columns.get(name, np.full(self.lines, np.nan))

    def keys(self, name: str) -> list[str]:
        """Returns the keys of a metric of several values: actors by number, activities by their share of the run."""
        found = [column.partition("/")[2] for column in self.columns if column.startswith(f"{name}/")]
        if all(key.isdecimal() for key in found):
            return sorted(found, key=int)
        shares = self.shares(name)
        return sorted(found, key=lambda key: (-shares.get(key, 0.0), key))

    def last(self, name: str) -> float | None:
        """Returns the last value of a metric; `None` if it has none."""
        values = self.column(name)
        values = values[np.isfinite(values)]
        return float(values[-1]) if len(values) else None

    def shares(self, name: str) -> dict[str, float]:
        """Returns shares of the whole run's time, from the shares in its lines."""
        seconds = np.diff(self.column("time_s"), prepend=0.0)
        prefix = f"{name}/"
        sums = {
            column.removeprefix(prefix): float(np.nansum(values * seconds))
            for column, values in self.columns.items()
            if column.startswith(prefix)
        }
        total = sum(sums.values())
        return {key: value / total for key, value in sums.items()} if total > 0 else {}

    @property
    def state(self) -> str:
        """How the run ended, or that it has not."""
        if self.is_training:
            return "training now"
        if self.sessions:
            return str(self.sessions[-1].get("how", "no end was recorded: killed, or training on another machine"))
        return FINISHED if self.evaluation is not None else "its end was not recorded"

    @property
    def is_complete(self) -> bool:
        """Whether the run is training, or ended as it should."""
        return self.state in ("training now", FINISHED)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Converts the error of a read into one that names the file.

    Raises:
        RunFolderError: Instead of an `OSError`, or of a `ValueError` of damaged content.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{error.filename or path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged: {error}") from error


def read_run(path: Path, name: str) -> RecordedRun:
    """Reads a run's folder, for a report that names it `name`.

    Raises:
        RunFolderError: There is no run, or a file cannot be read or is damaged.
        ConfigurationError: Its settings are damaged, or of a newer release.
    """
    folder = RunFolder.open(path)
    config = folder.config()
    lines = read_lines(path / "metrics.jsonl")
    names = dict.fromkeys(name for line in lines for name in line)
    with reading(path / "metrics.jsonl"):
        columns = {each: np.array([line.get(each, math.nan) for line in lines], np.float64) for each in names}
    evaluation = None
    if (path / "evaluation.json").is_file():
        with reading(path / "evaluation.json"):
            evaluation = json.loads((path / "evaluation.json").read_text())
    with reading(path):
        newest = max(folder.videos.glob("*.mp4"), key=lambda video: video.stat().st_mtime, default=None)
        held = folder.is_held
    return RecordedRun(path, name, config, columns, evaluation, read_lines(path / "sessions.jsonl"), newest, held)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines, without those that a killed process or a full disk has cut; none without the file.

    Raises:
        RunFolderError: The file cannot be read.
    """
    found: list[dict[str, Any]] = []
    with reading(path):
        for line in path.read_bytes().splitlines() if path.exists() else ():
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
    return found
