"""The interpreter ends while daemon threads are in calls: the program ends with its own status, and prints nothing.

`INNET_REPEATS=10` repeats each case. `INNET_INTERPRETERS` names further interpreters with NumPy, separated by colons.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from places import HELPERS

import innet_drl as innet

TESTS = HELPERS
REPEATS = int(os.environ.get("INNET_REPEATS", "1"))
OTHERS = os.environ.get("INNET_INTERPRETERS", "python3.12:python3.13:python3.14").split(":")

PROGRAM = """
import atexit, os, signal, sys, threading

import innet_drl as innet
from steps import VIEW, step, table

memory = innet.Memory([table(), table("empty")])
stop = threading.Event()

def act():
    with memory.writer("t", 1, VIEW) as writer:
        t = 0
        while not stop.is_set():
            writer.append(**step(t))
            t += 1

def learn():
    memory.sample("empty", 4, VIEW)

actor = threading.Thread(target=act, daemon=True)
actor.start()
threading.Thread(target=learn, daemon=True).start()
for _ in range(50):
    memory.sample("t", 4, VIEW)
"""


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of the programs. With g++, one in which `pthread_exit` ends a call says so, also without a crash."""
    package = Path(innet.__file__).parent.parent
    variables = {**os.environ, "PYTHONPATH": f"{package}:{TESTS}"}
    if compiler := shutil.which("g++"):
        library = tmp_path_factory.mktemp("preloaded") / "libpthread_exit.so"
        command: list[str | Path] = [
            compiler,
            "-O1",
            "-shared",
            "-fPIC",
            TESTS / "pthread_exit.cpp",
            "-o",
            library,
            "-ldl",
        ]
        subprocess.run(command, check=True)
        variables["LD_PRELOAD"] = str(library)
    return variables


def found(interpreter: str) -> str:
    """Path of an interpreter that can import NumPy; the test is skipped without."""
    path = shutil.which(interpreter)
    if path is None:
        pytest.skip(f"there is no {interpreter}")
    code = "import sys, numpy; assert sys.version_info >= (3, 11)"
    tried = subprocess.run([path, "-c", code], capture_output=True, text=True, check=False)
    if tried.returncode:
        # The exception, or the message of a launcher such as pyenv's.
        lines = [line for line in tried.stderr.splitlines() if "Error: " in line or ": command not found" in line]
        pytest.skip(f"{interpreter} cannot run it: {lines or tried.stderr}")
    return path


@pytest.mark.timeout(120 * REPEATS)
@pytest.mark.parametrize("mode", ["process", "unix", "tcp"])
@pytest.mark.parametrize("interpreter", [sys.executable, *OTHERS], ids=["this", *OTHERS])
def test_in_the_middle_of_every_call(environment: dict[str, str], interpreter: str, mode: str) -> None:
    command: list[str | Path] = [found(interpreter), TESTS / "ends.py", mode, str(REPEATS)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


def run(environment: dict[str, str], end: str) -> tuple[int, str]:
    """Status of the program with this end, and the last line that it prints."""
    command = [sys.executable, "-c", PROGRAM + end]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert "Exception in thread" not in ended.stderr
    assert ended.stdout == ""
    return ended.returncode, (ended.stderr.splitlines() or [""])[-1]


@pytest.mark.parametrize(
    ("end", "status", "last"),
    [
        ("", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("os._exit(4)", 4, ""),
        ("raise ValueError('no')", 1, "ValueError: no"),
        (
            "threading.Timer(0, os.kill, (os.getpid(), signal.SIGINT)).start(); memory.sample('empty', 4, VIEW)",
            -signal.SIGINT,
            "KeyboardInterrupt",
        ),
    ],
    ids=["returns", "exit", "_exit", "exception", "interrupt"],
)
def test_a_program_ends_with_its_own_status(environment: dict[str, str], end: str, status: int, last: str) -> None:
    assert run(environment, end) == (status, last)


def test_a_handler_of_the_program_may_wait_for_its_thread(environment: dict[str, str]) -> None:
    end = "atexit.register(actor.join); atexit.register(stop.set)"
    assert run(environment, end) == (0, "")
