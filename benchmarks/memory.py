"""What a server's process takes for Breakout steps, against what its statistics say."""

from __future__ import annotations

import innet_drl as innet
from benchmarks import breakout, report


def memory(steps: int = 1_000_000) -> None:
    """Resident memory of a server that holds steps, less that of the same server while it was empty.

    Args:
        steps: Steps to fill it with.
    """
    table = breakout.table(steps + 100_000)
    with breakout.server() as (address, process), innet.connect(address, tables=[table]) as replay:
        empty = report.resident_bytes(process)
        breakout.fill(replay, steps)
        held = replay.stats()["tables"]["breakout"]
        resident = report.resident_bytes(process) - empty
    if held["steps"] < steps:
        raise SystemExit(f"{steps} steps were written, {held['steps']} are held")
    report.line("memory_counted", "loopback TCP", held["bytes"] / held["steps"], "bytes/step", steps=held["steps"])
    report.line("memory_resident", "loopback TCP", resident / held["steps"], "bytes/step", steps=held["steps"])
