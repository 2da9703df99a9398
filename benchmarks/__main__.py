"""Benchmarks as JSON lines on standard output: `python -m benchmarks NAME [flags]`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import tyro

from benchmarks import recording, report
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.connections import connections
from benchmarks.contest import measure, missing
from benchmarks.sweep import sweep


def main() -> None:
    """Runs one benchmark, or what else is asked for."""
    recording.record()
    commands: dict[str, Callable[..., Any]] = {each.name: _command(each) for each in BENCHMARKS}
    commands |= {"connections": connections, "sweep": sweep}
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__)


def _command(benchmark: Benchmark) -> Callable[..., None]:
    def run(rounds: int = 1 if benchmark.once else 5, seconds: float = 2.0, peers: bool = True) -> None:
        entries = []
        for entry in benchmark.entries:
            if lacks := missing(entry.system):
                print(f"{benchmark.name}: {entry.label} is left out, it lacks {lacks}", file=sys.stderr)
            elif peers or entry.system in ("innet", "machine"):
                entries.append(entry)
        report.results(benchmark, measure(entries, rounds, seconds))

    run.__doc__ = f"""{benchmark.about[0].upper()}{benchmark.about[1:]}.

    Args:
        rounds: Turns of each system.
        seconds: Length of a turn.
        peers: Measure the peers too.
    """
    return run


if __name__ == "__main__":
    main()
