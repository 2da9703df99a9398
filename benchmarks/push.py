"""Pushing Breakout transitions: packing, the wire, and the memory's door."""

from __future__ import annotations

import itertools
import time

import innet_drl as innet
from benchmarks import breakout, report

CAPACITY = 100_000


def push(seconds: float = 5.0, chunk_steps: int = 50) -> None:
    """Transitions a second of one writer, 16 streams, each row with its priority at birth.

    Args:
        seconds: Length of each measurement.
        chunk_steps: Steps of a stream in one push.
    """
    rows = breakout.steps(500)
    table = breakout.table(CAPACITY)
    with innet.Replay([table]) as replay:
        _measure(replay, "in process", rows, seconds, chunk_steps)
    with breakout.server() as address, innet.connect(address, tables=[table]) as replay:
        _measure(replay, "loopback TCP", rows, seconds, chunk_steps)
        counted = replay.stats()
        # Both directions, all headers, from the server's own counters.
        wire = counted["server"]["bytes_received"] + counted["server"]["bytes_sent"]
        steps = counted["tables"]["breakout"]["inserted_steps"]
        report.line("push_wire", "loopback TCP", wire / steps, "bytes/step", chunk_steps=chunk_steps)
        held = counted["tables"]["breakout"]
        report.line("memory", "loopback TCP", held["bytes"] / held["steps"], "bytes/step", chunk_steps=chunk_steps)


def _measure(replay: innet.Replay, system: str, rows: list[breakout.Row], seconds: float, chunk_steps: int) -> None:
    with replay.writer("breakout", breakout.STREAMS, breakout.VIEW, chunk_steps=chunk_steps) as writer:
        begin = time.perf_counter()
        for row in itertools.chain.from_iterable(itertools.repeat([*rows, breakout.last(rows)])):
            writer.append(**row)
            if time.perf_counter() - begin > seconds:
                break
        writer.flush()
        rate = writer.steps / (time.perf_counter() - begin)
        written = writer.steps
    held = replay.stats()["tables"]["breakout"]
    if held["inserted_steps"] < written:
        raise SystemExit(f"{written} steps were written, {held['inserted_steps']} arrived")
    report.line("push", system, rate, "transitions/s", chunk_steps=chunk_steps)
