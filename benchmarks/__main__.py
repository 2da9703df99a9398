"""Benchmarks as JSON lines on standard output: `python -m benchmarks NAME [flags]`."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tyro

from benchmarks import recording, report
from benchmarks.adapters import adapters
from benchmarks.algorithms import algorithms
from benchmarks.away import away
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.connections import connections
from benchmarks.contest import measure, missing
from benchmarks.data import data
from benchmarks.delay import delay
from benchmarks.fairness import fairness
from benchmarks.gradients.evaluation import gradients
from benchmarks.growth import growth
from benchmarks.hostile import hostile
from benchmarks.killed import killed
from benchmarks.learning import learning
from benchmarks.paper.evaluation import paper
from benchmarks.rows import rows
from benchmarks.scrape import scrape
from benchmarks.service_times import service_times
from benchmarks.shards import shards
from benchmarks.snapshots import snapshots
from benchmarks.soak import soak
from benchmarks.supervised import supervised
from benchmarks.sweep import RECORD, sweep
from benchmarks.table import table, today
from benchmarks.timers import profiler, timers


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one benchmark, or another command.

    Raises:
        SystemExit: With the reason, if a flag is unusable or something cannot be measured.
    """
    # SIGTERM raises SystemExit, so that every `finally` ends its child processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    recording.record()
    commands: dict[str, Callable[..., Any]] = {each.name: _command(each) for each in BENCHMARKS}
    commands |= {
        "adapters": adapters,
        "algorithms": algorithms,
        "all": everything,
        "away": away,
        "connections": connections,
        "data": data,
        "delay": delay,
        "fairness": fairness,
        "gradients": gradients,
        "growth": growth,
        "hostile": hostile,
        "killed": killed,
        "learning": learning,
        "paper": paper,
        "profiler": profiler,
        "rows": rows,
        "scrape": scrape,
        "service_times": service_times,
        "shards": shards,
        "snapshots": snapshots,
        "soak": soak,
        "supervised": supervised,
        "sweep": sweep,
        "table": table,
        "timers": timers,
    }
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, args=arguments)


def everything() -> None:
    """Runs every benchmark, each in a process of its own; when none failed, the lines are a report's raw data."""
    # Lines are collected in an ignored folder: a changed tracked file would mark the measured commit as dirty.
    collected = recording.FOLDER / "results.jsonl"
    runs = [["-m", "benchmarks", each.name] for each in BENCHMARKS]
    runs += [["-m", "benchmarks", "connections"], ["-m", "benchmarks", "growth"], ["-m", "benchmarks", "delay"]]
    runs.append(["-m", "benchmarks.training_loop", "--rounds", "2", "--seconds", "45"])
    failed = []
    with collected.open("w") as lines:
        for run in runs:
            with subprocess.Popen([sys.executable, *run], stdout=subprocess.PIPE, text=True) as process:
                assert process.stdout is not None
                try:
                    for line in process.stdout:
                        print(line, end="", flush=True)
                        lines.write(line)
                        lines.flush()
                except BaseException:
                    process.terminate()
                    raise
            if process.returncode:
                failed.append(" ".join(run))
    if failed:
        raise SystemExit(f"these failed, see their messages above: {', '.join(failed)}; {collected} has the others")
    folder = today("replay")
    shutil.copyfile(collected, folder / "results.jsonl")
    shutil.copyfile(RECORD, folder / "sweep.json")


def _command(benchmark: Benchmark) -> Callable[..., None]:
    def run(rounds: int = 1 if benchmark.once else 3, seconds: float = 2.0, peers: bool = True) -> None:
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
