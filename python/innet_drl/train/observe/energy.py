"""Energy counters: RAPL of the processors, and NVML of the GPUs.

Both count the whole device, including other programs. Unreadable counters are named with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
