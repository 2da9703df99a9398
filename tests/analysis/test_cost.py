"""The cost of training: processor seconds of all processes of a run, and joules where the machine counts them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from places import HELPERS
from training import lines, small

from innet_drl import train
from innet_drl.train.observe.cost import CostMeter, ProcessorTime
from innet_drl.train.observe.energy import EnergyCounters

pytestmark = pytest.mark.slow

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def powercap(folder: Path) -> Path:
    """A directory as the kernel's, of two packages with memory, and what counts the same energy again."""
    for zone, name, microjoules in [
        ("intel-rapl:0", "package-0", 900_000),
        ("intel-rapl:0:0", "core", 500_000),
        ("intel-rapl:0:1", "dram", 10_000),
        ("intel-rapl:1", "package-1", 0),
        ("intel-rapl:2", "psys", 1_000_000),
        ("intel-rapl-mmio:0", "package-0", 900_000),
    ]:
        (folder / zone).mkdir()
        (folder / zone / "name").write_text(f"{name}\n")
        (folder / zone / "max_energy_range_uj").write_text("1000000\n")
        (folder / zone / "energy_uj").write_text(f"{microjoules}\n")
    return folder


def test_processor_seconds_of_descendants_count_after_their_end() -> None:
    time = ProcessorTime()
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN!r}])"
    subprocess.run([sys.executable, "-c", inner], check=True)
    assert time.read(fresh=True) >= 0.4


def test_a_run_reports_its_cost(tmp_path: Path) -> None:
    result = train.run(small(actors=2), folder=tmp_path / "run")
    cost, last = result.cost, lines(tmp_path / "run")[-1]
    assert cost is not None
    assert cost.frames == last["env_frames"] == result.agent_steps
    assert cost.processor_s >= last["processor_s"] > 0
    rate = cost.processor_s_per_million_frames
    assert rate == pytest.approx(1e6 * cost.processor_s / cost.frames, abs=0.01)
    assert last["processor_s_per_million_frames"] == pytest.approx(1e6 * last["processor_s"] / cost.frames, abs=0.01)
    assert (cost.joules is None) == (cost.joules_per_million_frames is None) == ("joules" not in last)
    assert "processor seconds" in str(cost)
    # Three processes that have imported torch.
    assert last["resident_bytes"] > 3 * 2**26


def test_a_resumed_run_continues_its_cost(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = train.run(small(serial=True, steps=400), folder=run)
    second = train.run(small(serial=True, steps=800), folder=run, resume=True)
    assert first.cost is not None
    assert second.cost is not None
    assert second.cost.processor_s > first.cost.processor_s
    assert second.cost.frames == second.agent_steps


def test_energy_without_a_counter_in_one_session_is_unknown() -> None:
    meter = CostMeter()
    meter.restore({"processor_s": 5.0, "joules": None})
    cost = meter.read(10)
    assert (cost.joules, cost.joules_per_million_frames) == (None, None)
    assert cost.processor_s >= 5.0


def test_packages_and_their_memory_count_once(tmp_path: Path) -> None:
    counters = EnergyCounters(powercap=powercap(tmp_path))
    (tmp_path / "intel-rapl:0:1/energy_uj").write_text("30000")
    (tmp_path / "intel-rapl:1/energy_uj").write_text("400000")
    energy = counters.read()
    assert energy.cpu == energy.joules == pytest.approx(0.42)
    assert energy.gpu == 0.0
    assert counters.missing == {}


def test_a_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    counters = EnergyCounters(powercap=powercap(tmp_path))
    for microjoules, joules in [(950_000, 0.05), (50_000, 0.15), (60_000, 0.16), (40_000, 1.14)]:
        (tmp_path / "intel-rapl:0/energy_uj").write_text(str(microjoules))
        assert counters.read().cpu == pytest.approx(joules)


def test_a_counter_that_fails_later_is_named(tmp_path: Path) -> None:
    counters = EnergyCounters(powercap=powercap(tmp_path))
    assert counters.read().cpu == 0.0
    (tmp_path / "intel-rapl:1/energy_uj").unlink()
    energy = counters.read()
    assert (energy.cpu, energy.gpu, energy.joules) == (None, 0.0, None)
    assert "No such file" in counters.missing["RAPL"]
    # What was not counted stays unknown.
    (tmp_path / "intel-rapl:1/energy_uj").write_text("5")
    assert counters.read().cpu is None


def test_a_machine_without_counters_names_them(tmp_path: Path) -> None:
    counters = EnergyCounters(powercap=tmp_path)
    assert counters.read().joules is None
    assert "has no package" in counters.missing["RAPL"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_counters_that_root_alone_may_read_are_named() -> None:
    # Another user cannot enter the folders of pytest.
    with tempfile.TemporaryDirectory() as folder:
        zones = powercap(Path(folder))
        zones.chmod(0o755)
        for path in zones.glob("*/energy_uj"):
            path.chmod(0o400)
        os.seteuid(65534)
        try:
            counters = EnergyCounters(powercap=zones)
        finally:
            os.seteuid(0)
    assert counters.read().cpu is None
    assert "intel-rapl:0/energy_uj is readable by root alone: run as root" in counters.missing["RAPL"]


def by_nvml(tmp_path: Path, code: str) -> str:
    """What a program prints with NVML's bindings and the made-up library."""
    pytest.importorskip("pynvml", reason="nvidia-ml-py, the extra nvml, is not installed")
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no g++ to build the library of made-up counters")
    source, library = HELPERS / "replayed_nvml.cpp", tmp_path / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-std=c++17", "-shared", "-fPIC", "-o", library, source], check=True)
    program = (
        "from pathlib import Path; from innet_drl.train.observe.energy import EnergyCounters, Energy\n"
        f"none = Path({str(tmp_path)!r})\n{code}"
    )
    environment = os.environ | {"LD_LIBRARY_PATH": str(tmp_path)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    return ended.stdout


def test_energy_and_utilization_of_gpus_by_made_up_counters(tmp_path: Path) -> None:
    code = "counters = EnergyCounters(['GPU-00', 'GPU-01'], none)\nprint(counters.read().gpu, counters.read().gpu)\n"
    printed = by_nvml(tmp_path, code + "print(counters.gpu_utilization(), sorted(counters.missing))")
    assert printed.split() == ["1000.0", "2000.0", "0.5", "['RAPL']"]


def test_a_gpu_without_a_counter_is_named(tmp_path: Path) -> None:
    code = "counters = EnergyCounters(['MIG-02'], none)\nprint(counters.read().gpu, counters.gpu_utilization())\n"
    printed = by_nvml(tmp_path, code + "print(counters.missing['NVML'])")
    assert printed.startswith("None None\nNot Supported (energy is counted since Volta")


def test_a_gpu_that_is_lost_is_named(tmp_path: Path) -> None:
    code = "lost = EnergyCounters(['GPU-03'], none)\nprint(lost.read().gpu, lost.missing['NVML'])\n"
    code += "lost = EnergyCounters(['GPU-03'], none)\nprint(lost.gpu_utilization(), lost.missing['NVML'])"
    assert by_nvml(tmp_path, code).splitlines() == ["None it failed during the run: GPU is lost"] * 2


def test_gpus_without_a_driver_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pynvml", reason="nvidia-ml-py, the extra nvml, is not installed")
    code = (
        "from innet_drl.train.observe.energy import EnergyCounters\ncounters = EnergyCounters(['GPU-00'])\n"
        "print(counters.missing['NVML'], counters.read().gpu)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if "Library Not Found" not in ended.stdout and "Shared Library" not in ended.stdout:
        pytest.skip(f"this machine has a driver: {ended.stdout}")
    assert ended.stdout.endswith("None\n")
