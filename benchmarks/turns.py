"""Rates of a writer and a learner at one server, in alternating turns with and without one condition.

All turns use the same processes: rates of new processes differ by more than a few percent.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np

import innet_drl as innet
from benchmarks import report
from benchmarks.crew import Crew

VIEW = innet.Window(0, 0)
ROW_BYTES = 4096
BATCH = 64
CHUNK = 50
COUNTERS = {"pushed_per_s": "inserted_items", "sampled_per_s": "sampled_items"}
"""Statistics of the table from which rates are computed."""
BOTH = "geometric mean"
Rates = dict[str, float]


def _table(steps: int) -> innet.Table:
    row = innet.Column("uint8", (ROW_BYTES,), codec=None)
    return innet.Table("replay", {"row": row}, steps, capacity_bytes=2 * steps * ROW_BYTES)


def push(address: str, steps: int, pipe: Connection) -> None:
    """Fills the table, then pushes until its process ends."""
    # Distinct rows: equal rows would be stored as empty differences.
    rows = itertools.cycle(np.random.default_rng(0).integers(0, 256, (61, 1, ROW_BYTES), np.uint8))
    with innet.connect(address, tables=[_table(steps)]) as memory:
        writer = memory.writer("replay", 1, VIEW, chunk_steps=CHUNK)
        for _ in range(steps):
            writer.append(row=next(rows), terminated=[False], truncated=[False])
        writer.flush()
        pipe.send(None)
        pipe.recv()
        while True:
            for _ in range(CHUNK):
                writer.append(row=next(rows), terminated=[False], truncated=[False])


def sample(address: str, pipe: Connection) -> None:
    """Samples and updates until its process ends."""
    with innet.connect(address) as memory:
        pipe.send(None)
        pipe.recv()
        while True:
            batch = memory.sample("replay", BATCH, VIEW)
            memory.update_priorities("replay", batch.ids, np.ones(BATCH))


@contextmanager
def clients(address: str, steps: int) -> Iterator[None]:
    """Runs a process that pushes steps of 4 KiB into a full table, and one that samples 64, in the context.

    Raises:
        SystemExit: A process has failed or ended by itself.
    """
    with Crew() as crew:
        pushing = crew.start(push, address, steps)
        crew.receive(pushing)
        sampling = crew.start(sample, address)
        crew.receive(sampling)
        for pipe in (pushing, sampling):
            pipe.send(None)
        yield
        crew.check()


def turn(memory: innet.Replay, seconds: float, act: Callable[[], object] = lambda: None) -> Rates:
    """Rates of the clients over `seconds`, which begin with a call of `act`."""
    before, began = memory.stats()["tables"]["replay"], time.monotonic()
    act()
    time.sleep(max(0.0, began + seconds - time.monotonic()))
    after, taken = memory.stats()["tables"]["replay"], time.monotonic() - began
    # At least 1, for the logarithm in `compare`.
    return {rate: max(after[name] - before[name], 1) / taken for rate, name in COUNTERS.items()}


def compare(benchmark: str, name: str, goal: float, pairs: list[tuple[Rates, Rates]]) -> None:
    """Prints rates of turns `name` and of those without, and the ratios of pairs against the goal.

    Args:
        benchmark: Name of the benchmark.
        name: Name of the first turn of each pair.
        goal: Least ratio of each rate.
        pairs: Rates of neighbouring turns, with and without.
    """
    for index, system in ((1, "without"), (0, name)):
        means = {rate: statistics.fmean(pair[index][rate] for pair in pairs) for rate in COUNTERS}
        report.line(benchmark, system, means["pushed_per_s"], "steps/s", pairs=len(pairs), **means)
    logs = {rate: [math.log(one[rate] / other[rate]) for one, other in pairs] for rate in COUNTERS}
    # Writer and learner share the cores: when one gains by chance, the other loses.
    logs[BOTH] = [statistics.fmean(each) for each in zip(*logs.values(), strict=True)]
    for rate, each in logs.items():
        ratio, error = math.exp(float(np.mean(each))), float(np.std(each, ddof=1) / math.sqrt(len(each)))
        quartiles = [round(math.exp(float(value)), 4) for value in np.percentile(each, (25, 75))]
        spread = {"standard_error": error, "quartiles": quartiles}
        report.closing(
            benchmark, name, rate=rate, ratio=ratio, **spread, goal=f"at least {goal:g} of without", met=ratio >= goal
        )
