"""Repeats, files and ends of `innet-drl analyze ratio`, with made-up measurements in place of runs."""

from __future__ import annotations

import csv
import json
import re
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn import check_that_linear_axes_begin_at_zero, keep_axes

import innet_drl as innet
from innet_drl.analysis.pictures import can_draw
from innet_drl.analysis.sweep import ratio
from innet_drl.analysis.sweep.point import Key, Point, Role
from innet_drl.analysis.sweep.sweep_file import RESULTS
from innet_drl.cli import main
from innet_drl.signals import END_SIGNALS
from innet_drl.train.observe.display import Page
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import commit

FLAGS = ["--preset", "cartpole", "--threads", "1", "--environments", "4"]
FOUR = ["--actors", "1", "2", "3", "4", "--grid"]


class Machine:
    """A machine whose measurements are made up, and counted."""

    def __init__(self) -> None:
        self.measured: list[Key] = []
        self.frames: Callable[[Key, int], float] = lambda key, repeat: 100.0 * key[0] + repeat
        """Frames a second of a repeat of a point."""
        self.others: Callable[[Key, int], float] = lambda key, repeat: 0.0
        self.lasts = 1_000
        """Measurements before Ctrl-C."""

    def measure(
        self, config: Config, threads: Sequence[int], warm_up: float, seconds: float, progress: Callable[[str], None]
    ) -> tuple[Point, dict[str, str]]:
        """Stands in for `point.measure`."""
        key = (config.actors, len(threads), config.environments)
        progress("measured")
        if len(self.measured) == self.lasts:
            raise KeyboardInterrupt
        repeat = self.measured.count(key)
        self.measured.append(key)
        frames = self.frames(key, repeat)
        rest: dict[str, Any] = dict.fromkeys(("gpu", "cpu_watts", "gpu_watts", "watts", "frames_per_joule"))
        point = Point(
            *key,
            frames_per_s=frames,
            updates_per_s=frames / 10,
            samples_per_insert=8.0,
            cpu=0.5,
            others=self.others(key, repeat),
            seconds=seconds,
            frames_per_step=1,
            actor=Role(1e-3, {"environment": 0.6, "inference": 0.3, "write": 0.1}),
            learner=Role(1e-3, {"update": 0.5, "wait for a batch": 0.5}),
            **rest,
        )
        return point, {"RAPL": "made up"}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(ratio, "measure", found.measure)
    return found


def sweep(file: Path, *flags: str) -> int:
    """Runs the command."""
    return main(["analyze", "ratio", *FLAGS, "--json", str(file), *flags])


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def test_repeats_of_a_list_are_in_changing_order(machine: Machine, tmp_path: Path) -> None:
    orders: list[list[int]] = []
    for seed in ("0", "0", "1"):
        machine.measured.clear()
        assert sweep(tmp_path / f"{len(orders)}.json", *FOUR, "--seed", seed) == 0
        orders.append([key[0] for key in machine.measured])
        turns = [orders[-1][start : start + 4] for start in (0, 4, 8)]
        assert [sorted(turn) for turn in turns] == [[1, 2, 3, 4]] * 3
        assert len({tuple(turn) for turn in turns}) > 1
    assert orders[0] == orders[1] != orders[2]


def test_medians_decide(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three actors have the highest measurement and the highest mean, and two the highest median."""
    frames = {1: (100, 100, 100), 2: (200, 190, 210), 3: (90, 2000, 80)}
    machine.frames = lambda key, repeat: float(frames[key[0]][repeat])
    file = tmp_path / "ratio.json"
    assert sweep(file, "--actors", "1", "2", "3", "--environments", "2", "4") == 0
    # Environments are swept with the best number of actors.
    assert {key[0] for key in machine.measured if key[2] == 2} >= {2}
    assert next(key[0] for key in machine.measured if key[2] == 2) == 2
    found = read(file)
    assert found["recommended"]["actors"] == 2
    point = next(point for point in found["points"] if point["actors"] == 3)
    assert (point["frames_per_s"], point["low"]["frames_per_s"]) == (90, 0)
    assert point["high"]["frames_per_s"] == pytest.approx(4958.5, abs=0.1)
    assert point["n"] == 3
    assert [repeat["frames_per_s"] for repeat in point["repeats"]] == [90, 2000, 80]
    printed = capsys.readouterr().out
    assert "90 (0-4,959)" in printed
    assert "9.0 (0.0-495.9)" in printed
    assert "RAPL, and no columns of it: made up" in printed
    wide = sum(point["actors"] == 3 for point in found["points"])
    assert f"{wide} of {len(found['points'])} figures are uncertain by more than a quarter: --repeats 5 or" in printed


def test_a_second_run_measures_what_is_missing(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "ratio.json"
    flags = ["--actors", "1", "2", "3", "4", "--environments", "2", "4", "8"]
    assert sweep(file, *flags) == 0
    first = len(machine.measured)
    assert first == 3 * (4 + 2 + ratio.PROPOSALS)
    assert sweep(file, *flags) == 0
    assert sweep(file, *flags, "--repeats", "1") == 0
    assert len(machine.measured) == first
    before = read(file)["points"]
    assert sweep(file, *flags, "--repeats", "4") == 0
    assert len(machine.measured) == first + 4 + 2 + ratio.PROPOSALS
    after = read(file)["points"]
    assert [point["repeats"][:3] for point in after] == [point["repeats"] for point in before]
    assert {point["n"] for point in after} == {4}


def test_an_interrupted_sweep_prints_its_tables_and_continues(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ratio.json"
    machine.lasts = 6
    assert sweep(file, *FOUR, "--csv", str(tmp_path / "ratio.csv")) == 130
    printed = capsys.readouterr().out
    assert "recommended: --actors 4" in printed
    assert f"6 measurements are in {file}; the same command adds missing ones" in printed
    assert len((tmp_path / "ratio.csv").read_text().splitlines()) == 1 + 6
    kept = read(file)["points"]
    machine.lasts = 1_000
    assert sweep(file, *FOUR) == 0
    assert len(machine.measured) == 12
    assert f"12 measurements are in {file}" in capsys.readouterr().out
    assert [point["repeats"][: old["n"]] for point, old in zip(read(file)["points"], kept, strict=True)] == [
        old["repeats"] for old in kept
    ]


def test_a_signal_ends_a_sweep_as_ctrl_c_does_and_is_handled_as_before(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(number) for number in END_SIGNALS]

    def frames(key: Key, repeat: int) -> float:
        if len(machine.measured) == 3:
            signal.raise_signal(signal.SIGTERM)
        return 1.0

    machine.frames = frames
    assert sweep(tmp_path / "ratio.json", *FOUR) == 143
    assert "3 measurements are in " in capsys.readouterr().out
    assert [signal.getsignal(number) for number in END_SIGNALS] == before


def test_a_sweep_that_is_interrupted_at_once_has_no_tables(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    machine.lasts = 0
    assert sweep(tmp_path / "ratio.json", *FOUR) == 130
    assert "0 measurements are in " in capsys.readouterr().out
    machine.lasts = 100
    assert sweep(tmp_path / "ratio.json", *FOUR) == 0


def test_a_sweep_that_was_killed_continues(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ratio.json"
    assert sweep(file, *FOUR) == 0
    kept = read(file)
    # Results come at the end of a sweep.
    file.write_text(json.dumps({name: value for name, value in kept.items() if name not in RESULTS}))
    assert main(["analyze", "what-if", str(file)]) == 0
    assert sweep(file, *FOUR) == 0
    assert read(file) == kept


def test_no_measurement_is_beyond_the_planned_ones(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Page, "progress", lambda page, activity, done: said.append(activity))
    file = tmp_path / "ratio.json"
    assert sweep(file, "--actors", "1", "2", "3", "--environments", "2", "4", "8", "--grid", "--repeats", "1") == 0
    assert sweep(file, "--actors", "2", "4", "6", "--environments", "2", "4") == 0
    counted = [tuple(map(int, re.findall(r"measurement (\d+) of (\d+)", each)[0])) for each in said]
    assert len(counted) == len(machine.measured)
    assert all(1 <= number <= planned for number, planned in counted)
    # Each list ends with its last measurement.
    ends = [each for each, after in zip(counted, [*counted[1:], (1, 1)], strict=True) if after[0] == 1]
    assert all(number == planned for number, planned in ends)


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--seconds", "3"], "was measured with seconds 10.0 (now 3.0)"),
        (["--warm-up", "1"], "was measured with warm_up 3.0 (now 1.0)"),
        (["--settings", "batch_size=32"], "was measured with batch_size 64 (now 32)"),
    ],
)
def test_a_file_of_other_conditions_is_refused(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    file = tmp_path / "ratio.json"
    assert sweep(file, "--actors", "1") == 0
    before = file.read_text()
    assert sweep(file, "--actors", "1", *flags) == 1
    errors = capsys.readouterr().err
    assert f"error: {file} {part}: choose another file with --json, or delete it\n" in errors
    assert file.read_text() == before


@pytest.mark.parametrize(("module", "name", "told"), [(ratio, "commit", "commit"), (innet, "__version__", "innet_drl")])
def test_a_file_of_another_commit_or_release_is_refused(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    module: Any,
    name: str,
    told: str,
) -> None:
    file = tmp_path / "ratio.json"
    assert sweep(file, "--actors", "1") == 0
    kept = read(file)["conditions"][told]
    monkeypatch.setattr(module, name, (lambda: "another") if name == "commit" else "another")
    assert sweep(file, "--actors", "1") == 1
    assert f"error: {file} was measured with {told} {kept} (now another): " in capsys.readouterr().err


def test_the_commit_is_that_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", "-C", str(tmp_path), *names, *arguments], check=True, capture_output=True)

    package = tmp_path / "package"
    installed = tmp_path / "environment"
    for folder in (package, installed):
        folder.mkdir()
        (folder / "__init__.py").touch()
    git("init")
    git("add", "package")
    git("commit", "--message", "first")
    monkeypatch.setattr(innet, "__file__", str(package / "__init__.py"))
    clean = commit()
    assert re.fullmatch("[0-9a-f]{7,}", clean)
    (package / "__init__.py").write_text("changed")
    first = commit()
    assert re.fullmatch(f"{clean}-dirty-[0-9a-f]{{8}}", first)
    (package / "__init__.py").write_text("changed again")
    assert commit() not in (clean, first)
    # An environment in a repository is none of its files.
    monkeypatch.setattr(innet, "__file__", str(installed / "__init__.py"))
    assert commit() == ""


@pytest.mark.parametrize("where", ["file", "point", "repeat"])
def test_an_unknown_field_is_named(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    file, values = swept(tmp_path)
    point = values["points"][0]
    {"file": values, "point": point, "repeat": point["repeats"][0]}[where]["colour"] = "red"
    assert refusal(file, values, capsys) == "the field colour is unknown"


@pytest.mark.parametrize(("where", "name"), [("file", "conditions"), ("point", "repeats"), ("repeat", "learner")])
def test_a_missing_field_is_named(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str, name: str
) -> None:
    file, values = swept(tmp_path)
    point = values["points"][0]
    del {"file": values, "point": point, "repeat": point["repeats"][0]}[where][name]
    assert refusal(file, values, capsys) == f"it has no field {name}"


def swept(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The file of a sweep of one point, and its values."""
    file = folder / "ratio.json"
    assert sweep(file, "--actors", "1") == 0
    return file, read(file)


def refusal(file: Path, values: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """The reason for which a file with these values is refused."""
    file.write_text(json.dumps(values))
    capsys.readouterr()
    assert main(["analyze", "what-if", str(file)]) == 1
    found = re.fullmatch(r"error: .* is no file of innet-drl analyze ratio .* \((.*)\): .*\n", capsys.readouterr().err)
    assert found is not None
    return found[1]


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--json", "nodir/a.json"], "--json nodir/a.json: there is no directory nodir: make it first"),
        (["--csv", "nodir/a.csv"], "--csv nodir/a.csv: there is no directory nodir"),
        (["--plot", "nodir/a.svg"], "--plot nodir/a.svg: there is no directory nodir"),
        (["--plot", "a.xyz"], "--plot a.xyz: its name has to end in .svg, .png, .pdf"),
        (["--json", "a.json", "--csv", "a.json"], "--json, --csv and --plot: each needs a file of its own"),
        (["--json", "a.svg"], "--json, --csv and --plot: each needs a file of its own"),
    ],
)
def test_files_are_checked_before_anything_is_measured(
    machine: Machine,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    part: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "ratio", *FLAGS, *flags]) == 1
    assert f"error: {part}" in capsys.readouterr().err
    assert machine.measured == []
    assert list(tmp_path.iterdir()) == []


def test_the_table_has_a_row_for_each_measurement(machine: Machine, tmp_path: Path) -> None:
    table = tmp_path / "ratio.csv"
    assert sweep(tmp_path / "ratio.json", *FOUR, "--csv", str(table)) == 0
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert len(rows) == 12
    assert {row["actors"] for row in rows} == {"1", "2", "3", "4"}
    assert sorted(float(row["frames_per_s"]) for row in rows if row["actors"] == "2") == [200, 201, 202]
    assert {(row["others"], row["watts"]) for row in rows} == {("0.0", "")}


def test_disturbed_points_are_named(machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of three measurements is enough."""
    machine.others = lambda key, repeat: 0.3 if (key[0], repeat) == (2, 1) else 0.01
    file = tmp_path / "ratio.json"
    assert sweep(file, *FOUR) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("disturbed"))
    assert line.endswith(": 2 actors, 1 threads, 4 environments (30%)")
    assert main(["analyze", "what-if", str(file)]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_a_prediction_stands_beside_the_measurement(
    machine: Machine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ratio.json"
    machine.frames = lambda key, repeat: 1000.0 + 10 * repeat
    assert sweep(file, *FOUR) == 0
    capsys.readouterr()
    assert main(["analyze", "what-if", str(file), "--json", str(tmp_path / "predicted.json")]) == 0
    shown = capsys.readouterr().out
    measured = next(line for line in shown.splitlines() if "this machine, measured" in line)
    assert "measured (n = 3)" in measured
    assert "1,010 (966-1,054)" in measured
    assert f"written anew: {tmp_path / 'predicted.json'}" in shown
    kept = read(tmp_path / "predicted.json")["this machine, measured"]
    assert (kept["frames_per_s"], kept["n"]) == (1010, 3)
    assert kept["high"]["frames_per_s"] - 1010 == pytest.approx(44.03, abs=0.01)
    before = file.read_text()
    assert main(["analyze", "what-if", str(file), "--json", str(file)]) == 1
    assert "the sweep is in it: choose another file" in capsys.readouterr().err
    assert file.read_text() == before
    assert main(["analyze", "what-if", str(file), "--json", str(tmp_path / "no" / "a.json")]) == 1


@pytest.mark.skipif(not can_draw(), reason="matplotlib is not installed")
def test_the_picture_has_axes_with_units_and_the_number_of_repeats(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = keep_axes(monkeypatch)
    assert sweep(tmp_path / "ratio.json", *FOUR) == 0
    drawn = (tmp_path / "ratio.svg").read_text()
    for part in (
        "CartPole-v1: median and spread of n = 3",
        "actors (1 threads, 4 environments)",
        "rate, first point = 1",
        "utilization, share of 1",
        "other programs",
    ):
        assert part in drawn
    # Counters that are missing, and numbers that were not swept, have no panel.
    assert "power, W" not in drawn
    assert "threads (" not in drawn
    check_that_linear_axes_begin_at_zero(axes, "rate, first point = 1", "utilization, share of 1")
