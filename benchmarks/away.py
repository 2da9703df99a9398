"""A server that is killed and restarted, or stopped and continued, under a writer and under a training run."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pty
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks import report

VIEW = innet.Window(0, 0)
TABLE = innet.Table("queue", {"tag": "int64"}, 200_000, sampler="fifo", max_times_sampled=1)
PUSH = 50
TRAINING_PATIENCE_S, WRITING_PATIENCE_S = 60.0, 20.0
"""Timeouts for progress to resume and for the program to end."""
SILENT_S = 3.0
"""Timeout for the message; a process that prints none by then never does."""
WRITER, TRAINING = "writer", "training"
MESSAGES = {WRITER: "waiting up to", TRAINING: "waiting for the replay memory"}
NAMED = {("killed", WRITER), ("killed", TRAINING), ("stopped", TRAINING)}
"""Failures that the program can detect. A stopped server keeps its connections, so a bare writer cannot."""
GOALS = {"said_s": 1.0, "ended_s": 2.0}


def write(address: str) -> None:
    """Writes tagged steps and prints the acknowledged count; after a restart of the server it continues there."""
    logging.basicConfig()
    written = 0
    with innet.connect(address, tables=[TABLE], reconnect_for=3600) as memory:
        while True:
            with (
                contextlib.suppress(innet.errors.ExpiredError),
                memory.writer("queue", 1, VIEW, timeout=None) as writer,
            ):
                while True:
                    for tag in range(written, written + PUSH):
                        writer.append(tag=np.array([tag]), terminated=[False], truncated=[False], timeout=None)
                    writer.flush(timeout=None)
                    written += PUSH
                    print(f"written {written}", flush=True)
                    time.sleep(0.05)


class Program:
    """A program on a pseudo-terminal, and its output."""

    def __init__(self, *command: str) -> None:
        self.text = ""
        self._terminal, other = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"}
        self.process = subprocess.Popen(
            [sys.executable, *command], stdout=other, stderr=other, env=environment, start_new_session=True
        )
        os.close(other)
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # Reading a pseudo-terminal fails once its programs have ended.
        with contextlib.suppress(OSError):
            while part := os.read(self._terminal, 1 << 16):
                self.text += part.decode(errors="replace")

    def end(self) -> None:
        """Kills the program's process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self._reader.join()
        os.close(self._terminal)


def seconds(condition: Callable[[], bool], longest: float) -> float | None:
    """Seconds until the condition holds; `None` after a timeout."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > longest:
            return None
        time.sleep(0.01)
    return time.monotonic() - began


def doubled(address: str) -> int:
    """Number of the writer's steps that the server stored twice."""
    with innet.connect(address) as memory:
        tags = []
        while items := memory.stats()["tables"]["queue"]["items"]:
            tags.append(memory.sample("queue", min(items, 10_000), VIEW).tag.ravel().copy())
    together = np.concatenate(tags)
    return len(together) - len(np.unique(together))


def once(server: Server, how: str, program: Program, progress: Callable[[], int], kind: str) -> dict[str, float | None]:
    """Takes a server away twice: it returns the first time; the second time SIGINT ends the program.

    Raises:
        AssertionError: The program did not begin.
    """
    patience = WRITING_PATIENCE_S if kind == WRITER else TRAINING_PATIENCE_S
    assert seconds(lambda: progress() > 20, TRAINING_PATIENCE_S) is not None, program.text[-2_000:]
    times: dict[str, float | None] = {}
    for away in ("first", "last"):
        printed = len(program.text)
        server.send(signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        longest = SILENT_S if (how, kind) in NAMED else SILENT_S / 4
        said = seconds(lambda printed=printed: MESSAGES[kind] in program.text[printed:], longest)  # type: ignore[misc]
        times.setdefault("said_s", said)
        if away == "last":
            break
        if how == "killed":
            server.kill()
            server.start()
        else:
            server.send(signal.SIGCONT)
        reached = progress()
        times["works_s"] = seconds(lambda reached=reached: progress() > reached, patience)  # type: ignore[misc]
        if kind == WRITER:
            times["doubled"] = doubled(server.address)
    program.process.send_signal(signal.SIGINT)
    times["ended_s"] = seconds(lambda: program.process.poll() is not None, patience)
    return times


def away(times: int = 20, under: tuple[str, ...] = (WRITER, TRAINING)) -> None:
    """Seconds until a server that is away is named, until Ctrl-C ends a program that waits, until work continues.

    Args:
        times: Of each: killed and stopped, under a writer and under a training run.
        under: `writer`, `training` or both.
    """
    # Shells start background jobs with SIGINT ignored, which child processes would inherit.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for how in ("killed", "stopped"):
        for kind in under:
            taken = []
            for _ in range(times):
                with (
                    tempfile.TemporaryDirectory() as folder,
                    Server(f"unix://{folder}/s", "--log-level=error") as server,
                ):
                    if kind == WRITER:
                        code = f"from benchmarks.away import write; write({server.address!r})"
                        program = Program("-c", code)
                    else:
                        main = "from innet_drl.cli import main; raise SystemExit(main())"
                        flags = f"--preset cartpole --out {folder}/run --report-seconds 0.2 --evaluation-period 0"
                        program = Program("-c", main, "train", *flags.split(), "--replay", server.address)
                    metrics = Path(folder) / "run" / "metrics.jsonl"

                    def progress(program: Program = program, metrics: Path = metrics, kind: str = kind) -> int:
                        if kind == WRITER:
                            return int("0" + program.text.rpartition("written ")[2].partition("\r")[0])
                        try:
                            return int(json.loads(metrics.read_text().splitlines()[-1])["learner_updates"])
                        except (OSError, IndexError, ValueError):
                            return 0

                    try:
                        taken.append(once(server, how, program, progress, kind))
                    finally:
                        program.end()
            _report(how, kind, taken)


def _report(how: str, kind: str, taken: list[dict[str, float | None]]) -> None:
    system = f"{kind}, server {how}"
    for name in taken[0]:
        values = [each[name] for each in taken]
        known = [each for each in values if each is not None]
        longest, missing = max(known, default=0.0), len(values) - len(known)
        if name == "doubled":
            report.closing("away", system, goal="nothing doubled", doubled=longest, met=not longest)
            continue
        if known:
            median = float(np.median(known))
            report.line("away", system, median, "s", until=name.removesuffix("_s"), longest=longest, missing=missing)
        if name in GOALS and (name != "said_s" or (how, kind) in NAMED):
            goal = f"{name.removesuffix('_s')} within {GOALS[name]:g} s"
            met = not missing and longest < GOALS[name]
            report.closing("away", system, goal=goal, ratio=longest / GOALS[name], missing=missing, met=met)
