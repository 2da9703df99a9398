"""The JSON file of a sweep: machine, settings, points and results."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from innet_drl.analysis.sweep.machine import Machine
from innet_drl.analysis.sweep.point import Point
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import new_file, replaceable
from innet_drl.train.settings.config import Config


@dataclass
class Sweep:
    """A sweep: its points, on a machine, of runs with some settings."""

    machine: Machine
    preset: str
    config: Config
    """Settings of the runs, of which the points change actors and environments."""
    points: list[Point] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Reason of each missing counter, by its name."""
    results: dict[str, Any] = field(default_factory=dict)
    """Results of the points: `knee`, `threads_per_sm`, `recommended`, `model`."""
    measured: str = ""
    """Local time of the newest point; empty without points."""

    @property
    def gpus(self) -> int:
        """GPUs that the learners used."""
        return min(len(self.machine.gpus), self.config.learners)

    def point(self, key: tuple[int, int, int]) -> Point | None:
        """Returns the measured point with these actors, threads and environments."""
        return next((point for point in self.points if point.key == key), None)

    def add(self, point: Point) -> None:
        """Adds a point measured now."""
        self.points.append(point)
        self.measured = f"{datetime.datetime.now():%Y-%m-%d %H:%M}"

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        values = {
            "machine": dataclasses.asdict(self.machine),
            "preset": self.preset,
            "settings": self.config.as_dict(),
            "measured": self.measured,
            "missing": self.missing,
            "points": [dataclasses.asdict(point) for point in self.points],
            **self.results,
        }
        with writing(str(path), "choose another file with --json"):
            target = replaceable(path)
            part = target.with_name(target.name + ".part")
            with new_file(part) as file:
                file.write((json.dumps(values, indent=1) + "\n").encode())
            os.replace(part, target)

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Reads the file.

        Raises:
            ConfigurationError: The file is missing, or not a sweep.
        """
        try:
            values = json.loads(path.read_text())
            points = [Point(**point) for point in values["points"]]
            machine, config = Machine.read(values["machine"]), Config(**values["settings"])
            measured = values.get("measured", "")
            return cls(machine, values["preset"], config, points, values["missing"], measured=measured)
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}: measure a sweep first, innet-drl analyze ratio --json {path}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigurationError(
                f"{path} is no file of innet-drl analyze ratio ({type(error).__name__}: {error}): choose another one"
            ) from error

    def continued(self, path: Path) -> Sweep:
        """Returns this sweep with the points of its file, if there is one.

        Raises:
            ConfigurationError: The file is of another machine or of other settings.
        """
        if not path.exists():
            return self
        earlier = Sweep.load(path)
        advice = "choose another file with --json, or delete it"
        if difference := self.machine.difference(earlier.machine):
            raise ConfigurationError(f"{path} was measured on another machine: {difference}: {advice}")
        ours, theirs = self.config.as_dict(), earlier.config.as_dict()
        changed = [name for name in ours if ours[name] != theirs[name]]
        if changed:
            raise ConfigurationError(
                f"{path} was measured with another {', '.join(changed)} (preset {earlier.preset}): {advice}"
            )
        return earlier
