"""Several servers that a supervisor restarts, killed one after the other under load: every tagged step is counted."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

from serving import SERVE

import innet_drl as innet
from benchmarks import killed, report
from benchmarks.killed import PATIENCE_S, VIEW, Load, Restart, kill_under

SUPERVISOR = 'while :; do "$@" & echo $! > "$0"; wait $!; sleep .1; done'
"""A shell's loop: `$0` is the file of the server's process number."""
FRESH = innet.Table("fresh", {"tag": "int64"}, 1_000)
PLACED_WITHIN = 1.5


class Supervised:
    """A server with snapshots that a shell starts again whenever it ends; `memory` is a client of it alone."""

    def __init__(self, folder: Path, load: Load) -> None:
        folder.mkdir()
        self.address = f"unix://{folder}/s"
        self._pid = folder / "pid"
        command = ["sh", "-c", SUPERVISOR, str(self._pid), *SERVE, self.address, *load.flags(folder)]
        self._supervisor = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        self.memory = innet.connect(self.address, timeout=PATIENCE_S, reconnect_for=PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.memory.close()
        os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()

    @property
    def pid(self) -> int:
        return int(self._pid.read_text())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def start(self) -> None:
        """The supervisor does it."""


def _placed(address: str, servers: list[Supervised], writers: int) -> float:
    """Opens writers at once, each of a client of its own; the most at one server, as a multiple of the mean."""
    with ExitStack() as stack:
        clients = [stack.enter_context(innet.connect(address, tables=[FRESH])) for _ in range(writers)]
        start = threading.Barrier(writers)

        def write(client: innet.Replay) -> innet.Writer:
            start.wait()
            return client.writer("fresh", 1, VIEW, timeout=PATIENCE_S)

        with ThreadPoolExecutor(writers) as pool:
            opened = list(pool.map(write, clients))
        counts = [int(server.memory.stats()["tables"]["fresh"]["connected_writers"]) for server in servers]
        for writer in opened:
            writer.close()
    assert sum(counts) == writers, counts
    return max(counts) * len(servers) / writers


def supervised(
    servers: int = 3,
    times: int = 10,
    writers: int = 20,
    every_ms: int = 200,
    pause_ms: float = 50.0,
    seed: int = 0,
) -> None:
    """Kills servers that a supervisor restarts, one at a time, and counts tagged steps that are missing or doubled.

    Args:
        servers: Servers with snapshots, which are one memory for each client.
        times: Kills in all, of servers drawn at random.
        writers: Threads that write, each with a client of its own.
        every_ms: Interval of snapshots.
        pause_ms: Pause of a writer after each push of 50 steps. The queues of the servers hold a million steps each.
        seed: Of servers and instants of the kills.
    """
    load = Load(writers, pause_ms, every_ms)
    counted_s, placed = [], []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        all_of = [stack.enter_context(Supervised(Path(folder, str(each)), load)) for each in range(servers)]
        address = ",".join(server.address for server in all_of)

        def note(restart: Restart, counts: dict[str, int]) -> None:
            counted_s.append(round(restart.counted_s, 2))
            placed.append(round(_placed(address, all_of, writers), 2))
            print(f"{len(placed)} kills: {counts}, {counted_s[-1]} s, {placed[-1]}", file=sys.stderr, flush=True)

        counts, server_bytes = kill_under(load, all_of, times, random.Random(seed), note)
    system = f"{servers} servers with snapshots, killed under a supervisor"
    about: dict[str, Any] = {"kills": times, "lost": counts["lost"], "told": counts["told"], "writers": writers}
    about |= {"counted_s": counted_s, "placed": placed, "server_bytes": server_bytes}
    report.line("supervised", system, counts["steps"], "steps", **about)
    killed.close("supervised", system, counts)
    goal = f"of {writers} new writers a server has at most {PLACED_WITHIN} times the mean"
    report.closing("supervised", system, goal=goal, times_mean=max(placed), met=max(placed) <= PLACED_WITHIN)
