"""Repeated measurements: their order, their spread, limits above which results warn, and files of an earlier run."""

from __future__ import annotations

import csv
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from innet_drl.train.errors import writing
from innet_drl.train.files import replacing

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5 % quantiles of Student's distribution with 1 to 9 degrees of freedom. More use the last, an upper bound."""

NOISY = 0.05
"""Share of the cores that other programs may use without a warning."""
UNSTEADY = 0.25
"""Half of a figure's spread, as a share of its median, above which results warn."""


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the interval in which the median of as many new repeats falls in 95 of 100 runs.

    A prediction interval for normal values, median +- t s sqrt(pi / n): a median of n has a variance of at most
    pi s^2 / 2n (Laplace), and two differ. It is not below 0 where no value is, and a point for one value.
    """
    count, median = len(values), statistics.median(values)
    if count == 1:
        return values[0], values[0]
    half = STUDENT[min(count, 10) - 2] * statistics.stdev(values) * math.sqrt(math.pi / count)
    return max(median - half, min(0.0, *values)), median + half


SPREAD: dict[str, Callable[[Sequence[float]], float]] = {
    "median": statistics.median,
    "low": lambda values: spread(values)[0],
    "high": lambda values: spread(values)[1],
}
"""What results have of repeats."""


def unsteady(figures: Sequence[tuple[float, float, float]], repeats: int) -> list[str]:
    """Returns a line that counts the figures (median, low, high) of so many repeats with a wide spread, if any has."""
    wide = sum(high - low > 2 * UNSTEADY * median for median, low, high in figures)
    told = f"{wide} of {len(figures)} figures are uncertain by more than a quarter: --repeats {repeats + 2} or more"
    return [told] if wide else []


def shuffled(cases: Sequence[Any], repeats: int, seed: int) -> Iterator[tuple[int, Any]]:
    """Yields each case with the number of each repeat, which has an order of its own."""
    for repeat in range(repeats):
        yield from ((repeat, case) for case in random.Random(f"{seed} {repeat}").sample(cases, len(cases)))


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table, and says so."""
    with writing(str(path), "choose another file with --csv"), replacing(path) as file, file.open("w") as out:
        writer = csv.DictWriter(out, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"written anew: {path}")


def checked(values: dict[str, Any], *fields: str) -> dict[str, Any]:
    """Returns the values of a file, or raises a `ValueError` that names a missing or unknown field."""
    if unknown := set(values) - set(fields):
        raise ValueError(f"the field {min(unknown)} is unknown")
    if missing := set(fields) - set(values):
        raise ValueError(f"it has no field {min(missing)}")
    return values


def differences(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Returns the first three values that differ, in words; empty if none does."""
    names = [name for name in dict.fromkeys((*now, *kept)) if kept.get(name) != now.get(name)]
    return ", ".join(f"{name} {kept.get(name)} (now {now.get(name)})" for name in names[:3])
