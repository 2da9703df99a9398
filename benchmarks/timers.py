"""The timers of a run: their cost, and the difference of their shares from a sampling profiler's.

`timers` trains serial runs without timers, with timers, and with a trace. `profiler` trains once under py-spy, which
samples the stacks of all processes, including waiting ones. The activity of a stack is the first `lap` call below the
current line of the innermost function with laps.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import innet_drl
from benchmarks import report
from innet_drl.analysis.bars import RATIO, START, read
from innet_drl.train.observe.stopwatch import MEMORY, WAITING

PACKAGE = Path(innet_drl.__file__).parent
COST = 1.01
"""Largest ratio of the time with timers to the time without."""
POINTS = 0.03
"""Largest difference of a share from the profiler's."""
NAMES = {"MEMORY": MEMORY, "WAITING": WAITING}
"""Constants of the source that name activities."""
TURN = """
import dataclasses, sys, tempfile, time
from pathlib import Path
from innet_drl.train.settings import presets
from innet_drl.train import run
from innet_drl.train.observe.stopwatch import Stopwatch
kind, preset, steps = sys.argv[1:]
if kind == "without":
    Stopwatch.lap = lambda self, name: None
config = presets.preset(preset, serial=True, steps=int(steps), evaluation_period=0, evaluation_games=1, video=False,
    target_return=None, checkpoint_minutes=1e6, trace_seconds=1e6 if kind == "trace" else None)
with tempfile.TemporaryDirectory() as folder:
    result = run(config, folder=Path(folder) / "run")
print(result.seconds, result.agent_steps, result.learner_updates)
"""


def timers(rounds: int = 10, steps: int = 20_000, preset: str = "cartpole") -> None:
    """Seconds of a serial run with timers, and while it records a trace, against the same work without timers.

    Args:
        rounds: Turns of each.
        steps: Agent steps of a turn.
        preset: Settings; the steps of `cartpole` are the shortest ones.
    """
    seconds: dict[str, list[float]] = {"without": [], "with": [], "trace": []}
    counts = set()
    for turn in range(rounds):
        # The order alternates between rounds.
        order = list(seconds) if turn % 2 == 0 else list(reversed(seconds))
        for kind in order:
            command = [sys.executable, "-c", TURN, kind, preset, str(steps)]
            printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
            seconds[kind].append(float(printed[0]))
            counts.add((printed[1], printed[2]))
    assert len(counts) == 1, "the runs differ in their work"
    for kind, values in seconds.items():
        report.line("timers", kind, statistics.median(values), "s", rounds=rounds, seconds=values)
    pairs = {
        kind: statistics.median(a / b for a, b in zip(seconds[kind], seconds["without"], strict=True))
        for kind in ("with", "trace")
    }
    report.closing("timers", "with", goal=f"{COST} x without", ratio=pairs["with"], met=pairs["with"] <= COST)
    report.closing("timers", "trace", ratio=pairs["trace"])


def profiler(
    preset: str = "breakout",
    minutes: float = 3.0,
    rate: int = 100,
    flags: str = "--actors 2 --no-video --evaluation-games 1 --evaluation-frames 100",
    py_spy: str = "py-spy",
) -> None:
    """Shares of a run's timers and py-spy's shares, in points.

    Args:
        preset: Settings of the run.
        minutes: Its length.
        rate: Samples a second of each thread.
        flags: More flags of `innet-drl train`.
        py_spy: Command of py-spy (pip install py-spy), which needs to be root or to have CAP_SYS_PTRACE.
    """
    command = shutil.which(py_spy)
    if command is None:
        sys.exit(f"{py_spy} is not installed: pip install py-spy, or name its path by --py-spy")
    with tempfile.TemporaryDirectory() as folder:
        run, raw = Path(folder) / "run", Path(folder) / "raw.txt"
        training = [sys.executable, "-m", "innet_drl", "train", "--out", str(run), "--preset", preset]
        training += ["--minutes", str(minutes), *flags.split()]
        # Nonblocking: pausing a process whose threads wait for each other would change the shares.
        recording = [command, "record", "--nonblocking", "--idle", "--subprocesses", "--threads", "--full-filenames"]
        recording += ["--format", "raw", "--rate", str(rate), "--output", str(raw)]
        with subprocess.Popen(training, stdout=subprocess.DEVNULL, preexec_fn=_yield_to_profiler) as trained:
            # Profiling begins when the run's folder exists: the start is not part of the shares.
            while not run.exists():
                if trained.poll() is not None:
                    sys.exit(f"the run ended with exit status {trained.returncode}: {shlex.join(training)}")
                time.sleep(0.01)
            subprocess.run(
                [*recording, "--pid", str(trained.pid)], check=True, stdout=subprocess.DEVNULL, preexec_fn=_go_first
            )
        own, sampled = _of_timers(run), of_samples(raw.read_text())
    missing = own.keys() - sampled.keys()
    if missing:
        sys.exit(f"{py_spy} has no samples of {', '.join(sorted(missing))}")
    worst = 0.0
    for thread in own:
        activities = sorted(own[thread].keys() | sampled[thread].keys())
        shares = {name: (own[thread].get(name, 0.0), sampled[thread].get(name, 0.0)) for name in activities}
        difference = max(abs(a - b) for a, b in shares.values())
        worst = max(worst, difference)
        pairs = {name: [round(value, 4) for value in pair] for name, pair in shares.items()}
        report.line("profiler", thread, 100 * difference, "points", shares=pairs)
    report.closing("profiler", "timers", goal=f"{100 * POINTS:g} points", value=100 * worst, met=worst <= POINTS)


def _yield_to_profiler() -> None:
    os.nice(10)


def _go_first() -> None:
    """Raises the profiler's priority: while waiting for a core it would over-sample waiting threads."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))


def _of_timers(run: Path) -> dict[str, dict[str, float]]:
    """Shares of the run's timers by kind of thread. The profiler does not see the reason of an actor's wait."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for bar in read(run).bars:
        kind = bar.thread or bar.process.partition(" ")[0]
        for activity, share in bar.shares.items():
            found[kind][MEMORY if activity in (RATIO, "send") else activity] += share * bar.seconds
    return {kind: _shares(seconds) for kind, seconds in found.items()}


def of_samples(raw: str) -> dict[str, dict[str, float]]:
    """Shares of a profile in py-spy's raw format: stacks from the outermost frame on, each with a count."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for line in raw.splitlines():
        stack, _, count = line.rpartition(" ")
        frames = re.findall(r"([^;()]+) \(([^;()]+\.py):(\d+)\)", stack)
        # Python 3.11 and newer qualify a method's name with its class.
        calls = [(Path(file), name.strip().rpartition(".")[2], int(number)) for name, file, number in frames]
        kind = _kind(calls)
        if kind is None:
            continue
        for file, name, number in reversed(calls):
            activity = _activity(file, name, number)
            if activity is not None:
                # A serial run samples on demand, and does not wait.
                activity = "sample" if (kind, activity) == ("serial", WAITING) else activity
                if activity != START:
                    found[kind][activity] += int(count)
                break
    return {kind: _shares(counts) for kind, counts in found.items()}


def _kind(calls: list[tuple[Path, str, int]]) -> str | None:
    """Kind of thread of a stack; `None` before and after training."""
    loops = {
        ("launch", "playing.py", "play"): "actor",
        ("launch", "parallel.py", "train"): "learner",
        ("launch", "learners.py", "_learn"): "learner",
        ("launch", "evaluator.py", "run_evaluator"): "evaluator",
        ("train", "targets.py", "_run"): "targets",
        ("train", "serial.py", "train"): "serial",
    }
    for file, name, _ in calls:
        kind = loops.get((file.parent.name, file.name, name))
        if kind is not None:
            return kind
    return None


@functools.cache
def _laps(file: Path) -> dict[str, list[tuple[int, str | None]]]:
    """Lines and activities of laps and returns, by function; the caller's line decides the activity of a return."""
    found: dict[str, list[tuple[int, str | None]]] = {}
    if not file.is_relative_to(PACKAGE):
        return found
    for function in ast.walk(ast.parse(file.read_text())):
        if not isinstance(function, ast.FunctionDef):
            continue
        marks: list[tuple[int, str | None]] = []
        has_laps = False
        for node in _within(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "lap":
                named = node.args[0]
                name = named.value if isinstance(named, ast.Constant) else NAMES.get(getattr(named, "id", ""))
                marks.append((node.end_lineno or node.lineno, str(name)))
                has_laps = True
            elif isinstance(node, ast.Return):
                marks.append((node.end_lineno or node.lineno, None))
        if has_laps:
            found[function.name] = sorted(marks, key=lambda mark: mark[0])
    return found


def _within(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function, without the functions that it defines."""
    for child in ast.iter_child_nodes(function):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _within(child)


def _activity(file: Path, name: str, line: int) -> str | None:
    """The activity of a line; `None` if the caller's line has it."""
    if (file.name, name) == ("batches.py", "__next__"):
        # `TorchBatches` calls `on_sample` between sampling and copying.
        source = file.read_text().splitlines()
        sampled = next(n for n, text in enumerate(source, 1) if "self.on_sample()" in text)
        return WAITING if line <= sampled else "upload"
    if (file.name, name) == ("targets.py", "__next__"):
        return WAITING
    return next((activity for at, activity in _laps(file).get(name, []) if at >= line), None)


def _shares(counts: dict[str, float]) -> dict[str, float]:
    total = sum(counts.values())
    return {name: count / total for name, count in counts.items()}


if __name__ == "__main__":
    print(json.dumps(of_samples(Path(sys.argv[1]).read_text()), indent=1))
