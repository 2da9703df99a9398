"""The benchmarks, their systems and their goals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks import sweep
from benchmarks.contest import Entry
from benchmarks.tasks import Round


@dataclass(frozen=True)
class Unit:
    """Unit of a benchmark, and its value for a round."""

    name: str
    of: Callable[[Round], float]
    more_is_better: bool = False


MILLISECONDS = Unit("ms", lambda each: 1e3 * each["elapsed"] / each["count"])
MICROSECONDS = Unit("us", lambda each: 1e6 * each["elapsed"] / each["count"])
TRANSITIONS = Unit("transitions/s", lambda each: each["count"] / each["elapsed"], more_is_better=True)
BYTES = Unit("bytes/transition", lambda each: each["bytes"] / each["count"])
TRAJECTORIES = Unit("trajectories/s", TRANSITIONS.of, more_is_better=True)
GIGABYTES = Unit("GB/s", lambda each: each["bytes"] / each["elapsed"] / 1e9, more_is_better=True)
P99 = Unit("ms, p99", lambda each: float(np.percentile(each["times_ms"], 99)))
CPU = Unit("CPU s/GB", lambda each: each["cpu_s"] / (each["bytes"] / 1e9))
HELD = Unit("bytes of memory/byte held", lambda each: float(each["held"]))


@dataclass(frozen=True)
class Goal:
    """`ours` at least `times` as good as `other`, or no more than `at_most`."""

    ours: str
    other: str | None = None
    times: float = 1.0
    at_most: float | None = None
    unit: Unit | None = None
    """Of a goal `at_most` for another figure than the benchmark's."""


@dataclass(frozen=True)
class Benchmark:
    """Systems that are measured together."""

    name: str
    about: str
    unit: Unit
    entries: list[Entry]
    goals: list[Goal]
    """Empty if no peer is measured."""
    limit: str | None = None
    """Label of the entry with the best possible result of the machine."""
    once: bool = False
    """Measure one round only: counts do not vary, or a second round would measure another state."""
    apart: bool = False
    """Measure the systems one after the other: daemons of their own, as Ray has, count as dead after a pause."""
    also: tuple[Unit, ...] = ()
    """Further figures of its rounds."""

    @property
    def limits(self) -> set[str | None]:
        """Labels of the entries that are no systems but results of the machine."""
        return {self.limit, *(entry.label for entry in self.entries if entry.system == "machine")}


def _entry(label: str, system: str, task: str, part: str, **settings: Any) -> Entry:
    """An entry with the settings that were best for this part of the system in the recorded sweep."""
    return Entry(label, system, task, {**sweep.best(system, part), **settings})


def _limit(what: str) -> Entry:
    return Entry(what, "machine", "Limit", {"what": what})


def _parameters(what: str) -> list[Entry]:
    return [_entry(system, system, "Parameters", what, what=what) for system in ("innet", "redis", "reverb")]


def _push(processes: int) -> list[Entry]:
    return [
        _entry(system, system, "Push", "Writer", processes=processes) for system in ("innet", "reverb", "redis", "echo")
    ]


BENCHMARKS = [
    Benchmark(
        "limits",
        "the best possible results of the machine",
        MICROSECONDS,
        [
            _limit(what)
            for what in (
                "memory copy",
                "frame copy",
                "frame copy, two threads",
                "window write",
                "random access",
                "lz4 compress",
                "lz4 decompress",
                "tcp",
                "unix socket",
            )
        ],
        goals=[],
    ),
    Benchmark(
        "sum_tree",
        "sample 512 of 2^20 items by priority and rewrite their priorities, from Python",
        MICROSECONDS,
        [_entry(system, system, "Tree", "Tree") for system in ("innet", "torchrl", "cpprb")]
        + [_limit("random access")],
        [Goal("innet", "torchrl", 5.0)],
        limit="random access",
    ),
    Benchmark(
        "push",
        "transitions a second of one actor process that pushes 50 at a time",
        TRANSITIONS,
        [*_push(1), _limit("frame copy")],
        [Goal("innet", "reverb", 20.0)],
        limit="frame copy",
    ),
    Benchmark(
        "push_two",
        "the same of two actor processes together",
        TRANSITIONS,
        [*_push(2), _limit("frame copy, two threads")],
        [Goal("innet", "reverb", 20.0)],
        limit="frame copy, two threads",
    ),
    Benchmark(
        "sample",
        "sample 512 transitions over loopback into arrays ready for a network",
        MILLISECONDS,
        [
            _entry("innet client", "innet", "Sample", "client", reader="client"),
            _entry("innet prefetching", "innet", "Sample", "prefetching", reader="prefetching"),
            _entry("reverb client", "reverb", "Sample", "client", reader="client"),
            _entry("reverb dataset", "reverb", "Sample", "dataset", reader="dataset"),
            _entry("redis baseline", "redis", "Sample", "baseline", reader="baseline"),
            _limit("window write"),
        ],
        [Goal("innet client", "reverb client", 15.0), Goal("innet prefetching", "reverb dataset", 6.0)],
        limit="window write",
    ),
    Benchmark(
        "sample_in_process",
        "sample 512 transitions from a memory in the same process into arrays",
        MILLISECONDS,
        [_entry(system, system, "SampleInProcess", "Memory") for system in ("innet", "cpprb", "torchrl")]
        + [_limit("window write")],
        [Goal("innet", "cpprb", 2.0)],
        limit="window write",
    ),
    Benchmark(
        "vectors",
        "sample 256 of 10^6 transitions of 17 floats by priority, in process, and set their priorities",
        MICROSECONDS,
        [
            _entry(system, system, "Vectors", "Vectors")
            for system in ("innet", "cpprb", "torchrl", "agilerl", "flashbax")
        ],
        [Goal("innet", "cpprb", 2.0), Goal("innet", "flashbax", 2.0), Goal("innet", "agilerl", 4.0)],
    ),
    Benchmark(
        "parameters_get",
        "get 13.17 MB of parameters over loopback",
        MILLISECONDS,
        [*_parameters("get"), _limit("tcp")],
        [Goal("innet", "redis", 3.0), Goal("innet", "tcp", 1 / 1.5)],
        limit="tcp",
    ),
    Benchmark(
        "parameters_put",
        "put 13.17 MB of parameters over loopback",
        MILLISECONDS,
        [*_parameters("put"), _limit("tcp")],
        [Goal("innet", "redis")],
        limit="tcp",
    ),
    Benchmark(
        "wire",
        "payload of TCP for one pushed transition, all columns and headers, both directions",
        BYTES,
        [
            _entry("innet", "innet", "Wire", "Writer"),
            _entry("reverb", "reverb", "Wire", "Wire"),
            _entry("redis", "redis", "Wire", "Writer"),
            _entry("echo", "echo", "Wire", "Writer"),
        ],
        [Goal("innet", at_most=600.0)],
        once=True,
    ),
    Benchmark(
        "memory",
        "resident memory of a server for one transition",
        BYTES,
        [
            _entry("innet", "innet", "Memory", "Writer", transitions=1_000_000),
            _entry("reverb", "reverb", "Memory", "Resident", transitions=50_000),
            _entry("redis", "redis", "Memory", "Writer", transitions=20_000),
        ],
        [Goal("innet", at_most=800.0)],
        once=True,
    ),
    Benchmark(
        "tokens",
        "trajectories of 4,100 tokens and log-probabilities, put by two processes and read by one in batches of 64",
        TRAJECTORIES,
        [Entry(name, f"queues.{name}", "Tokens") for name in ("innet", "transferqueue", "ray", "redis", "tcp")],
        [
            Goal("innet", "redis", 3.0),
            Goal("innet", "tcp", 1 / 3),
            *(Goal("innet", at_most=most, unit=unit) for unit, most in ((P99, 5.0), (CPU, 1.0), (HELD, 1.1))),
        ],
        limit="tcp",
        apart=True,
        also=(GIGABYTES, CPU, HELD),
    ),
]
