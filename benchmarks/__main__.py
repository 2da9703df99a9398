"""Benchmarks as JSON lines on standard output: `python -m benchmarks NAME [flags]`."""

from __future__ import annotations

import contextlib
import functools
import importlib
import shutil
import signal
import subprocess
import sys

if __name__ == "__main__":
    # Ctrl-C and SIGTERM raise SystemExit, so that every `finally` ends its child processes. Imports take seconds.
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, lambda number, _: sys.exit(128 + number))

from collections.abc import Callable, Sequence
from typing import Any

import psutil
import tyro

from benchmarks import recording, report
from benchmarks.catalogue import BENCHMARKS, Benchmark
from benchmarks.contest import measure, missing
from benchmarks.sweep import RECORD
from benchmarks.table import today
from innet_drl.train.errors import TrainingError

COMMANDS = (
    *("adapters", "algorithms", "connections", "fairness", "gpu", "gradients", "growth", "hostile"),
    *("killed", "learning", "paper", "rows", "service_times", "shards", "supervised", "sweep", "table"),
)
"""Commands that are not in the catalogue. Each is a function in the module of its name, or in that of `MODULES`."""
MODULES = {"gradients": "gradients.evaluation", "paper": "paper.evaluation"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one benchmark, or another command.

    Raises:
        SystemExit: With the reason, if a flag is unusable or something cannot be measured.
    """
    recording.record()
    commands: dict[str, Callable[[], Callable[..., Any]]] = {"all": lambda: everything}
    commands |= {each.name: functools.partial(_benchmark, each) for each in BENCHMARKS}
    commands |= {name: functools.partial(_command, name) for name in COMMANDS}
    # A module is imported for its own command: some need packages that others do not.
    named = [name for name in (sys.argv[1:] if arguments is None else arguments)[:1] if name in commands]
    chosen = {name: commands[name]() for name in named or sorted(commands)}
    try:
        tyro.extras.subcommand_cli_from_dict(chosen, description=__doc__, args=arguments)
    except TrainingError as error:
        raise SystemExit(f"error: {error}") from None


def everything() -> None:
    """Runs every benchmark, each in a process of its own; when none failed, the lines are a report's raw data."""
    # Lines are collected in an ignored folder: a changed tracked file would mark the measured commit as dirty.
    collected = recording.FOLDER / "results.jsonl"
    runs = [["-m", "benchmarks", each.name] for each in BENCHMARKS]
    runs += [["-m", "benchmarks", "connections"], ["-m", "benchmarks", "growth"]]
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


def _command(name: str) -> Callable[..., Any]:
    function: Callable[..., Any] = getattr(importlib.import_module(f"benchmarks.{MODULES.get(name, name)}"), name)
    return function


def _benchmark(benchmark: Benchmark) -> Callable[..., None]:
    def run(rounds: int = 1 if benchmark.once else 3, seconds: float = 2.0, peers: bool = True) -> None:
        entries = []
        for entry in benchmark.entries:
            if lacks := missing(entry.system):
                print(f"{benchmark.name}: {entry.label} is left out, it lacks {lacks}", file=sys.stderr)
            elif peers or entry.label.startswith("innet") or entry.label in benchmark.limits:
                entries.append(entry)
        report.results(benchmark, measure(entries, rounds, seconds, apart=benchmark.apart))

    run.__doc__ = f"""{benchmark.about[0].upper()}{benchmark.about[1:]}.

    Args:
        rounds: Turns of each system.
        seconds: Length of a turn.
        peers: Measure the peers too.
    """
    return run


if __name__ == "__main__":
    try:
        main()
    finally:
        # A signal may have come between the start of a process and the context that ends it.
        for each in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
