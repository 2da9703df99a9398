"""A server with snapshots that is killed repeatedly under load: every tagged step is counted."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks import report
from benchmarks.processes import peak_bytes, resident_bytes

VIEW = innet.Window(0, 0)
QUEUE = innet.Table("queue", {"writer": "int64", "tag": "int64"}, 1_000_000, sampler="fifo", max_times_sampled=1)
REPLAY = innet.Table("replay", {"tag": "int64"}, 20_000)
PUSH = 50
KILLS_OF_A_FOLDER = 10
PATIENCE_S = 60.0
GOALS = {
    "missing": "no step is missing",
    "doubled": "no step is doubled",
    "lost_before_snapshot": "no step is lost that was acknowledged before the last snapshot",
    "miscounted": "the number of connected writers is right 10 s after each start",
}
COUNTED_WITHIN_S = 10.0
LOST = re.compile(r"without the last (\d+) of the (\d+) steps that it had acknowledged")
UNKNOWN = re.compile(r"it had acknowledged (\d+) steps")


class Writer:
    """A writer of tagged steps in a thread. After a restart it rewrites the steps that the server reports as lost."""

    def __init__(self, address: str, number: int, pause_s: float, ended: threading.Event) -> None:
        self.number = number
        self.acknowledged = 0
        """Number of acknowledged steps: their tags are below it."""
        self.losses: list[tuple[int, int]] = []
        """Acknowledged steps lost and steps kept, as the server reports them, for each restart with losses."""
        self.failure: BaseException | None = None
        self._address = address
        self._pause_s = pause_s
        self._ended = ended
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread.

        Raises:
            BaseException: The thread's failure.
        """
        self._thread.join()
        if self.failure is not None:
            raise self.failure

    def count(self, stored: np.ndarray, counts: dict[str, int]) -> None:
        """Counts steps that are stored, doubled and missing, from the tags that the servers have."""
        unique = np.unique(stored)
        counts["steps"] += len(unique)
        counts["doubled"] += len(stored) - len(unique)
        counts["missing"] += len(np.setdiff1d(np.arange(self.acknowledged), unique))

    def _run(self) -> None:
        try:
            with innet.connect(self._address, tables=[QUEUE], timeout=PATIENCE_S, reconnect_for=PATIENCE_S) as memory:
                while not self._ended.is_set():
                    first = self.acknowledged
                    try:
                        self._write(memory)
                    except innet.errors.ExpiredError as error:
                        self._go_back(first, str(error))
        except BaseException as error:
            self.failure = error

    def _write(self, memory: innet.Replay) -> None:
        writer = memory.writer("queue", 1, VIEW, chunk_steps=PUSH, timeout=PATIENCE_S)
        with contextlib.ExitStack() as closing:
            closing.callback(lambda: writer.close() if self._ended.is_set() else None)
            while not self._ended.is_set():
                for tag in range(self.acknowledged, self.acknowledged + PUSH):
                    writer.append(
                        writer=np.array([self.number]), tag=np.array([tag]), terminated=[False], truncated=[False]
                    )
                writer.flush(timeout=PATIENCE_S)
                self.acknowledged += PUSH
                self._ended.wait(self._pause_s)

    def _go_back(self, first: int, message: str) -> None:
        """Continues after the last step that the server reports as kept."""
        if found := LOST.search(message):
            lost, acknowledged = int(found[1]), int(found[2])
        else:
            unknown = UNKNOWN.search(message)
            assert unknown is not None, message
            lost = acknowledged = int(unknown[1])
        self.acknowledged = first + acknowledged - lost
        self.losses.append((lost, self.acknowledged))


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def learn(address: str, ended: threading.Event) -> None:
    """Load beside the counted steps: another writer, a learner with priorities, parameters."""
    with innet.connect(address, tables=[REPLAY], timeout=PATIENCE_S, reconnect_for=PATIENCE_S) as memory:
        while not ended.is_set():
            with contextlib.suppress(innet.errors.ExpiredError, innet.errors.EmptyError):
                writer = memory.writer("replay", 1, VIEW, timeout=PATIENCE_S)
                for tag in range(10 * PUSH):
                    writer.append(tag=np.array([tag]), terminated=[False], truncated=[False])
                writer.close()
                batch = memory.sample("replay", 64, VIEW)
                memory.update_priorities("replay", batch.ids, np.ones(64))
                memory.put_parameters("policy", {"w": np.zeros(1000, np.float32)})


def tags(address: str, writers: int) -> dict[int, np.ndarray]:
    """Samples the queue until it is empty; returns the stored tags of each writer."""
    with innet.connect(address) as memory:
        batches = []
        while items := memory.stats()["tables"]["queue"]["items"]:
            batch = memory.sample("queue", min(items, 10_000), VIEW)
            batches.append(np.stack([batch.writer.ravel(), batch.tag.ravel()]))
    together = np.concatenate(batches, axis=1)
    return {number: together[1, together[0] == number] for number in range(writers)}


@dataclass
class Restart:
    """What a kill and a restart of the server led to."""

    told: list[tuple[int, int]]
    """For each writer with losses, the number of lost acknowledged steps, and how many of them were acknowledged before
    the last snapshot."""
    counted_s: float
    """Time from the start until the statistics had all writers as connected."""

    def count(self, counts: dict[str, int]) -> None:
        """Counts losses and late statistics."""
        counts["miscounted"] += self.counted_s > COUNTED_WITHIN_S
        counts["told"] += len(self.told)
        counts["lost"] += sum(lost for lost, _ in self.told)
        counts["lost_before_snapshot"] += sum(before for _, before in self.told)


class Killable(Protocol):
    """A server that can be killed."""

    @property
    def address(self) -> str: ...
    @property
    def pid(self) -> int: ...
    def kill(self) -> None: ...
    def start(self) -> None: ...


def kill(
    server: Killable,
    writers: list[Writer],
    memory: innet.Replay,
    pause_s: float,
    peaks: list[int],
    others: Sequence[innet.Replay] = (),
) -> Restart:
    """Kills and restarts the server of `memory`, and returns when all writers have resumed.

    Adds its peak of memory to `peaks`. `others` are the memories of the other servers that the writers use.
    """

    def saved() -> int:
        return int(memory.stats()["snapshots"]["saved"])

    def connected() -> int:
        return sum(each.stats()["tables"]["queue"]["connected_writers"] for each in (memory, *others))

    def wrote() -> bool:
        """Whether each writer has received an acknowledgement or a report of lost steps."""
        pairs = zip(writers, acknowledged, losses, strict=True)
        return all(writer.acknowledged > before or len(writer.losses) > known for writer, before, known in pairs)

    acknowledged, losses = [writer.acknowledged for writer in writers], [len(writer.losses) for writer in writers]
    until(wrote)
    # The next snapshot may have begun before these acknowledgements; the one after it has not.
    floor, count = [writer.acknowledged for writer in writers], saved()
    until(lambda: saved() >= count + 2)
    time.sleep(pause_s)
    losses = [len(writer.losses) for writer in writers]
    peaks.append(peak_bytes(server.pid))
    server.kill()
    acknowledged = [writer.acknowledged for writer in writers]
    server.start()
    begun = time.monotonic()
    until(lambda: connected() == len(writers))
    counted_s = time.monotonic() - begun
    until(wrote)
    losses_of = zip(writers, losses, floor, strict=True)
    told = [(lost, max(0, least - kept)) for writer, known, least in losses_of for lost, kept in writer.losses[known:]]
    return Restart(told, counted_s)


@dataclass
class Load:
    """What servers are killed under."""

    writers: int
    pause_ms: float
    every_ms: int
    between_s: float = 0.0

    def flags(self, folder: str | Path) -> tuple[str, ...]:
        """Flags of a server with snapshots in a folder."""
        return f"--snapshot={folder}/snapshots", f"--snapshot-every={self.every_ms}ms", "--log-level=error"


def kill_under(
    load: Load,
    servers: Sequence[Killable],
    kills: int,
    generator: random.Random,
    after: Callable[[Restart, dict[str, int]], None] = lambda *_: None,
) -> tuple[dict[str, int], int]:
    """Kills servers, drawn at random, of one memory, then counts its steps; also returns the peak of a server in bytes.

    `after` is called after each kill, with the counts so far.
    """
    counts = dict.fromkeys(("steps", "lost", "told", *GOALS), 0)
    ended, peaks = threading.Event(), list[int]()
    address = ",".join(server.address for server in servers)
    with contextlib.ExitStack() as stack:
        memories = [
            stack.enter_context(innet.connect(server.address, timeout=PATIENCE_S, reconnect_for=PATIENCE_S))
            for server in servers
        ]
        writers = [Writer(address, number, 1e-3 * load.pause_ms, ended) for number in range(load.writers)]
        learner = threading.Thread(target=learn, args=(address, ended))
        learner.start()
        try:
            for _ in range(kills):
                chosen = generator.randrange(len(servers))
                pause_s = load.between_s + generator.uniform(0, 2e-3 * load.every_ms)
                others = memories[:chosen] + memories[chosen + 1 :]
                restart = kill(servers[chosen], writers, memories[chosen], pause_s, peaks, others)
                restart.count(counts)
                after(restart, counts)
        finally:
            ended.set()
            for writer in writers:
                writer.join()
            learner.join()
    stored = [tags(server.address, load.writers) for server in servers]
    for writer in writers:
        writer.count(np.concatenate([of[writer.number] for of in stored]), counts)
    return counts, max(peaks)


def killed(
    times: int = 100,
    every_ms: int = 200,
    writers: int = 4,
    pause_ms: float = 10.0,
    between_s: float = 0.0,
    seed: int = 0,
) -> None:
    """Kills a server with snapshots under load, and counts tagged steps that are missing or doubled.

    Args:
        times: Kills, ten of each server.
        every_ms: Interval of its snapshots.
        writers: Threads that write, each over connections of its own.
        pause_ms: Pause of a writer after each push of 50 steps. Ten kills admit a million steps.
        between_s: Least time between kills.
        seed: Of the instants of the kills.
    """
    load = Load(writers, pause_ms, every_ms, between_s)
    generator = random.Random(seed)
    total: dict[str, int] = {}
    server_bytes, client_bytes = [], []
    left = times
    while left:
        kills = min(left, KILLS_OF_A_FOLDER)
        with tempfile.TemporaryDirectory() as folder, Server(f"unix://{folder}/s", *load.flags(folder)) as server:
            counts, most_bytes = kill_under(load, [server], kills, generator)
        for name, count in counts.items():
            total[name] = total.get(name, 0) + count
        server_bytes.append(most_bytes)
        client_bytes.append(resident_bytes(os.getpid()))
        left -= kills
        print(f"{times - left} kills: {total}, {most_bytes >> 20} MiB", file=sys.stderr, flush=True)
    system = "server with snapshots, killed"
    about = {"writers": writers, "server_bytes": server_bytes, "client_bytes": client_bytes}
    report.line("killed", system, total["steps"], "steps", kills=times, lost=total["lost"], told=total["told"], **about)
    close("killed", system, total)


def close(benchmark: str, system: str, counts: dict[str, int]) -> None:
    """Prints the goals of the counts."""
    for name, goal in GOALS.items():
        report.closing(benchmark, system, goal=goal, steps=counts[name], met=not counts[name])
