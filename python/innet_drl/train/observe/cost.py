"""The cost of training: processor seconds and memory of all processes, and joules where the machine counts them.

RAPL of the processors and NVML of the GPUs count the whole device, including other programs. Unreadable counters are
named with the reason.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from innet_drl.train.observe.metrics import Meter

PERIOD_SECONDS = 1.0
"""Shortest time between two scans of the process table for processes of the run."""
POWERCAP = Path("/sys/class/powercap")
"""The kernel's directory of RAPL, for processors of Intel and AMD."""
MICROJOULES = 1e6
MILLIJOULES = 1e3


@dataclass(frozen=True)
class Energy:
    """Joules since the counters were opened; `None` where a counter is missing."""

    cpu: float | None
    """Processor packages and, if counted, their memory."""
    gpu: float | None
    """GPUs; 0 without any."""

    @property
    def joules(self) -> float | None:
        """Both; `None` if one is missing."""
        return None if self.cpu is None or self.gpu is None else self.cpu + self.gpu


@dataclass
class _Zone:
    """A zone of RAPL, whose counter starts again at 0 after `largest`."""

    path: Path
    largest: int
    last: int
    microjoules: int = field(default=0)

    @classmethod
    def open(cls, path: Path) -> _Zone:
        return cls(path / "energy_uj", int((path / "max_energy_range_uj").read_text()), _number(path / "energy_uj"))

    def read(self) -> int:
        now = _number(self.path)
        self.microjoules += now - self.last if now >= self.last else now + self.largest - self.last
        self.last = now
        return self.microjoules


class EnergyCounters:
    """The energy of this machine's processors and of some GPUs. Read it every few minutes: RAPL's counters wrap."""

    def __init__(self, gpus: Sequence[str] = (), powercap: Path = POWERCAP) -> None:
        self.missing: dict[str, str] = {}
        """Reason of each counter that cannot be read, by its name: `RAPL`, `NVML`."""
        self._failures: tuple[type[Exception], ...] = (OSError,)
        self._zones = self._open_rapl(powercap)
        self._nvml: Any = None
        self._gpus: list[tuple[Any, int]] = []
        if gpus:
            self._open_nvml(gpus)

    def read(self) -> Energy:
        """Returns the joules since the counters were opened."""

        def of_gpus() -> float:
            counts = [self._nvml.nvmlDeviceGetTotalEnergyConsumption(gpu) - first for gpu, first in self._gpus]
            return float(sum(counts)) / MILLIJOULES

        cpu = self._read("RAPL", lambda: sum(zone.read() for zone in self._zones) / MICROJOULES)
        return Energy(cpu, self._read("NVML", of_gpus))

    def gpu_utilization(self) -> float | None:
        """Returns the mean utilization of the GPUs over the last sample period (up to a second)."""

        def share() -> float:
            rates = [self._nvml.nvmlDeviceGetUtilizationRates(gpu).gpu for gpu, _ in self._gpus]
            return float(sum(rates)) / len(rates) / 100

        return self._read("NVML", share) if self._gpus else None

    def _read(self, counter: str, read: Callable[[], float]) -> float | None:
        """Reads a counter. After its first failure it counts as missing, and training continues."""
        if counter in self.missing:
            return None
        try:
            return read()
        except self._failures as error:
            self.missing[counter] = f"it failed during the run: {error}"
            return None

    def _open_rapl(self, powercap: Path) -> list[_Zone]:
        try:
            # Excluded: `intel-rapl-mmio` counts the packages again, and `psys` the whole platform.
            found = [path for path in sorted(powercap.glob("intel-rapl:*")) if _is_counted(path)]
            if not found:
                self.missing["RAPL"] = f"{powercap} has no package: virtual machines and many containers hide it"
            return [_Zone.open(path) for path in found]
        except PermissionError as error:
            self.missing["RAPL"] = (
                f"{error.filename} is readable by root alone: run as root, or let root do chmod a+r on the files "
                "energy_uj (any user can then watch the power of other users' programs)"
            )
        except OSError as error:
            self.missing["RAPL"] = f"{error.filename}: {error.strerror}"
        return []

    def _open_nvml(self, gpus: Sequence[str]) -> None:
        try:
            import pynvml
        except ModuleNotFoundError:
            self.missing["NVML"] = "nvidia-ml-py is not installed: pip install 'innet-drl[nvml]'"
            return
        try:
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByUUID(uuid) for uuid in gpus]
            self._gpus = [(handle, pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) for handle in handles]
            self._nvml = pynvml
            self._failures = (OSError, pynvml.NVMLError)
        except pynvml.NVMLError as error:
            self.missing["NVML"] = f"{error} (energy is counted since Volta, and not for MIG instances)"


def gpu_uuids(count: int) -> list[str]:
    """Returns the UUIDs of the first GPUs of torch, as NVML names them."""
    import torch

    present = range(min(count, torch.cuda.device_count()))
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in present]


def _is_counted(zone: Path) -> bool:
    return (zone / "name").read_text().startswith(("package", "dram"))


def _number(path: Path) -> int:
    return int(path.read_text())


@dataclass(frozen=True)
class Cost:
    """Cost of a run over all sessions, without the evaluation after training."""

    processor_s: float
    """Processor seconds, user and system, of this process and all its descendants: learners, actors, evaluations."""
    joules: float | None
    """Energy of this machine's processors and of the learners' GPUs, other programs included; `None` without counters
    (RAPL, NVML) in any session."""
    frames: int
    """Environment frames of the run."""
    resident_bytes: int
    """Resident memory of these processes now. Memory that they share counts in each of them."""

    @property
    def processor_s_per_million_frames(self) -> float | None:
        """Processor seconds of a million frames."""
        return _per_million(self.processor_s, self.frames)

    @property
    def joules_per_million_frames(self) -> float | None:
        """Joules of a million frames."""
        return _per_million(self.joules, self.frames)

    def record(self, meter: Meter) -> None:
        """Records the cost for a line of metrics."""
        meter.record("processor_s", self.processor_s)
        meter.record("processor_s_per_million_frames", self.processor_s_per_million_frames)
        meter.record("joules", self.joules)
        meter.record("joules_per_million_frames", self.joules_per_million_frames)
        meter.record("resident_bytes", self.resident_bytes)

    def __str__(self) -> str:
        costs = ((self.processor_s, "processor seconds"), (self.joules, "joules"))
        shown = [f"{value:,.0f} {unit}{self._rate(value)}" for value, unit in costs if value is not None]
        return ", ".join(shown)

    def _rate(self, value: float) -> str:
        rate = _per_million(value, self.frames)
        return "" if rate is None else f" ({rate:,.0f} per million frames)"


class ProcessorTime:
    """Processor seconds of this process and its descendants, including ended ones, since the object was made.

    The same scan also gives their resident memory.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.resident_bytes = 0
        """Resident memory at the last `read`."""
        self._first = self._all()
        self._last = 0.0
        self._read = -PERIOD_SECONDS

    def read(self, *, fresh: bool = False) -> float:
        """Returns the seconds, at most `PERIOD_SECONDS` old unless `fresh`."""
        if fresh or time.monotonic() - self._read >= PERIOD_SECONDS:
            # A descendant whose parent died first is no longer counted.
            self._last = max(self._last, self._all() - self._first)
            self._read = time.monotonic()
        return self._last

    def _all(self) -> float:
        found = [_use(process) for process in (self._process, *self._process.children(recursive=True))]
        self.resident_bytes = sum(resident for _, resident in found)
        return sum(seconds for seconds, _ in found)


class OtherPrograms:
    """Share of hardware threads that programs used beside this process and descendants, since the object was made."""

    def __init__(self, threads: Sequence[int]) -> None:
        self._threads = threads
        self._own = ProcessorTime()
        self._busy, self._started = busy_seconds(threads), time.monotonic()

    def share(self) -> float:
        """Returns the share: close to 0 on a quiet machine."""
        available = (time.monotonic() - self._started) * len(self._threads)
        return max(0.0, busy_seconds(self._threads) - self._busy - self._own.read(fresh=True)) / available


class CostMeter:
    """Counts the cost of a run."""

    def __init__(self, gpus: Sequence[str] = ()) -> None:
        self._time = ProcessorTime()
        self._energy = EnergyCounters(gpus)
        self._earlier_s = 0.0
        self._earlier_joules: float | None = 0.0

    @property
    def missing(self) -> str:
        """Unreadable energy counters with reasons; empty if there are none."""
        return "; ".join(f"{name}: {reason}" for name, reason in self._energy.missing.items())

    def read(self, frames: int, *, fresh: bool = False) -> Cost:
        """Returns the cost of the run until now; `fresh` forces a scan of its processes."""
        joules, earlier = self._energy.read().joules, self._earlier_joules
        return Cost(
            round(self._earlier_s + self._time.read(fresh=fresh), 2),
            None if joules is None or earlier is None else round(earlier + joules, 2),
            frames,
            self._time.resident_bytes,
        )

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain JSON values."""
        cost = self.read(0, fresh=True)
        return {"processor_s": cost.processor_s, "joules": cost.joules}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned."""
        self._earlier_s, self._earlier_joules = state["processor_s"], state["joules"]


def busy_seconds(threads: Sequence[int]) -> float:
    """Returns the busy seconds of hardware threads, over all programs.

    If the system does not list all of them, as in some containers, the result is of the whole machine.
    """
    # Offline threads are missing in the list, so that its positions are not thread numbers.
    numbers = re.findall(r"(?m)^cpu(\d+) ", (Path(psutil.PROCFS_PATH) / "stat").read_text())
    listed = dict(zip(map(int, numbers), psutil.cpu_times(percpu=True), strict=False))
    counted = [listed[thread] for thread in threads] if listed.keys() >= set(threads) else [psutil.cpu_times()]
    return float(sum(sum(each) - each.idle - each.iowait for each in counted))


def _use(process: psutil.Process) -> tuple[float, int]:
    """Processor seconds and resident bytes of a process."""
    try:
        spent, resident = process.cpu_times(), process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0.0, 0
    # Ended children count in the process that waited for them.
    return float(spent.user + spent.system + spent.children_user + spent.children_system), int(resident)


def _per_million(value: float | None, frames: int) -> float | None:
    return None if value is None or frames <= 0 else round(1e6 * value / frames, 2)
