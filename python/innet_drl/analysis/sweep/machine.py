"""The machine that is measured: processor, hardware threads and GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from innet_drl.train.settings.machine import cores, processor

CPUS = Path("/sys/devices/system/cpu")


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


def hardware_threads() -> list[int]:
    """Returns the hardware threads of this process core by core, so that the first n resemble a smaller machine."""
    return sorted(os.sched_getaffinity(0), key=lambda thread: (_siblings(thread), thread))


def _siblings(thread: int) -> int:
    """The lowest thread number of the core; the thread itself if the kernel lists no siblings."""
    try:
        listed = (CPUS / f"cpu{thread}/topology/thread_siblings_list").read_text()
    except OSError:
        return thread
    return int(listed.replace("-", ",").split(",")[0])


def _names(machine: Machine) -> str:
    return ", ".join(gpu.name for gpu in machine.gpus) or "none"
