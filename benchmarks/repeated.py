"""Repeated measurements of cases in a changing order, kept in a JSON file that a later run continues."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import json
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.report import Line
from innet_drl.analysis.pictures import check_outputs
from innet_drl.analysis.spread import NOISY, spread, unsteady
from innet_drl.train.files import replacing
from innet_drl.train.observe.cost import OtherPrograms

Case = dict[str, Any]
"""What is measured: names and plain JSON values. The figures of a case have them too."""
Figure = dict[str, Any]
"""`what`, `value` and `unit`; of many times also their `count`, the `largest`, and of 100 or more the `p99`."""
COUNT_OF_P99 = 100
"""Fewest values whose 99th percentile is not their largest."""


@dataclass(frozen=True)
class RepeatFlags:
    """Repeats of each case, and files."""

    repeats: int = 3
    """Measurements of each case, each time in another order. Tables have their median and its spread."""
    seed: int = 0
    """Seed of the order."""
    json: Path | None = None
    """File of all measurements and their medians; `COMMAND.json` by default. An existing one gets the missing ones."""
    csv: Path | None = None
    """File of all measurements as a table, a figure a row."""
    plot: Path | None = None
    """Picture, .svg, .png or .pdf; needs matplotlib."""


def figure(what: str, value: float, unit: str, **more: Any) -> Figure:
    """Returns a figure of one measurement."""
    return {"what": what, "value": float(f"{value:.5g}"), "unit": unit, **more}


def times(what: str, milliseconds: Sequence[float], **more: Any) -> Figure:
    """Returns the median of times in ms, with the largest, and the 99th percentile of at least 100."""
    tails = {"largest": max(milliseconds)}
    if len(milliseconds) >= COUNT_OF_P99:
        tails["p99"] = np.percentile(milliseconds, 99)
    rounded = {name: float(f"{tail:.5g}") for name, tail in tails.items()}
    return figure(what, statistics.median(milliseconds), "ms", **rounded, count=len(milliseconds), **more)


class Measurements:
    """Measurements of one command.

    Args:
        command: Name of the command.
        flags: Its flags. Those that say what is measured have to equal the file's.
        cases: All cases.
    """

    def __init__(self, command: str, flags: RepeatFlags, cases: Sequence[Case]) -> None:
        if flags.repeats < 1:
            raise SystemExit(f"--repeats {flags.repeats}: at least 1")
        self.path = flags.json or Path(f"{command}.json")
        check_outputs(self.path, flags.csv, flags.plot, needs_plot=flags.plot is not None)
        self._flags, self._cases = flags, cases
        kept = {field.name for field in dataclasses.fields(RepeatFlags)} - {"seed"}
        of_flags = {name: value for name, value in dataclasses.asdict(flags).items() if name not in kept}
        self._about = {
            "command": command,
            "flags": json.loads(json.dumps(of_flags, default=str)),
            "machine": report.machine(),
        }
        self._measured: list[dict[str, Any]] = self._read() if self.path.exists() else []

    @property
    def planned(self) -> int:
        """Number of all measurements, with those of an earlier run."""
        return len(self._measured) + sum(1 for _ in self.missing())

    def missing(self, **values: Any) -> Iterator[tuple[Case, int]]:
        """Yields each case with these values, with the number of a repeat that is not measured yet.

        The order of the cases differs between repeats.
        """
        chosen = [case for case in self._cases if values.items() <= case.items()]
        done = {(_key(each["case"]), each["repeat"]) for each in self._measured}
        for repeat in range(self._flags.repeats):
            order = random.Random(f"{self._flags.seed} {repeat}").sample(chosen, len(chosen))
            yield from ((case, repeat) for case in order if (_key(case), repeat) not in done)

    @contextlib.contextmanager
    def measurement(self, case: Case, repeat: int) -> Iterator[list[Figure]]:
        """Yields a list for the figures of one measurement, which is kept unless the context raises."""
        at = f"{len(self._measured) + 1} of {self.planned}"
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in case.items() if value is not None)
        print(f"{at}: {told}", file=sys.stderr, flush=True)
        figures: list[Figure] = []
        others = OtherPrograms(sorted(os.sched_getaffinity(0)))
        yield figures
        measured = {"case": case, "repeat": repeat, "others": round(others.share(), 4), "figures": figures}
        self._measured.append(measured)
        self._write()

    def lines(self) -> list[Line]:
        """Returns each figure of each case: the median of its repeats, its spread `low` to `high`, their number `n`."""
        found: dict[str, list[tuple[Case, Figure]]] = {}
        for each in self._measured:
            for one in each["figures"]:
                found.setdefault(_key({**each["case"], "what": one["what"]}), []).append((each["case"], one))
        # In the order of the cases: that of the measurements changes.
        place = {_key(case): number for number, case in enumerate(self._cases)}
        ordered = sorted(found.values(), key=lambda repeats: place.get(_key(repeats[0][0]), len(place)))
        return [{**repeats[0][0], **_median([one for _, one in repeats])} for repeats in ordered]

    def finish(self, tables: Callable[[list[Line]], str], draw: Callable[[list[Line], Path], None] | None) -> None:
        """Prints the tables of what was measured, and writes the files."""
        lines = self.lines()
        if not lines:
            return
        print(tables(lines))
        print("\n".join(self._notes(lines)))
        self._write()
        if self._flags.csv:
            self._write_csv(self._flags.csv)
            print(f"written anew: {self._flags.csv}")
        if self._flags.plot and draw:
            draw(lines, self._flags.plot)
            print(f"written anew: {self._flags.plot}")
        print(f"{len(self._measured)} of {self.planned} measurements: {self.path}")
        if len(self._measured) < self.planned:
            print("the same command measures the others")

    def _notes(self, lines: list[Line]) -> Iterator[str]:
        """Says what the cells are, and what may have disturbed them."""
        most = max(each["others"] for each in self._measured)
        yield (
            f"Medians of up to {self._flags.repeats} measurements (where 95 of 100 such medians fall). Other programs "
            f"used up to {most:.0%} of the cores"
            f"{': end them, and measure again into another file' if most > NOISY else ''}."
        )
        yield from unsteady([(line["value"], line["low"], line["high"]) for line in lines], self._flags.repeats)

    def _read(self) -> list[dict[str, Any]]:
        """Reads the file of an earlier run.

        Raises:
            SystemExit: It is of another command, other flags, another commit or machine.
        """
        other = "choose another file with --json"
        try:
            kept = _checked(json.loads(self.path.read_text()), *self._about, "medians", "measurements")
            measured = [_checked(each, "case", "repeat", "others", "figures") for each in kept["measurements"]]
        except (OSError, ValueError, TypeError) as error:
            raise SystemExit(f"{self.path} is no file of measurements ({error}): {other}") from None
        for what, now in self._about.items():
            if (differs := _difference(kept[what], now)) is not None:
                named = "command " if what == "command" else ""
                raise SystemExit(f"{self.path} has measurements of {named}{differs}: {other}")
        return measured

    def _write(self) -> None:
        told = {**self._about, "medians": self.lines(), "measurements": self._measured}
        with replacing(self.path) as file:
            file.write_text(json.dumps(told, indent=1))

    def _write_csv(self, path: Path) -> None:
        rows = [
            {**each["case"], "repeat": each["repeat"], "others": each["others"], **one}
            for each in self._measured
            for one in each["figures"]
        ]
        with replacing(path) as file, file.open("w", newline="") as out:
            writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)))
            writer.writeheader()
            writer.writerows(rows)


@contextlib.contextmanager
def measurements(
    command: str,
    flags: RepeatFlags,
    cases: Sequence[Case],
    tables: Callable[[list[Line]], str],
    draw: Callable[[list[Line], Path], None] | None = None,
) -> Iterator[Measurements]:
    """Yields the measurements of a command, and finishes them, also when Ctrl-C, SIGTERM or a failure ends it."""
    kept = Measurements(command, flags, cases)
    try:
        yield kept
    finally:
        kept.finish(tables, draw)


def cell(line: Line, form: str = ",.1f") -> str:
    """Returns a median with its spread: `12.0 (11.5-12.6)`."""
    value, low, high = (format(line[name], form) for name in ("value", "low", "high"))
    return value if line["n"] == 1 else f"{value} ({low}-{high})"


def tail(line: Line, form: str = ",.1f") -> str:
    """Returns the 99th percentile of times, or the largest where a repeat has fewer than 100, with its name."""
    name = "p99" if "p99" in line else "largest"
    return f"{name} {line[name]:{form}}"


def repeats(lines: list[Line]) -> str:
    """Returns the number of repeats: `n = 3`, or `n = 2 to 3`."""
    low, high = (end(line["n"] for line in lines) for end in (min, max))
    return f"n = {high}" if low == high else f"n = {low} to {high}"


def _median(repeats: list[Figure]) -> Line:
    """The line of a figure's repeats."""
    values = [each["value"] for each in repeats]
    low, high = spread(values)
    line = repeats[0] | {"value": statistics.median(values), "low": low, "high": high, "n": len(values)}
    if "count" in line:
        line["count"] = sum(each["count"] for each in repeats)
    if "largest" in line:
        line["largest"] = max(each["largest"] for each in repeats)
        tails = [each["p99"] for each in repeats if "p99" in each]
        if len(tails) == len(repeats):
            line["p99"] = statistics.median(tails)
        else:
            line.pop("p99", None)
    return line


def _checked(values: dict[str, Any], *fields: str) -> dict[str, Any]:
    if differs := values.keys() ^ set(fields):
        raise ValueError(f"the field {min(differs)} is missing or unknown")
    return values


def _difference(kept: Any, now: Any) -> str | None:
    """The first difference of two values or mappings, in words."""
    if not isinstance(now, Mapping):
        return None if kept == now else f"{kept} (now {now})"
    for name in dict.fromkeys((*kept, *now)):
        if kept.get(name) != now.get(name):
            return f"{name.replace('_', '-')} {kept.get(name)} (now {now.get(name)})"
    return None


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
