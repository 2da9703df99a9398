"""A learner far from its server: its rate over a link with a delay, beside its rate over the same relay without one."""

from __future__ import annotations

import statistics
import sys

from benchmarks import report
from benchmarks.contest import Entry, measure, missing

READERS = {
    "innet": ("innet", "learner"),
    "innet, one at a time": ("innet", "client"),
    "redis baseline": ("redis", "baseline"),
}
"""A prefetching reader that updates priorities, a reader without prefetching, and the Redis baseline."""


def delay(rounds: int = 3, seconds: float = 3.0, each_way_ms: float = 5.0, peers: bool = True) -> None:
    """Rates of a learner that only samples 512 and rewrites priorities, without and with a delay.

    Args:
        rounds: Turns of each entry.
        seconds: Length of a turn.
        each_way_ms: One-way delay in milliseconds.
        peers: Measure the baseline too.
    """
    entries, about = [], {}
    for name, (system, reader) in READERS.items():
        if lacks := missing(system):
            print(f"delay: {name} is left out, it lacks {lacks}", file=sys.stderr)
        elif peers or system == "innet":
            for delay_ms in (0.0, each_way_ms):
                label = f"{name}, {delay_ms:g} ms"
                settings = {"reader": reader, "each_way_ms": delay_ms}
                entries.append(Entry(label, system, "SampleOverLink", settings))
                about[label] = name, delay_ms
    measured = measure(entries, rounds, seconds)
    rates: dict[str, list[list[float]]] = {}
    for label, one in measured.items():
        name, delay_ms = about[label]
        rates.setdefault(name, []).append([each["count"] / each["elapsed"] for each in one.rounds])
        median = statistics.median(rates[name][-1])
        told = report.times(one.rounds) | {"version": one.version}
        report.line("delay", name, median, "batches/s", each_way_ms=delay_ms, **told)
    for name, (local, far) in rates.items():
        ratio = statistics.median(there / here for here, there in zip(local, far, strict=True))
        goal = {"goal": "0.9 of the rate without a delay", "met": ratio >= 0.9} if name == "innet" else {}
        report.closing("delay", name, ratio=ratio, **goal)
