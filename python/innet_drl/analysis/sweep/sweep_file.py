"""A sweep and its JSON file: machine, settings, points and results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

import innet_drl as innet
from innet_drl.analysis.repeats import SPREAD, checked, differences
from innet_drl.analysis.sweep.point import Key, Point, combined
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import replacing
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores, processor

FIELDS = tuple(each.name for each in dataclasses.fields(Point))
RESULTS = ("knee", "threads_per_sm", "recommended", "model")


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

    @property
    def speed(self) -> dict[str, Any]:
        """What affects the speed of runs."""
        gpus = ", ".join(gpu.name for gpu in self.gpus) or "none"
        return {"processor": self.processor, "hardware threads": self.threads, "GPUs": gpus}


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
    measured: list[Point] = field(default_factory=list)
    """All measurements, several of each point."""
    conditions: dict[str, Any] = field(default_factory=dict)
    """What else is equal in all of them: `seconds`, `warm_up`, `commit`, and the release, `innet_drl`."""
    missing: dict[str, str] = field(default_factory=dict)
    """Reason of each missing counter, by its name."""
    results: dict[str, Any] = field(default_factory=dict)
    """`RESULTS` of the points."""

    @property
    def gpus(self) -> int:
        """GPUs that the learners used."""
        return min(len(self.machine.gpus), self.config.learners)

    @property
    def repeats(self) -> dict[Key, list[Point]]:
        """The measurements of each point, by threads, environments and actors."""
        keys = sorted({point.key for point in self.measured}, key=lambda key: (*key[1:], key[0]))
        return {key: [point for point in self.measured if point.key == key] for key in keys}

    @property
    def points(self) -> list[Point]:
        """The medians of each point."""
        return list(map(combined, self.repeats.values()))

    def save(self, path: Path) -> None:
        """Writes the file atomically."""
        values = {
            "machine": dataclasses.asdict(self.machine),
            "preset": self.preset,
            "settings": self.config.as_dict(),
            "conditions": self.conditions,
            "missing": self.missing,
            "points": [
                {
                    **dataclasses.asdict(combined(repeats)),
                    **{end: dataclasses.asdict(combined(repeats, SPREAD[end])) for end in ("low", "high")},
                    "n": len(repeats),
                    "repeats": list(map(dataclasses.asdict, repeats)),
                }
                for repeats in self.repeats.values()
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
            known = ("machine", "preset", "settings", "conditions", "missing", "points", *RESULTS)
            of_point = (*FIELDS, "low", "high", "n", "repeats")
            points = [
                checked(point, *of_point) for point in checked({**dict.fromkeys(RESULTS), **values}, *known)["points"]
            ]
            measured = [Point.read(checked(repeat, *FIELDS)) for point in points for repeat in point["repeats"]]
            gpus = tuple(Gpu(**gpu) for gpu in values["machine"]["gpus"])
            machine, config = Machine(**{**values["machine"], "gpus": gpus}), Config(**values["settings"])
            return cls(machine, values["preset"], config, measured, values["conditions"], values["missing"])
        except OSError as error:
            raise ConfigurationError(
                f"{path}: {error.strerror}: measure a sweep first, innet-drl analyze ratio --json {path}"
            ) from error
        except (ValueError, TypeError, KeyError) as error:
            reason = f"it has no field {error.args[0]}" if isinstance(error, KeyError) else error
            raise ConfigurationError(
                f"{path} is no file of innet-drl analyze ratio {innet.__version__} ({reason}): choose another one"
            ) from error

    def continued(self, path: Path) -> Sweep:
        """Returns this sweep with the measurements of its file, if there is one.

        Raises:
            ConfigurationError: The file is of another machine, other settings or other conditions.
        """
        if not path.exists():
            return self
        earlier = Sweep.load(path)
        ours, theirs = (each.machine.speed | each.config.as_dict() | each.conditions for each in (self, earlier))
        if differs := differences(theirs, ours):
            raise ConfigurationError(
                f"{path} was measured with {differs}: choose another file with --json, or delete it"
            )
        return earlier
