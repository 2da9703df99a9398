"""The spread of repeated measurements, the interval of another run's median, and limits above which results warn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

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


def low(values: Sequence[float]) -> float:
    """Returns the lower end of `spread`."""
    return spread(values)[0]


def high(values: Sequence[float]) -> float:
    """Returns the upper end of `spread`."""
    return spread(values)[1]


def unsteady(figures: Sequence[tuple[float, float, float]], repeats: int) -> list[str]:
    """Returns a line that counts the figures (median, low, high) of so many repeats with a wide spread, if any has."""
    wide = sum(high - low > 2 * UNSTEADY * median for median, low, high in figures)
    told = f"{wide} of {len(figures)} figures are uncertain by more than a quarter: --repeats {repeats + 2} or more"
    return [told] if wide else []
