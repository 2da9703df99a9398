"""Repeats the test suites on a busy machine, which exposes races and tight timeouts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks import report

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "soak"
RUST = ("cargo", "nextest", "run", "--locked", "--workspace", "--no-fail-fast")
# Tests of documents, packages, analyses and benchmarks have neither waits nor races.
FOLDERS = ("replay", "server", "distributed", "launch", "train")
# On busy cores a node of Ray takes minutes to start, and a test with three of them a quarter of an hour.
RAY = "tests/launch/test_ray.py"
PYTHON = (sys.executable, "-m", "pytest", "-q", *(f"tests/{name}" for name in FOLDERS), f"--ignore={RAY}")
ENVIRONMENT = {**os.environ, "INNET_REPEATS": "10", "INNET_PATIENCE": "3"}
"""Repeats each exit of an interpreter during a call ten times (`tests/replay/test_interpreter_end.py`), and triples the
time that each test may take (`tests/conftest.py`)."""
COUNTED = re.compile(r"(\d+) (passed|failed|skipped|errors?|timed out|flaky)\b")


def soak(times: int = 3, busy: int = 4) -> None:
    """Runs the suites of Rust and Python while other processes keep the processors busy; `build/soak` has the output.

    Args:
        times: Runs of each suite, by turns.
        busy: Processes that keep the processors busy.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    red = 0
    with _busy(busy):
        for number in range(1, times + 1):
            for suite, command in (("rust", RUST), ("python", PYTHON)):
                log = FOLDER / f"{suite}-{number}.log"
                began = time.monotonic()
                with log.open("w") as output:
                    ran = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=output, check=False)
                seconds = time.monotonic() - began
                report.line(
                    "soak",
                    suite,
                    seconds,
                    "s",
                    run=number,
                    exit_code=ran.returncode,
                    busy=busy,
                    **counts(log.read_text()),
                )
                red += ran.returncode != 0
    report.closing("soak", "innet", goal="every run is green", red=red, met=red == 0)
    if red:
        raise SystemExit(f"{red} runs failed: see {FOLDER}")


def counts(output: str) -> dict[str, int]:
    """Numbers of passed, failed and skipped tests, from the last summary of nextest or pytest."""
    # A failed Rust test prints the summary of its own process ("test result:").
    lines = [line for line in output.splitlines() if COUNTED.search(line) and "test result:" not in line]
    return {what: int(count) for count, what in COUNTED.findall(lines[-1])} if lines else {}


@contextlib.contextmanager
def _busy(number: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()
