"""A server that saves snapshots: rates with and without one, and peak memory."""

from __future__ import annotations

import statistics
import tempfile
from contextlib import ExitStack

from serving import Server

import innet_drl as innet
from benchmarks import report
from benchmarks.processes import peak_bytes, resident_bytes
from benchmarks.turns import Rates, clients, compare, turn

GOAL, MEMORY_GOAL = 0.9, 1.1


def snapshots(steps: int = 50_000, every: float = 1.0, pairs: int = 60) -> None:
    """Rates of a writer and of a learner that samples 64 in turns with a snapshot against turns without.

    Args:
        steps: Steps of 4 KiB that the table holds; it is full, so that each push evicts.
        every: Seconds between two snapshots, and of two turns.
        pairs: Turns with a snapshot, each beside one without.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        flags = [f"--snapshot={folder}/snapshots", f"--snapshot-every={round(1000 * every)}ms", "--log-level=error"]
        server = stack.enter_context(Server(f"unix://{folder}/s", *flags))
        stack.enter_context(clients(server.address, steps))
        memory = stack.enter_context(innet.connect(server.address))
        seconds: list[float] = []
        found: list[tuple[Rates, Rates]] = []
        unpaired: dict[bool, Rates] = {}
        resident = resident_bytes(server.pid)
        while len(found) < pairs:
            before = memory.stats()["snapshots"]["saved"]
            rates = turn(memory, every / 2)
            saved = memory.stats()["snapshots"]
            if saved["saved"] == 0:
                # Baseline memory, before the first snapshot.
                resident = resident_bytes(server.pid)
            if before == 0:
                continue
            unpaired[saved["saved"] > before] = rates
            if saved["saved"] > before:
                seconds.append(saved["duration_s"])
            if len(unpaired) == 2:
                found.append((unpaired.pop(True), unpaired.pop(False)))
        compare("snapshots", "with a snapshot", GOAL, found)
        peak = peak_bytes(server.pid) / resident
        more = {"every_s": every, "bytes": saved["bytes"], "duration_s": statistics.median(seconds)}
        goal = f"peak memory at most {MEMORY_GOAL:g} of before"
        report.closing("snapshots", "with a snapshot", goal=goal, ratio=peak, met=peak <= MEMORY_GOAL, **more)
