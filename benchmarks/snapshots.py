"""A server that saves snapshots beside one that does not: rates of pushes and samples, and the server's peak memory."""

from __future__ import annotations

import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

import innet_drl as innet
from benchmarks import report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from serving import Server

VIEW = innet.Window(0, 0)
ROW_BYTES = 4096
BATCH = 64
CHUNK = 50
WITH, WITHOUT = "with snapshots", "without"
GOAL, MEMORY_GOAL = 0.9, 1.1


def _table(steps: int) -> innet.Table:
    row = innet.Column("uint8", (ROW_BYTES,), codec=None)
    return innet.Table("replay", {"row": row}, steps, capacity_bytes=2 * steps * ROW_BYTES)


def push(address: str, steps: int, pipe: Connection) -> None:
    """Fills the table, then pushes until the pipe has a message, and sends the number of steps."""
    # Rows that differ: equal ones would be stored as differences of no bytes.
    rows = itertools.cycle(np.random.default_rng(0).integers(0, 256, (61, 1, ROW_BYTES), np.uint8))
    with innet.connect(address, tables=[_table(steps)]) as memory:
        writer = memory.writer("replay", 1, VIEW, chunk_steps=CHUNK)
        for _ in range(steps):
            writer.append(row=next(rows), terminated=[False], truncated=[False])
        writer.flush()
        pipe.send(None)
        pipe.recv()
        pushed = 0
        while not pipe.poll():
            for _ in range(CHUNK):
                writer.append(row=next(rows), terminated=[False], truncated=[False])
            pushed += CHUNK
        writer.flush()
        pipe.send(pushed)


def sample(address: str, pipe: Connection) -> None:
    """Samples and updates until the pipe has a message, and sends the number of items."""
    pipe.recv()
    with innet.connect(address) as memory:
        pipe.send(None)
        pipe.recv()
        sampled = 0
        while not pipe.poll():
            batch = memory.sample("replay", BATCH, VIEW)
            memory.update_priorities("replay", batch.ids, np.ones(BATCH))
            sampled += BATCH
        pipe.send(sampled)


@contextmanager
def clients(address: str, steps: int) -> Iterator[list[Connection]]:
    """A process that pushes and one that samples, which work from here on; the pipes that end them, and bring counts.

    Raises:
        EOFError, ConnectionError: A process has ended by itself.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipes: list[Connection] = []
        for target, arguments in ((push, (address, steps)), (sample, (address,))):
            ours, theirs = context.Pipe()
            process = context.Process(target=target, args=(*arguments, theirs))
            process.start()
            stack.callback(process.join)
            stack.callback(process.terminate)
            # With this end the pipe would outlive its process, which is then waited for without an end.
            theirs.close()
            pipes.append(ours)
        pushing, sampling = pipes
        pushing.recv()
        sampling.send(None)
        sampling.recv()
        for pipe in pipes:
            pipe.send(None)
        yield pipes


def _resident(pid: int, name: str) -> int:
    """Bytes of a process, by the name of the line of /proc."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) << 10


def _round(system: str, steps: int, seconds: float, every: str) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        flags = [f"--snapshot={folder}/snapshots", f"--snapshot-every={every}"] if system == WITH else []
        with Server(f"unix://{folder}/s", *flags, "--log-level=error") as server:
            with clients(server.address, steps) as pipes:
                began = time.monotonic()
                time.sleep(seconds)
                for pipe in pipes:
                    pipe.send(None)
                pushed, sampled = (pipe.recv() for pipe in pipes)
                taken = time.monotonic() - began
            with innet.connect(server.address) as memory:
                saved = memory.stats().get("snapshots", {})
            peak = _resident(server.pid, "VmHWM")
    return {
        "pushed_per_s": pushed / taken,
        "sampled_per_s": sampled / taken,
        "peak_bytes": peak,
        "saved": saved.get("saved", 0),
        "duration_s": saved.get("duration_s") or 0.0,
        "bytes": saved.get("bytes") or 0,
    }


def snapshots(steps: int = 50_000, seconds: float = 60.0, every: str = "20s", rounds: int = 3) -> None:
    """Rates of pushes and samples with snapshots against without, in turn, and the peak of the server's memory.

    Args:
        steps: Steps of 4 KiB that the table holds; it is full, so that each push evicts.
        seconds: Of each round.
        every: Interval of the snapshots.
        rounds: Of each of the two.
    """
    measured: dict[str, list[dict[str, float]]] = {WITH: [], WITHOUT: []}
    for _ in range(rounds):
        for system, results in measured.items():
            results.append(_round(system, steps, seconds, every))

    def median(system: str, name: str) -> float:
        return statistics.median(result[name] for result in measured[system])

    for system in measured:
        more = {name: median(system, name) for name in ("sampled_per_s", "peak_bytes", "saved", "duration_s", "bytes")}
        report.line("snapshots", system, median(system, "pushed_per_s"), "steps/s", every=every, **more)
    for name in ("pushed_per_s", "sampled_per_s"):
        ratio = median(WITH, name) / median(WITHOUT, name)
        report.closing("snapshots", WITH, goal=f"{name} at least {GOAL:g} of without", ratio=ratio, met=ratio >= GOAL)
    ratio = median(WITH, "peak_bytes") / median(WITHOUT, "peak_bytes")
    goal = f"peak memory at most {MEMORY_GOAL:g} of without"
    report.closing("snapshots", WITH, goal=goal, ratio=ratio, met=ratio <= MEMORY_GOAL)
