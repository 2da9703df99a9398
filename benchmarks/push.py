"""Pushing Breakout transitions: packing, the wire, and the memory's door."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from multiprocessing.queues import SimpleQueue
from multiprocessing.synchronize import Barrier

import innet_drl as innet
from benchmarks import breakout, report

CAPACITY = 100_000


def push(seconds: float = 5.0, chunk_steps: int = 50, processes: int = 2) -> None:
    """Transitions a second of one writer, 16 streams, each row with its priority at birth; then of several.

    Args:
        seconds: Length of each measurement.
        chunk_steps: Steps of a stream in one push.
        processes: Writers of the last measurement, each in a process of its own.
    """
    table = breakout.table(CAPACITY)
    with innet.Replay([table]) as replay:
        rate = _push(replay, seconds, chunk_steps)
        report.line("push", "in process", rate, "transitions/s", chunk_steps=chunk_steps, processes=1)
    with breakout.server() as (address, _), innet.connect(address, tables=[table]) as replay:
        rate = _push(replay, seconds, chunk_steps)
        report.line("push", "loopback TCP", rate, "transitions/s", chunk_steps=chunk_steps, processes=1)
        counted = replay.stats()
        # Both directions, all headers, from the server's own counters.
        wire = counted["server"]["bytes_received"] + counted["server"]["bytes_sent"]
        steps = counted["tables"]["breakout"]["inserted_steps"]
        report.line("push_wire", "loopback TCP", wire / steps, "bytes/step", chunk_steps=chunk_steps)
    with breakout.server() as (address, _), innet.connect(address, tables=[table]):
        rate = _push_together(address, processes, seconds, chunk_steps)
        report.line("push", "loopback TCP", rate, "transitions/s", chunk_steps=chunk_steps, processes=processes)


def _push(replay: innet.Replay, seconds: float, chunk_steps: int) -> float:
    rows = breakout.steps(500)
    before = replay.stats()["tables"]["breakout"]["inserted_steps"]
    with replay.writer("breakout", breakout.STREAMS, breakout.VIEW, chunk_steps=chunk_steps) as writer:
        begin = time.perf_counter()
        for row in itertools.chain.from_iterable(itertools.repeat([*rows, breakout.last(rows)])):
            writer.append(**row)
            if time.perf_counter() - begin > seconds:
                break
        writer.flush()
        rate = writer.steps / (time.perf_counter() - begin)
        written = writer.steps
    arrived = replay.stats()["tables"]["breakout"]["inserted_steps"] - before
    if arrived < written:
        raise SystemExit(f"{written} steps were written, {arrived} arrived")
    return rate


def _push_together(address: str, processes: int, seconds: float, chunk_steps: int) -> float:
    """The sum of the rates of writers that begin at the same time."""
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(processes)
    rates: SimpleQueue[float] = spawn.SimpleQueue()
    children = [
        spawn.Process(target=_push_to, args=(address, seconds, chunk_steps, together, rates)) for _ in range(processes)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    if any(child.exitcode for child in children):
        raise SystemExit("a writer failed: see its message above")
    return sum(rates.get() for _ in children)


def _push_to(address: str, seconds: float, chunk_steps: int, together: Barrier, rates: SimpleQueue[float]) -> None:
    breakout.steps(500)
    with innet.connect(address) as replay:
        together.wait(timeout=120)
        rates.put(_push(replay, seconds, chunk_steps))
