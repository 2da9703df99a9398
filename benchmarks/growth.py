"""Growth of the cost of an operation with its size."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks import report
from benchmarks.contest import Entry, measure

TOLERANCE = 0.15
"""Allowed excess of the exponent over the whole range, for noise and cache effects."""
STEEPEST_TOLERANCE = 0.3
"""Allowed excess between neighbouring values, which noise affects more."""


@dataclass(frozen=True)
class Axis:
    """A quantity that grows, and the task whose cost is measured."""

    name: str
    about: str
    task: str
    setting: str
    """Argument of the task that is varied."""
    values: tuple[int, ...]
    order: float
    """Expected exponent of the cost: 1 is proportional, 0 constant."""
    settings: dict[str, Any] = field(default_factory=dict)
    unit: str = "us"
    cost: Callable[[dict[str, Any]], float] = lambda each: 1e6 * each["elapsed"] / each["count"]


BATCHES = (32, 128, 512, 2048, 4096)
AXES = (
    Axis("tree_items", "items in the tree; sample and rewrite 512", "Tree", "items", (10**4, 10**5, 10**6, 10**7), 0.0),
    Axis("tree_batch", "batch; sample and rewrite in a tree of 2^20", "Tree", "batch", BATCHES, 1.0),
    Axis("batch", "batch; sample in process", "SampleInProcess", "batch", BATCHES, 1.0),
    Axis("batch_remote", "batch; sample over loopback", "Sample", "batch", BATCHES, 1.0),
    Axis(
        "rows",
        "small rows in a memory in process; sample 256 and rewrite",
        "Vectors",
        "items",
        tuple(1 << power for power in (16, 18, 20, 22, 24)),
        0.0,
    ),
    Axis(
        "rows_batch",
        "batch; sample of 2^20 small rows in process and rewrite",
        "Vectors",
        "batch",
        tuple(1 << power for power in (4, 6, 8, 10, 12, 14, 16)),
        1.0,
        {"items": 1 << 20},
    ),
    Axis("window", "steps of a sequence; sample 64", "Windows", "length", (5, 10, 20, 40, 80), 1.0, {"batch": 64}),
    Axis("frame", "pixels across a frame; sample 128", "Windows", "side", (21, 42, 84, 168, 336), 2.0, {"batch": 128}),
    Axis(
        "connections",
        "connections that push 50 transitions 200 times a second together; CPU of the server for a push",
        "Connections",
        "connections",
        (1, 8, 32, 64, 128, 256),
        0.0,
        {"pushes_per_s": 200.0},
        cost=lambda each: 1e6 * each["server_cpu_s"] / each["count"],
    ),
)
NAMED = {axis.name: axis for axis in AXES}


def growth(axes: tuple[str, ...] = tuple(NAMED), rounds: int = 3, seconds: float = 1.0) -> None:
    """Costs over items, rows, batch, window, frame and connections, and the exponent that each grows with.

    Args:
        axes: Names of the axes.
        rounds: Turns of each value.
        seconds: Length of a turn.
    """
    if unknown := set(axes) - set(NAMED):
        raise SystemExit(f"--axes has no {', '.join(sorted(unknown))}; it takes {', '.join(NAMED)}")
    for axis in map(NAMED.__getitem__, axes):
        entries = [
            Entry(str(value), "innet", axis.task, {**axis.settings, axis.setting: value}) for value in axis.values
        ]
        measured = measure(entries, rounds, seconds)
        costs = []
        for value in axis.values:
            turns = measured[str(value)].rounds
            costs.append(statistics.median(axis.cost(each) for each in turns))
            report.line(f"growth_{axis.name}", "innet", costs[-1], axis.unit, at=value, **report.times(turns))
        report.closing(f"growth_{axis.name}", "innet", **standing(axis.values, costs, axis.order))


def standing(values: Sequence[int], costs: Sequence[float], order: float) -> dict[str, Any]:
    """Growth exponents over the whole range and in the steepest part, and whether they meet the goal.

    The steepest part shows a cost that grows only at the end of the range.
    """
    steps = np.diff(np.log(costs)) / np.diff(np.log(values))
    whole, steepest = math.log(costs[-1] / costs[0]) / math.log(values[-1] / values[0]), float(steps.max())
    return {
        "goal": f"grows with an exponent of at most {order:g}",
        "ratio": whole,
        "steepest": steepest,
        "met": whole <= order + TOLERANCE and steepest <= order + STEEPEST_TOLERANCE,
    }
