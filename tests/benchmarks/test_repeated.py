"""Repeated measurements (`benchmarks/repeated.py`), from made-up values: order, medians, warnings and files."""

from __future__ import annotations

import csv
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import repeated
from benchmarks.repeated import Case, Figure, Measurements, RepeatFlags
from benchmarks.report import Line
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.cost import OtherPrograms

CASES: list[Case] = [{"system": name, "actors": actors} for name in ("a", "b", "c") for actors in (1, 2)]


def taken(path: Path, values: dict[int, list[Figure]], cases: list[Case] = CASES[:1], **flags: Any) -> Measurements:
    """Measurements of the cases: repeat i has the figures `values[i]`."""
    kept = Measurements("made-up", RepeatFlags(json=path, repeats=len(values), **flags), cases, tables)
    for case, repeat in list(kept.missing()):
        with kept.measurement(case, repeat) as figures:
            figures += values[repeat]
    return kept


def tables(lines: list[Line]) -> str:
    return " ".join(f"{line['what']} {repeated.cell(line)}" for line in lines)


def test_each_repeat_has_an_order_of_its_own_that_the_seed_repeats(tmp_path: Path) -> None:
    def order(seed: int) -> list[tuple[Case, int]]:
        return list(Measurements("made-up", RepeatFlags(json=tmp_path / "a.json", seed=seed), CASES, tables).missing())

    first = order(0)
    assert [repeat for _, repeat in first] == [0] * 6 + [1] * 6 + [2] * 6
    orders = [[case for case, of in first if of == repeat] for repeat in range(3)]
    assert all(sorted(map(str, each)) == sorted(map(str, CASES)) for each in orders)
    assert orders[0] != orders[1] or orders[1] != orders[2]
    assert order(0) == first
    assert order(1) != first


def test_a_figure_is_the_median_of_its_repeats_with_the_spread_of_another_median(tmp_path: Path) -> None:
    values = {repeat: [repeated.figure("sum", value, "ms")] for repeat, value in enumerate((12.0, 10.0, 11.0))}
    (line,) = taken(tmp_path / "a.json", values).lines()
    assert (line["value"], line["n"], line["system"]) == (11.0, 3, "a")
    # Student's t for two degrees of freedom, a deviation of 1, and the square root of pi / 3.
    assert line["high"] - 11.0 == pytest.approx(4.303 * 1.0233, rel=1e-3)
    assert line["high"] + line["low"] == pytest.approx(22.0)
    assert repeated.cell(line) == "11.0 (6.6-15.4)"


def test_a_percentile_wants_a_hundred_values_in_each_repeat(tmp_path: Path) -> None:
    many = [1.0] * 98 + [5.0, 9.0]
    (line,) = taken(tmp_path / "a.json", {0: [repeated.times("push", many)], 1: [repeated.times("push", many)]}).lines()
    assert repeated.tail(line) == "p99 5.0"
    # The largest is that of all repeats, also of those with a percentile.
    few = {0: [repeated.times("push", many)], 1: [repeated.times("push", [1.0, 3.0])]}
    (line,) = taken(tmp_path / "b.json", few).lines()
    assert repeated.tail(line) == "largest 9.0"
    assert line["count"] == 102


def test_unsteady_figures_and_busy_cores_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherPrograms, "share", lambda _: 0.31)
    values = {
        repeat: [repeated.figure("sum", value, "ms"), repeated.figure("bytes", 7.0, "B")]
        for repeat, value in enumerate((410.0, 198.0, 168.0))
    }
    with taken(tmp_path / "a.json", values, csv=tmp_path / "a.csv"):
        pass
    shown = capsys.readouterr().out
    assert "Other programs used up to 31% of the cores: end them, and measure again into another file." in shown
    assert "1 of 2 figures are uncertain by more than a quarter: --repeats 5 or more" in shown
    assert f"written anew: {tmp_path}/a.csv\n3 of 3 measurements: {tmp_path}/a.json" in shown
    with (tmp_path / "a.csv").open() as file:
        table = csv.DictReader(file)
        rows = list(table)
    assert table.fieldnames == ["system", "actors", "repeat", "others", "what", "value", "unit"]
    assert [(row["repeat"], row["what"], row["value"]) for row in rows[:3]] == [
        ("0", "sum", "410.0"),
        ("0", "bytes", "7.0"),
        ("1", "sum", "198.0"),
    ]
    assert {row["others"] for row in rows} == {"0.31"}


def test_a_later_run_measures_what_is_missing_and_nothing_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    taken(path, {0: [repeated.figure("sum", 1.0, "ms")]}, CASES)
    more = Measurements("made-up", RepeatFlags(json=path, repeats=2), CASES, tables)
    assert [repeat for _, repeat in more.missing()] == [1] * 6
    assert more.planned == 12

    @dataclasses.dataclass(frozen=True)
    class OtherFlags(RepeatFlags):
        seconds: float = 2.0

    for command, flags, said in (
        ("another", RepeatFlags(json=path), "has measurements of command made-up"),
        ("made-up", OtherFlags(json=path), "has measurements of seconds None"),
        ("made-up", RepeatFlags(json=path, seed=1), "has measurements of seed 0"),
    ):
        with pytest.raises(SystemExit, match=said):
            Measurements(command, flags, CASES, tables)
    kept = json.loads(path.read_text())
    kept["machine"]["commit"] = "0000000"
    path.write_text(json.dumps(kept))
    with pytest.raises(SystemExit, match=r"has measurements of commit 0000000 .*choose another file with --json"):
        Measurements("made-up", RepeatFlags(json=path), CASES, tables)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda kept: kept.update(extra=1), "the field extra is unknown"),
        (lambda kept: kept.pop("machine"), "it has no field machine"),
        (lambda kept: kept["measurements"].append({}), "it has no field case"),
        (lambda kept: kept.update(measurements=3), "not iterable"),
    ],
)
def test_a_file_of_another_kind_is_refused_and_stays(
    change: Callable[[dict[str, Any]], Any], said: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.json"
    taken(path, {0: [repeated.figure("sum", 1.0, "ms")]})
    kept = json.loads(path.read_text())
    change(kept)
    path.write_text(json.dumps(kept))
    before = path.read_text()
    with pytest.raises(SystemExit, match=rf"is no file of measurements \(.*{said}.*choose another file with --json"):
        Measurements("made-up", RepeatFlags(json=path), CASES, tables)
    assert path.read_text() == before


def test_files_of_one_name_are_refused_before_anything_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "a.svg"
    for flags in (
        RepeatFlags(json=path, csv=path),
        RepeatFlags(json=path, plot=path),
        RepeatFlags(csv=path, plot=path),
    ):
        with pytest.raises(ConfigurationError, match="each needs a file of its own"):
            Measurements("made-up", flags, CASES, tables)
    assert not path.exists()
