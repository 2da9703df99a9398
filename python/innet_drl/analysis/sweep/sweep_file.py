"""A sweep and its JSON file: machine, settings, points and results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from innet_drl.analysis.sweep.point import Point, Role
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import replacing
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores, processor

DERIVED = ("gpu_watts", "frames_per_joule")
"""Fields of a point in the file that follow from others."""


@dataclass(frozen=True)
class Gpu:
    """A GPU of torch."""

    name: str
    multiprocessors: int
    """Streaming multiprocessors (SM), as in the paper's ratio."""


@dataclass(frozen=True)
class Machine:
    """Machine of a sweep. Sweeps of equal machines can be continued."""

    processor: str
    threads: int
    """Hardware threads available to this process: fewer than the processor's under `taskset` or in a container."""
    cores: int | None
    """Physical cores of the whole machine, if the system knows them."""
    memory_bytes: int
    gpus: tuple[Gpu, ...] = ()
    """GPUs that the learner may use; none if its device is the CPU."""

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of all GPUs."""
        return sum(gpu.multiprocessors for gpu in self.gpus)

    @classmethod
    def read(cls, values: dict[str, Any]) -> Machine:
        """Makes a machine of the values of `dataclasses.asdict`."""
        return cls(**{**values, "gpus": tuple(Gpu(**gpu) for gpu in values["gpus"])})

    def difference(self, other: Machine) -> str:
        """Returns the differences to another machine that affect speed, for a message; empty if there is none."""
        pairs = [
            ("processor", self.processor, other.processor),
            ("hardware threads", self.threads, other.threads),
            ("GPUs", _names(self), _names(other)),
        ]
        return ", ".join(f"{what} {theirs} (here {ours})" for what, ours, theirs in pairs if ours != theirs)


def this_machine(device: str) -> Machine:
    """Describes this machine for learners of a `device` (setting of that name)."""
    gpus: tuple[Gpu, ...] = ()
    if device != "cpu":
        import torch

        found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
        gpus = tuple(Gpu(gpu.name, gpu.multi_processor_count) for gpu in found)
    physical = psutil.cpu_count(logical=False)
    return Machine(processor(), cores(), physical, psutil.virtual_memory().total, gpus)


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

    @property
    def gpus(self) -> int:
        """GPUs that the learners used."""
        return min(len(self.machine.gpus), self.config.learners)

    def point(self, key: tuple[int, int, int]) -> Point | None:
        """Returns the measured point with these actors, threads and environments."""
        return next((point for point in self.points if point.key == key), None)

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        values = {
            "machine": dataclasses.asdict(self.machine),
            "preset": self.preset,
            "settings": self.config.as_dict(),
            "missing": self.missing,
            "points": [
                dataclasses.asdict(point) | {name: getattr(point, name) for name in DERIVED} for point in self.points
            ],
            **self.results,
        }
        with writing(str(path), "choose another file with --json"), replacing(path) as file:
            file.write_text(json.dumps(values, indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Sweep:
        """Reads the file.

        Raises:
            ConfigurationError: The file is missing, or not a sweep.
        """
        try:
            values = json.loads(path.read_text())
            points = [_point(point) for point in values["points"]]
            machine, config = Machine.read(values["machine"]), Config(**values["settings"])
            return cls(machine, values["preset"], config, points, values["missing"])
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


def _names(machine: Machine) -> str:
    return ", ".join(gpu.name for gpu in machine.gpus) or "none"


def _point(values: dict[str, Any]) -> Point:
    measured = {name: value for name, value in values.items() if name not in DERIVED}
    return Point(**measured | {role: Role(**values[role]) for role in ("actor", "learner")})
