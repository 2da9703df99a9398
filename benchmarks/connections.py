"""Push latency of many connections in open loop, at half of the server's capacity."""

from __future__ import annotations

import sys

import numpy as np

from benchmarks import report, sweep
from benchmarks.clients import PUSH
from benchmarks.contest import Entry, measure, missing

SYSTEMS = ("innet", "reverb", "redis")
COUNTS = (8, 64, 256)


def connections(rounds: int = 3, seconds: float = 4.0) -> None:
    """p50 and p99 of a push of 50 transitions from 8, 64 and 256 connections that offer the same load together.

    The load is half of the largest rate of 8 connections of the same system; so each system has a load
    of its own.

    Args:
        rounds: Turns of each number of connections.
        seconds: Length of a turn.
    """
    for system in SYSTEMS:
        if lacks := missing(system):
            print(f"connections: {system} is left out, it lacks {lacks}", file=sys.stderr)
            continue
        settings = sweep.best(system, "Writer")
        unlimited = Entry(system, system, "Connections", {**settings, "connections": COUNTS[0], "pushes_per_s": 0.0})
        (most,) = measure([unlimited], rounds, seconds).values()
        capacity = float(np.median([each["count"] / each["elapsed"] for each in most.rounds])) / PUSH
        told = report.times(most.rounds) | {"settings": settings, "version": most.version}
        report.line("connections_capacity", system, capacity, "pushes/s", connections=COUNTS[0], **told)
        entries = [
            Entry(str(count), system, "Connections", {**settings, "connections": count, "pushes_per_s": capacity / 2})
            for count in COUNTS
        ]
        p99 = {}
        for label, measured in measure(entries, rounds, seconds).items():
            p99[label] = [float(np.percentile(each["times_ms"], 99)) for each in measured.rounds]
            told = report.times(measured.rounds) | {
                "offered_per_s": round(capacity / 2, 1),
                "version": measured.version,
            }
            report.line("connections", system, float(np.median(p99[label])), "ms", connections=int(label), **told)
        ratio = float(np.median(np.divide(p99["256"], p99["8"])))
        goal = "p99 of 256 at most 3 x p99 of 8"
        report.closing("connections", system, goal=goal, ratio=ratio, met=ratio <= 3.0)
