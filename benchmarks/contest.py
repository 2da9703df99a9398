"""Systems that take turns, each in a worker process: after the set-up all are measured round by round.

Disturbances of the machine (other loads, clock rates) affect all alike, and ratios are taken within a round.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.systems import ENVIRONMENTS

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Entry:
    """One system in a contest."""

    label: str
    """Name in the results."""
    system: str
    """Name of the module in `benchmarks/systems`."""
    task: str
    """Name of the class in `benchmarks/tasks.py`."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """Results of one system."""

    version: str
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Worker:
    """Handle of a worker process (`benchmarks/worker.py`)."""

    entry: Entry
    process: subprocess.Popen[bytes]
    connection: socket.socket
    version: str = ""

    def __post_init__(self) -> None:
        self._lines = self.connection.makefile("rw")

    def ask(self, **request: Any) -> dict[str, Any]:
        """Sends a request and returns its answer.

        The worker's processes are paused between requests, so that prefetching and unfinished work take no time of
        other systems.
        """
        self.signal(signal.SIGCONT)
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = self.answer()
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """Signals the worker's process group, if it exists."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def answer(self) -> dict[str, Any]:
        """Receives an answer; raises the worker's error."""
        line = self._lines.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the worker died: see its message above"}
        if "error" in answer:
            raise SystemExit(f"{self.entry.label} in {self.entry.task}: {answer['error']}")
        return answer


def interpreter(system: str) -> str | None:
    """Path of the Python of a system's environment; `None` before `make bench-peers`."""
    environment = ENVIRONMENTS.get(system)
    if environment is None:
        return sys.executable
    python = ROOT / ".peers" / environment / "bin" / "python"
    return str(python) if python.exists() else None


def missing(system: str) -> str | None:
    """Names a missing requirement of a system; `None` if it can run."""
    if interpreter(system) is None:
        return "its environment: run `make bench-peers`"
    if "redis" in system and shutil.which("redis-server") is None:
        return "the command redis-server (Debian's package redis-server)"
    if system == "queues.ray" and importlib.util.find_spec("ray") is None:
        return "the package ray: run `pip install 'innet-drl[ray]'`"
    return None


@contextlib.contextmanager
def _workers(entries: list[Entry]) -> Iterator[list[Worker]]:
    """Starts the workers one after the other, and ends them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_worker(entry)) for entry in entries]


def measure(entries: list[Entry], rounds: int, seconds: float, *, apart: bool = False) -> dict[str, Measured]:
    """Results of each entry, by its label. Each system's answers are checked before and after.

    Systems take turns, or run one after the other where they are to be `apart`.
    """
    if apart:
        return {label: each for entry in entries for label, each in measure([entry], rounds, seconds).items()}
    results: dict[str, Measured] = {}
    with _workers(entries) as running:
        for worker in running:
            results[worker.entry.label] = Measured(worker.version)
            worker.ask(do="check")
        for turn in range(rounds):
            # Rotated, so that no system always has the first turn.
            for worker in running[turn % len(running) :] + running[: turn % len(running)]:
                results[worker.entry.label].rounds.append(worker.ask(do="measure", seconds=seconds))
        for worker in running:
            worker.ask(do="check")
    return results


@contextlib.contextmanager
def _worker(entry: Entry) -> Iterator[Worker]:
    python = interpreter(entry.system)
    assert python is not None
    here, there = socket.socketpair()
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    command = [python, "-m", "benchmarks.worker", str(there.fileno()), entry.system, entry.task]
    with here, there:
        process = subprocess.Popen(
            [*command, json.dumps(entry.settings)],
            pass_fds=[there.fileno()],
            stdout=sys.stderr,
            start_new_session=True,
            env=environment,
            cwd=ROOT,
        )
        there.close()
        worker = Worker(entry, process, here)
        try:
            worker.version = worker.answer()["version"]
            worker.signal(signal.SIGSTOP)
            yield worker
        finally:
            worker.signal(signal.SIGCONT)
            here.shutdown(socket.SHUT_RDWR)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            worker.signal(signal.SIGKILL)
            process.wait()
