"""A run as recorded in its folder: settings, metrics, evaluation, sessions and video.

Damaged lines and files are skipped with a note, so that a crashed run still has a report. Only the settings must be
intact.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl.train.errors import RunFolderError
from innet_drl.train.observe.display import Progress
from innet_drl.train.observe.metrics import METRICS
from innet_drl.train.observe.signs import WARM_UP, signs, values_of
from innet_drl.train.run_folder import FINISHED, RunFolder
from innet_drl.train.settings.config import Config

LINES_SHOWN = 10_000
"""Lines of metrics between two calls of `Progress`."""
NUMBERS_NAMED = 5
"""Largest number of damaged lines that a note names."""


@dataclass(frozen=True)
class FinalEvaluation:
    """The evaluation after training."""

    mean: float
    games: int
    interquartile_mean: float | None
    interval: tuple[float, float] | None
    """95 % interval of the interquartile mean."""
    standard_error: float | None = None
    """Standard error of the mean."""
    sticky: FinalEvaluation | None = None
    """The same agent's games with sticky actions."""


@dataclass(frozen=True)
class RecordedRun:
    """Contents of a run's folder."""

    path: Path
    name: str
    """Label in the report; its colour is `index`."""
    index: int
    config: Config
    columns: dict[str, NDArray[np.float64]]
    """Values of each metric by line, NaN where missing; metrics of several values as `<metric>/<key>`."""
    evaluation: FinalEvaluation | None
    """`evaluation.json`."""
    sessions: list[dict[str, Any]]
    """`sessions.jsonl`."""
    video: Path | None
    """The newest video."""
    is_training: bool
    notes: list[str]
    """Skipped data, with reasons."""

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
    def signs(self) -> list[str]:
        """Warnings about unusual metrics at the run's end."""
        recent, counts = {}, self.column("learner_updates") >= WARM_UP
        for name, column in self.columns.items():
            values, count = column[np.isfinite(column) & counts], values_of(name)
            if len(values) >= count:
                recent[name] = float(values[-count:].mean())
        return list(signs(recent, self.config).values())

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
    """Converts an `OSError` of a read into an error that names the file.

    Raises:
        RunFolderError: Instead of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"{error.filename or path} cannot be read: {error.strerror}") from error


def read_run(path: Path, name: str, index: int, progress: Progress) -> RecordedRun:
    """Reads a run's folder.

    Raises:
        RunFolderError: There is no run, or a file cannot be read.
        ConfigurationError: Its settings are damaged, or of a newer release.
    """
    folder = RunFolder.open(path)
    config = folder.config()
    notes: list[str] = []
    with reading(path):
        columns = _Columns(path.name, progress)
        notes += _read_lines(path / "metrics.jsonl", columns.add)
        sessions: list[dict[str, Any]] = []
        notes += _read_lines(path / "sessions.jsonl", sessions.append)
        evaluation = None
        if (path / "evaluation.json").is_file():
            try:
                evaluation = _final_evaluation(_object((path / "evaluation.json").read_bytes()))
            except (ValueError, KeyError, TypeError, RecursionError):
                notes.append("evaluation.json is damaged and left out")
        videos = [video for video in folder.videos.glob("*.mp4") if not video.name.endswith(".partial.mp4")]
        newest = max(videos, key=lambda video: video.stat().st_mtime, default=None)
        held = folder.is_held
    return RecordedRun(path, name, index, config, columns.arrays(), evaluation, sessions, newest, held, notes)


def read_sessions(path: Path) -> list[dict[str, Any]]:
    """Reads the sessions of a run's folder, without damaged lines.

    Raises:
        RunFolderError: The file cannot be read.
    """
    sessions: list[dict[str, Any]] = []
    _read_lines(path / "sessions.jsonl", sessions.append)
    return sessions


class _Columns:
    """Metrics by column, in a tenth of the memory of a list of dictionaries."""

    def __init__(self, run: str, progress: Progress) -> None:
        self._run = run
        self._progress = progress
        self._lines = 0
        self._columns: dict[str, array[float]] = {}

    def add(self, line: dict[str, Any]) -> None:
        values = dict(_values(line))
        for name, value in values.items():
            if name not in self._columns:
                self._columns[name] = array("d", itertools.repeat(math.nan, self._lines))
            self._columns[name].append(value)
        for name in self._columns.keys() - values.keys():
            self._columns[name].append(math.nan)
        self._lines += 1
        if self._lines % LINES_SHOWN == 0:
            self._progress(f"reading {self._run}", f"{self._lines:,} lines")

    def arrays(self) -> dict[str, NDArray[np.float64]]:
        return {name: np.array(column) for name, column in self._columns.items()}


def _final_evaluation(found: dict[str, Any]) -> FinalEvaluation:
    mean, interval, error = (found.get(name) for name in ("interquartile_mean", "interval", "standard_error"))
    return FinalEvaluation(
        float(found["mean"]),
        len(found["scores"]),
        None if mean is None else float(mean),
        None if interval is None else (float(interval[0]), float(interval[1])),
        None if error is None else float(error),
        _final_evaluation(found["sticky"]) if "sticky" in found else None,
    )


def _values(line: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yields the values of a line of metrics; raises if the line is malformed."""
    if not all(isinstance(line.get(name), int | float) for name in ("time_s", "agent_steps")):
        raise ValueError("no line of metrics")
    for name, value in line.items():
        if value is None or name.partition("/")[0] not in METRICS:
            continue
        # Earlier runs have null for a missing value, and an object for a metric of several values.
        named = {f"{name}/{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
        yield from ((each, float(part)) for each, part in named.items())


def _read_lines(path: Path, add: Any) -> list[str]:
    """Calls `add` with each line's object; returns a note if some are damaged."""
    if not path.is_file():
        return []
    damaged = []
    with reading(path), path.open("rb") as file:
        for number, line in enumerate(file, 1):
            # An incomplete last line: the run is writing it, or was killed meanwhile.
            if not line.endswith(b"\n"):
                break
            try:
                add(_object(line))
            except (ValueError, TypeError, OverflowError, RecursionError):
                damaged.append(number)
    if not damaged:
        return []
    named = ", ".join(map(str, damaged[:NUMBERS_NAMED])) + (", ..." if len(damaged) > NUMBERS_NAMED else "")
    lines = "1 damaged line" if len(damaged) == 1 else f"{len(damaged):,} damaged lines"
    return [f"{lines} of {path.name} left out: {named}"]


def _object(text: bytes) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError("no JSON object")
    return found
