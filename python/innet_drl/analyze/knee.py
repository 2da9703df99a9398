"""The knee of a curve of rates, by the Universal Scalability Law (Gunther, 2007), and the recommended point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares

from innet_drl.analyze.point import Point

ELASTICITY = 0.5
"""At the knee 10 % more actors or threads buy 5 % more frames."""
SMALLEST_CURVE = 3
"""Points of a curve to which the law is fitted; between two points the elasticity is their slope."""
NEAR_BEST = 0.97
"""Share of the highest rates within which fewer threads, actors and environments are recommended."""


def knee(counts: Sequence[int], rates: Sequence[float]) -> float | None:
    """Returns where 10 % more buys less than 5 %, or `None` where the counts end before it.

    The rates are fitted by n / (1 + s (n - 1) + k n (n - 1)) times a factor, s (contention) and k (coherency) at
    least 0, with relative errors.
    """
    if len(counts) < 2 or min(rates) <= 0:
        return None
    if len(counts) < SMALLEST_CURVE:
        least, most = np.argsort(counts)
        slope = np.log(rates[most] / rates[least]) / np.log(counts[most] / counts[least])
        return None if slope > ELASTICITY else float(counts[least])
    n, logarithm = np.asarray(counts, float), np.log(rates)

    def law(values: Any, at: Any) -> Any:
        scale, contention, coherency = values
        return scale + np.log(at) - np.log1p(contention * (at - 1) + coherency * at * (at - 1))

    first = (logarithm[0] - np.log(n[0]), 0.1, 0.001)
    bounds = ((-np.inf, 0.0, 0.0), np.inf)
    contention, coherency = least_squares(lambda values: law(values, n) - logarithm, first, bounds=bounds).x[1:]

    def beyond(at: float) -> float:
        lost = at * (contention + coherency * (2 * at - 1))
        return float(1 - lost / (1 + contention * (at - 1) + coherency * at * (at - 1)) - ELASTICITY)

    first_count, last_count = float(n.min()), float(n.max())
    if beyond(last_count) > 0:
        return None
    if beyond(first_count) <= 0:
        return first_count
    return round(float(brentq(beyond, first_count, last_count)), 2)


def quality(point: Point, points: Sequence[Point]) -> float:
    """The smaller one of a point's frames and updates a second, each as a share of the highest."""
    frames, updates = max(p.frames_per_s for p in points), max(p.updates_per_s for p in points)
    return min(point.frames_per_s / frames if frames else 0.0, point.updates_per_s / updates if updates else 0.0)


def recommended(points: Sequence[Point]) -> Point:
    """Returns the point with the fewest threads, then actors and environments, of those close to the best."""
    best = max(quality(point, points) for point in points)
    near = [point for point in points if quality(point, points) >= NEAR_BEST * best]
    return min(near, key=lambda point: (point.threads, point.actors, point.environments))
