"""Result lines of the benchmarks: JSON objects with everything needed for a later comparison."""

from __future__ import annotations

import functools
import json
import os
import platform
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import innet_drl
from benchmarks.catalogue import Benchmark, Goal, Unit
from benchmarks.contest import Measured
from benchmarks.tasks import Round
from innet_drl.train.settings.machine import commit, processor, versions

RESULTS = ("README.md", "benchmarks/README.md", "benchmarks/sweep.json", "docs/reports")
"""Files that the benchmarks write."""


Line = dict[str, Any]
"""A printed result."""


def read(record: Path) -> dict[str, list[Line]]:
    """Returns the lines of a file by benchmark."""
    of: dict[str, list[Line]] = defaultdict(list)
    for text in record.read_text().splitlines():
        if text.startswith("{"):
            line = json.loads(text)
            of[line["benchmark"]].append(line)
    return of


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def results(benchmark: Benchmark, measured: dict[str, Measured]) -> None:
    """Prints a line for each system, by its label, then one for each goal."""
    values = {label: [benchmark.unit.of(each) for each in one.rounds] for label, one in measured.items()}
    settings = {entry.label: entry.settings for entry in benchmark.entries}
    for label, one in measured.items():
        median = statistics.median(values[label])
        more = times(one.rounds) | {"settings": settings[label], "version": one.version}
        more |= {unit.name: _median(unit, one) for unit in benchmark.also}
        line(benchmark.name, label, median, benchmark.unit.name, **more)
    for goal in benchmark.goals:
        if goal.ours in values and (goal.other is None or goal.other in values):
            _closing(benchmark, goal, values, measured)


def line(benchmark: str, system: str, value: float, unit: str, **more: Any) -> None:
    """Prints one result."""
    result = {"benchmark": benchmark, "system": system, "value": float(f"{value:.5g}"), "unit": unit}
    print(json.dumps({**result, **more, **machine()}), flush=True)


def shared_cores(processes: str) -> None:
    """Says on standard error that processes share this machine's cores."""
    print(f"{processes} share {len(os.sched_getaffinity(0))} cores of this machine", file=sys.stderr)


def closing(benchmark: str, system: str, **more: Any) -> None:
    """Prints a line without the machine, such as that of a goal."""
    told = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in more.items()}
    print(json.dumps({"benchmark": benchmark, "system": system, **told}), flush=True)


@functools.cache
def machine() -> dict[str, Any]:
    """Commit, processor and versions."""
    return {
        "commit": commit(Path(__file__).parent, (*RESULTS, "*.md")),
        "processor": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": versions().get("torch"),
        "innet_drl": innet_drl.__version__,
    }


def times(turns: list[Round]) -> dict[str, Any]:
    """Rate and percentiles of calls over all rounds, and CPU time of an operation."""
    count = sum(each["count"] for each in turns)
    told: dict[str, Any] = {"rounds": len(turns)}
    if all("elapsed" in each for each in turns):
        told["per_s"] = float(f"{count / sum(each['elapsed'] for each in turns):.5g}")
    times = [time for each in turns for time in each.get("times_ms", [])]
    if times:
        told["p50_ms"], told["p99_ms"] = (float(f"{np.percentile(times, share):.5g}") for share in (50, 99))
    for side in ("client", "server"):
        if all(f"{side}_cpu_s" in each for each in turns):
            told[f"{side}_cpu_us"] = float(f"{1e6 * sum(each[f'{side}_cpu_s'] for each in turns) / count:.5g}")
    return told


def _median(unit: Unit, measured: Measured) -> float:
    return float(f"{statistics.median(map(unit.of, measured.rounds)):.5g}")


def _closing(benchmark: Benchmark, goal: Goal, values: dict[str, list[float]], measured: dict[str, Measured]) -> None:
    """Prints whether a goal is met, and the ratios to the best peer and to the machine's limit."""

    def times_as_good(other: str) -> float:
        """Median ratio of the rounds to `other`: above 1 is better."""
        pairs = zip(values[goal.ours], values[other], strict=True)
        more = benchmark.unit.more_is_better
        return statistics.median(ours / theirs if more else theirs / ours for ours, theirs in pairs)

    told: dict[str, Any] = {}
    if goal.other is not None:
        ratio = times_as_good(goal.other)
        told |= {"goal": f"{goal.times:.3g} x {goal.other}", "ratio": ratio, "met": ratio >= goal.times}
    elif goal.at_most is not None:
        unit = goal.unit or benchmark.unit
        value = _median(unit, measured[goal.ours])
        told |= {"goal": f"at most {goal.at_most:g} {unit.name}", "ratio": value / goal.at_most}
        told["met"] = value <= goal.at_most
    others = [label for label in values if label not in benchmark.limits and not label.startswith("innet")]
    peers = {label: times_as_good(label) for label in others}
    if peers:
        best = min(peers, key=lambda label: peers[label])
        told |= {"best_peer": best, "times_best_peer": peers[best]}
    if benchmark.limit in values:
        told |= {"limit": benchmark.limit, "times_limit": times_as_good(benchmark.limit)}
    closing(benchmark.name, goal.ours, **told)
