"""Repeated measurements of cases in a changing order, kept in a JSON file that a later run continues."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.report import Line
from innet_drl.analysis.pictures import check_outputs
from innet_drl.analysis.repeats import NOISY, checked, differences, shuffled, spread, unsteady, write_csv
from innet_drl.train.files import replacing
from innet_drl.train.observe.cost import OtherPrograms

Case = dict[str, Any]
"""What is measured: names and plain JSON values. The figures of a case have them too."""
Figure = dict[str, Any]
"""`what`, `value` and `unit`; of many times also their `count`, the `largest`, and of 100 or more the `p99`."""


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
    if len(milliseconds) >= 100:
        tails["p99"] = np.percentile(milliseconds, 99)
    rounded = {name: float(f"{tail:.5g}") for name, tail in tails.items()}
    return figure(what, statistics.median(milliseconds), "ms", **rounded, count=len(milliseconds), **more)


class Measurements(contextlib.AbstractContextManager["Measurements"]):
    """Measurements of one command. At its end, also by Ctrl-C, SIGTERM or a failure, the context reports them.

    Args:
        command: Name of the command.
        flags: Its flags. Those that say what is measured have to equal the file's.
        cases: All cases.
        tables: Makes the tables of what was measured.
        draw: Draws the picture, into a file.
    """

    def __init__(
        self,
        command: str,
        flags: RepeatFlags,
        cases: Sequence[Case],
        tables: Callable[[list[Line]], str],
        draw: Callable[[list[Line], Path], None] | None = None,
    ) -> None:
        if flags.repeats < 1:
            raise SystemExit(f"--repeats {flags.repeats}: at least 1")
        self.path = flags.json or Path(f"{command}.json")
        check_outputs(self.path, flags.csv, flags.plot, needs_plot=flags.plot is not None)
        self._flags, self._cases, self._tables, self._draw = flags, cases, tables, draw
        own = dataclasses.asdict(flags).items()
        of_flags = {name: value for name, value in own if name == "seed" or not hasattr(RepeatFlags, name)}
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
        """Yields each case with these values, with the number of a repeat that is missing; each has its own order."""
        chosen = [case for case in self._cases if values.items() <= case.items()]
        done = {(_key(each["case"]), each["repeat"]) for each in self._measured}
        for repeat, case in shuffled(chosen, self._flags.repeats, self._flags.seed):
            if (_key(case), repeat) not in done:
                yield case, repeat

    @contextlib.contextmanager
    def measurement(self, case: Case, repeat: int) -> Iterator[list[Figure]]:
        """Yields a list for the figures of one measurement, which is kept unless the context raises."""
        at = f"{len(self._measured) + 1} of {self.planned}"
        told = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in case.items() if value is not None)
        print(f"{at}: {told}", file=sys.stderr, flush=True)
        figures: list[Figure] = []
        others = OtherPrograms(sorted(os.sched_getaffinity(0)))
        yield figures
        share = round(others.share(), 4)
        self._measured.append({"case": case, "repeat": repeat, "others": share, "figures": figures})
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

    def __exit__(self, *failure: object) -> None:
        if not (lines := self.lines()):
            return
        print(self._tables(lines))
        most = max(each["others"] for each in self._measured)
        print(
            f"Medians of up to {self._flags.repeats} measurements (where 95 of 100 such medians fall). Other programs "
            f"used up to {most:.0%} of the cores"
            f"{': end them, and measure again into another file' if most > NOISY else ''}.",
            *unsteady([(line["value"], line["low"], line["high"]) for line in lines], self._flags.repeats),
            sep="\n",
        )
        self._write()
        if self._flags.csv:
            rows = [
                {**each["case"], "repeat": each["repeat"], "others": each["others"], **one}
                for each in self._measured
                for one in each["figures"]
            ]
            write_csv(self._flags.csv, rows)
        if self._flags.plot and self._draw:
            self._draw(lines, self._flags.plot)
            print(f"written anew: {self._flags.plot}")
        print(f"{len(self._measured)} of {self.planned} measurements: {self.path}")
        if len(self._measured) < self.planned:
            print("the same command measures the others")

    def _read(self) -> list[dict[str, Any]]:
        """Reads the file of an earlier run.

        Raises:
            SystemExit: It is of another command, other flags, another commit or machine.
        """
        other = "choose another file with --json"
        try:
            kept = checked(json.loads(self.path.read_text()), *self._about, "medians", "measurements")
            measured = [checked(each, "case", "repeat", "others", "figures") for each in kept["measurements"]]
        except (OSError, ValueError, TypeError) as error:
            raise SystemExit(f"{self.path} is no file of measurements ({error}): {other}") from None
        told = [{"command": each["command"], **each["flags"], **each["machine"]} for each in (kept, self._about)]
        if differs := differences(*told):
            raise SystemExit(f"{self.path} has measurements of {differs}: {other}")
        return measured

    def _write(self) -> None:
        told = {**self._about, "medians": self.lines(), "measurements": self._measured}
        with replacing(self.path) as file:
            file.write_text(json.dumps(told, indent=1))


def grouped(lines: Sequence[Line], *names: str) -> Iterator[tuple[tuple[Any, ...], list[Line]]]:
    """Yields the lines that have the same values of these names, with the values."""
    for values in dict.fromkeys(tuple(map(line.get, names)) for line in lines):
        yield values, [line for line in lines if tuple(map(line.get, names)) == values]


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
    ends: dict[str, Callable[[list[float]], float]] = {"count": sum, "largest": max, "p99": statistics.median}
    for name, of in ends.items():
        line.pop(name, None)
        if all(name in each for each in repeats):
            line[name] = of([each[name] for each in repeats])
    return line


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
