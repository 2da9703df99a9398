"""Systems that take turns: each is set up in a worker of its own, then all are measured round by round.

Disturbances of the machine (other loads, clock rates) fall on all of them alike, and ratios are taken within a
round.
"""

from __future__ import annotations

import contextlib
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

from benchmarks.link import PYTHON
from benchmarks.systems import ENVIRONMENTS

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Entry:
    """One system in a contest."""

    label: str
    """How the results name it."""
    system: str
    """Its module in `benchmarks/systems`."""
    task: str
    """Of `benchmarks/tasks.py`."""
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass
class Measured:
    """Results of one system."""

    version: str
    rounds: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Worker:
    """The other end of `benchmarks/worker.py`."""

    entry: Entry
    process: subprocess.Popen[bytes]
    connection: socket.socket
    version: str = ""

    def __post_init__(self) -> None:
        self._lines = self.connection.makefile("rw")

    def ask(self, **request: Any) -> dict[str, Any]:
        """One request and its answer.

        Between requests the worker's processes are stopped: nothing that they do ahead or have not finished falls
        into the turn of another one.
        """
        self.signal(signal.SIGCONT)
        self._lines.write(json.dumps(request) + "\n")
        self._lines.flush()
        answer = self.answer()
        self.signal(signal.SIGSTOP)
        return answer

    def signal(self, number: signal.Signals) -> None:
        """To the worker and all that it started, if there is any of it left."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def answer(self) -> dict[str, Any]:
        """Raises the error of that process."""
        line = self._lines.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "the worker died: see its message above"}
        if "error" in answer:
            raise SystemExit(f"{self.entry.label} in {self.entry.task}: {answer['error']}")
        return answer


def interpreter(system: str) -> str | None:
    """The Python of a system's environment; none when `make bench-peers` has not made it."""
    environment = ENVIRONMENTS.get(system)
    if environment is None:
        return sys.executable
    python = ROOT / ".peers" / environment / "bin" / "python"
    return str(python) if python.exists() else None


def missing(system: str) -> str | None:
    """A system needs something that is not here."""
    if interpreter(system) is None:
        return "its environment: run `make bench-peers`"
    if system == "redis" and shutil.which("redis-server") is None:
        return "the command redis-server (Debian's package redis-server)"
    return None


@contextlib.contextmanager
def _workers(entries: list[Entry]) -> Iterator[list[Worker]]:
    """Sets the systems up, one after the other, and ends them."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(_worker(entry)) for entry in entries]


def measure(entries: list[Entry], rounds: int, seconds: float) -> dict[str, Measured]:
    """Results of each entry, by its label. Each system's answers are checked before and after."""
    results: dict[str, Measured] = {}
    with _workers(entries) as running:
        for worker in running:
            results[worker.entry.label] = Measured(worker.version)
            worker.ask(do="check")
        for turn in range(rounds):
            # Not always the same one after the same other one.
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
    environment = os.environ | {"PYTHONPATH": str(ROOT), PYTHON: sys.executable}
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
