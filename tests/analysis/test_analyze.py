"""`innet-drl analyze`: short sweeps of real runs, their file, and what cannot be swept."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from innet_drl.analysis.flags import RatioFlags
from innet_drl.analysis.pictures import can_draw
from innet_drl.analysis.sweep.ratio import lists_of
from innet_drl.cli import main
from innet_drl.train.observe.cost import busy_seconds
from innet_drl.train.settings.config import preset
from innet_drl.train.settings.machine import cores

# Each point is a run with processes of its own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = ["--preset", "cartpole", "--settings", "min_size=128", "--seconds", "2", "--warm-up", "0.1", "--repeats", "1"]
FIELDS = {
    *("actors", "threads", "environments", "frames_per_s", "updates_per_s", "samples_per_insert"),
    *("cpu", "gpu", "cpu_watts", "gpu_watts", "watts", "frames_per_joule"),
}


def ratio(file: Path, *flags: str) -> list[str]:
    """Arguments of a sweep with very short points."""
    return ["analyze", "ratio", *SHORT, "--json", str(file), *flags]


def points(file: Path) -> list[dict[str, Any]]:
    """The points of a file."""
    found: list[dict[str, Any]] = json.loads(file.read_text())["points"]
    return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a sweep of three points on one hardware thread."""
    file = tmp_path_factory.mktemp("sweep") / "ratio.json"
    assert main(ratio(file, "--actors", "1", "2", "3", "--threads", "1", "--environments", "4")) == 0
    return file


def test_a_sweep_has_every_number(swept: Path) -> None:
    found = json.loads(swept.read_text())
    assert found["machine"]["threads"] == cores()
    assert [(point["actors"], point["threads"]) for point in found["points"]] == [(1, 1), (2, 1), (3, 1)]
    for point in found["points"]:
        assert point.keys() >= FIELDS
        assert point["environments"] == 4
        assert min(point["frames_per_s"], point["updates_per_s"], point["samples_per_insert"]) > 0
        # All processes share one hardware thread: the affinity is inherited by actors.
        assert 0 < point["cpu"] <= 1.1
        assert point["learner"]["processor_s"] > 0 < point["actor"]["processor_s"]
    assert found["recommended"].keys() >= {"actors", "threads", "environments"}
    assert found["knee"].keys() == {"actors", "threads"}
    assert (found["threads_per_sm"] is None) == (found["machine"]["gpus"] == [])
    assert swept.with_suffix(".svg").is_file() == can_draw()


def test_points_that_a_file_has_are_not_measured_again(swept: Path, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "again.json"
    file.write_text(swept.read_text())
    before = points(file)
    flags = ["--actors", "1", "2", "--threads", "1", "--environments", "4", "--grid"]
    assert main(ratio(file, *flags)) == 0
    assert points(file) == before
    printed = capfd.readouterr().out
    assert "recommended: --actors" in printed
    if not json.loads(file.read_text())["machine"]["gpus"]:
        assert "no GPU for the learner: a CPU learner beside CPU actors is measured" in printed
    assert main(ratio(file, "--actors", "1", "--threads", "1", "--environments", "2", "--grid")) == 0
    assert len(points(file)) == len(before) + 1


def test_counters_that_are_missing_are_named(swept: Path, tmp_path: Path, capfd: Any) -> None:
    file = tmp_path / "ratio.json"
    file.write_text(swept.read_text())
    missing = json.loads(file.read_text())["missing"]
    if "RAPL" not in missing:
        pytest.skip("this machine has RAPL")
    assert main(ratio(file, "--actors", "1", "--threads", "1", "--environments", "4", "--grid")) == 0
    assert "no RAPL, and no columns of it: " in capfd.readouterr().out
    assert {(point["watts"], point["frames_per_joule"]) for point in points(file)} == {(None, None)}


def test_another_machine_is_predicted(swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "predicted.json"
    assert main(["analyze", "what-if", str(swept), "--cores", "64", "--json", str(file)]) == 0
    asked = json.loads(file.read_text())["asked machine, predicted"]
    assert asked["threads"] == 64
    assert asked["frames_per_s"] > 0
    printed = capsys.readouterr().out
    assert asked["bottleneck"] in printed
    assert "64 threads are more than the 1 that were measured" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_sweep_that_is_told_to_end_prints_its_points_and_ends_its_processes(tmp_path: Path, number: int) -> None:
    file = tmp_path / "ratio.json"
    # More repeats than anybody waits for.
    flags = ["--actors", "1", "--threads", "1", "--environments", "4", "--repeats", "100"]
    command = [sys.executable, "-m", "innet_drl", *ratio(file, *flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sweep:
        assert sweep.stderr is not None
        first = list(itertools.takewhile(lambda line: "frames/s" not in line, sweep.stderr))
        started = psutil.Process(sweep.pid).children(recursive=True)
        sweep.send_signal(number)
        out, errors = sweep.communicate()
    assert sweep.returncode == -number, errors
    assert "Traceback" not in "".join([*first, errors])
    assert "recommended: --actors" in out
    assert psutil.wait_procs(started, timeout=60)[1] == []
    (point,) = points(file)
    assert 1 <= point["n"] < 100
    assert f"{point['n']} measurements are in {file}; the same command adds missing ones" in out


def test_busy_threads_are_found_by_their_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that are offline are not listed, and some containers list fewer."""
    tick, fields = os.sysconf("SC_CLK_TCK"), len(psutil.cpu_times())
    rows = {"cpu": 60, "cpu0": 10, "cpu2": 20, "cpu3": 30}
    # Busy ticks, then `nice`, `system`, `idle` and the others.
    lines = [f"{name} {busy * tick} 0 0 99 {'0 ' * (fields - 4)}\n" for name, busy in rows.items()]
    (tmp_path / "stat").write_text("".join(lines) + "intr 1\n")
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert busy_seconds([0, 3]) == 40
    assert busy_seconds([2]) == 20
    assert busy_seconds([0, 1]) == 60


def test_lists_fit_the_machine() -> None:
    config = preset("breakout")
    lists = lists_of(RatioFlags(), config, 2)
    assert (lists.actors, lists.threads, lists.environments) == ([1, 2, 3, 4], [1, 2], [4, 8, 16, 32])
    lists = lists_of(RatioFlags(actors=(4, 1, 4)), config, 12)
    assert (lists.actors, lists.threads) == ([1, 4], [1, 2, 4, 8, 12])
    assert len(list(itertools.product(*lists))) == 2 * 5 * 4


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--preset", "breakuot"], "there is no preset 'breakuot'"),
        (["--actors", "1", "1000"], "--actors 1000: at most "),
        (["--actors", "1", "1000"], "each actor is a process that computes"),
        (["--actors", "0"], "actors (0,): item 1 must be greater than or equal to 1"),
        (["--threads", "1", "5000"], "--threads 5000: this process may use "),
        (["--settings", "serial=true"], "--settings serial=true: a serial run is one process"),
        (["--settings", "replay=innet://localhost:1"], "the server's processor time would be missing"),
        (["--settings", "batch_sise=3"], "there is no setting 'batch_sise'"),
        (["--settings", "environment=NoSuch-v1"], "NoSuch-v1"),
        (["--seconds", "0"], "seconds 0.0: it must be greater than 0"),
        (["--warm-up", "nan"], "warm_up nan: it must be greater than 0"),
        (["--json", "/no/such/folder/ratio.json"], "/no/such/folder"),
    ],
)
def test_flags_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    assert main([*ratio(tmp_path / "ratio.json"), *flags]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert part in errors
    assert errors.count("\n") == 1


def test_a_file_of_another_machine_is_refused(swept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = json.loads(swept.read_text())
    values["machine"] |= {"processor": "another one", "threads": 640}
    file = tmp_path / "ratio.json"
    file.write_text(json.dumps(values))
    assert main(ratio(file)) == 1
    errors = capsys.readouterr().err
    assert f"error: {file} was measured with processor another one (now " in errors
    assert "hardware threads 640 (now " in errors
    assert json.loads(file.read_text()) == values


def test_a_file_of_other_settings_is_refused(swept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ratio(swept), "--settings", "min_size=200", "batch_size=128"]) == 1
    assert "was measured with min_size 128 (now 200), batch_size 64 (now 128): choose" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["no json", "{}", "[]", '{"machine": {}, "points": [{}]}'])
@pytest.mark.parametrize("command", ["ratio", "what-if"])
def test_another_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: str
) -> None:
    file = tmp_path / "ratio.json"
    file.write_text(content)
    assert main(ratio(file) if command == "ratio" else ["analyze", "what-if", str(file)]) == 1
    assert f"error: {file} is no file of innet-drl analyze ratio" in capsys.readouterr().err


def test_a_prediction_needs_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "what-if", str(tmp_path / "none.json"), "--cores", "64"]) == 1
    assert "measure a sweep first, innet-drl analyze ratio --json" in capsys.readouterr().err


def test_analyses_that_do_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "ratoi"]) == 1
    assert "innet-drl analyze has breakdown, ratio and what-if" in capsys.readouterr().err
    assert main(["analyze", "--help"]) == 0
    assert "innet-drl analyze {breakdown,ratio,what-if}" in capsys.readouterr().out
