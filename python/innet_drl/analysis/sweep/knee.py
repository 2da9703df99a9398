"""The knee of a curve of rates, and the recommended point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from innet_drl.analysis.sweep.point import SWEPT, Point

ELASTICITY = 0.5
"""Elasticity at the knee: 10 % more actors or threads give 5 % more frames."""
SMALLEST_CURVE = 3
"""Least number of points for a fit; with two points the elasticity is their slope."""
SHARPEST = 16.0
"""Largest sharpness of a knee: the curve is then within 5 % of its two straight parts."""
NEAR_BEST = 0.97
"""Share of the highest rates that is good enough to recommend fewer threads, actors and environments."""


def knee(counts: Sequence[int], rates: Sequence[float]) -> float | None:
    """Returns the count at which 10 % more gives 5 % more, or `None` if the counts end before it.

    The rates are fitted, with relative errors, by c (1 + (k / n)^p)^(-1 / p), which is proportional to n first and
    constant in the end. Its elasticity is 1/2 at n = k. With p = 1 it is Amdahl's law; a larger p is a sharper knee.
    """
    if len(counts) < 2 or min(rates) <= 0:
        return None
    if len(counts) < SMALLEST_CURVE:
        least, most = np.argsort(counts)
        slope = np.log(rates[most] / rates[least]) / np.log(counts[most] / counts[least])
        return None if slope > ELASTICITY else float(counts[least])
    n, measured = np.log(np.asarray(counts, float)), np.log(rates)

    def residuals(values: Any) -> Any:
        most, at, sharpness = values
        return most - np.logaddexp(0.0, sharpness * (at - n)) / sharpness - measured

    # Knees far outside of the counts are indistinguishable.
    bounds = ((-np.inf, n.min() - 1, 1.0), (np.inf, n.max() + 3, SHARPEST))
    fits = [
        least_squares(residuals, (measured.max(), at, sharpness), bounds=bounds)
        for at in (n.min(), n.mean(), n.max())
        for sharpness in (1.5, 6.0)
    ]
    at = min(fits, key=lambda fit: fit.cost).x[1]
    return None if at >= n.max() else round(float(np.exp(max(at, n.min()))), 2)


def curve_of(points: Sequence[Point], name: str) -> list[Point]:
    """Returns the longest series of points that differ only in `name`, sorted by it; of equal length, the highest."""
    curves: dict[tuple[int, ...], list[Point]] = {}
    for point in points:
        others = tuple(getattr(point, other) for other in SWEPT if other != name)
        curves.setdefault(others, []).append(point)
    longest = max(curves.values(), key=lambda curve: (len(curve), max(point.frames_per_s for point in curve)))
    return sorted(longest, key=lambda point: int(getattr(point, name)))


def quality(point: Point, points: Sequence[Point]) -> float:
    """The smaller of a point's relative rates: frames and updates a second, as shares of the highest."""
    frames, updates = max(p.frames_per_s for p in points), max(p.updates_per_s for p in points)
    return min(point.frames_per_s / frames if frames else 0.0, point.updates_per_s / updates if updates else 0.0)


def recommended(points: Sequence[Point]) -> Point:
    """Returns the near-best point with the fewest threads, then actors, then environments."""
    best = max(quality(point, points) for point in points)
    near = [point for point in points if quality(point, points) >= NEAR_BEST * best]
    return min(near, key=lambda point: (point.threads, point.actors, point.environments))
