"""A server with snapshots that is killed repeatedly under load: every tagged step is counted."""

from __future__ import annotations

import contextlib
import random
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks import report

VIEW = innet.Window(0, 0)
QUEUE = innet.Table("queue", {"writer": "int64", "tag": "int64"}, 1_000_000, sampler="fifo", max_times_sampled=1)
REPLAY = innet.Table("replay", {"tag": "int64"}, 20_000)
WRITERS = 4
PUSH = 50
PAUSE_S = 0.01
"""Pause of a writer after each push."""
KILLS_OF_A_FOLDER = 10
PATIENCE_S = 60.0
GOALS = {
    "missing": "no step is missing",
    "doubled": "no step is doubled",
    "lost_before_snapshot": "no step is lost that was acknowledged before the last snapshot",
}
LOST = re.compile(r"without the last (\d+) of the (\d+) steps that it had acknowledged")
UNKNOWN = re.compile(r"it had acknowledged (\d+) steps")


class Writer:
    """A writer of tagged steps in a thread. After a restart it rewrites the steps that the server reports as lost."""

    def __init__(self, address: str, number: int, ended: threading.Event) -> None:
        self.number = number
        self.acknowledged = 0
        """Number of acknowledged steps: their tags are below it."""
        self.losses: list[tuple[int, int]] = []
        """Acknowledged steps lost and steps kept, as the server reports them, for each restart with losses."""
        self.failure: BaseException | None = None
        self._address = address
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
                time.sleep(PAUSE_S)

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


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _learn(address: str, ended: threading.Event) -> None:
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


def _tags(address: str) -> dict[int, np.ndarray]:
    """Samples the queue until it is empty; returns the stored tags of each writer."""
    with innet.connect(address) as memory:
        batches = []
        while items := memory.stats()["tables"]["queue"]["items"]:
            batch = memory.sample("queue", min(items, 10_000), VIEW)
            batches.append(np.stack([batch.writer.ravel(), batch.tag.ravel()]))
    together = np.concatenate(batches, axis=1)
    return {number: together[1, together[0] == number] for number in range(WRITERS)}


def _kill(server: Server, writers: list[Writer], memory: innet.Replay, pause_s: float) -> Iterator[tuple[int, int]]:
    """Kills and restarts the server, and returns when all writers have resumed.

    Yields:
        For each writer with losses, the number of lost acknowledged steps, and how many of them were acknowledged
        before the last snapshot.
    """

    def saved() -> int:
        return int(memory.stats()["snapshots"]["saved"])

    def wrote() -> bool:
        """Whether each writer has received an acknowledgement or a report of lost steps."""
        pairs = zip(writers, acknowledged, losses, strict=True)
        return all(writer.acknowledged > before or len(writer.losses) > known for writer, before, known in pairs)

    acknowledged, losses = [writer.acknowledged for writer in writers], [len(writer.losses) for writer in writers]
    _until(wrote)
    # The next snapshot may have begun before these acknowledgements; the one after it has not.
    floor, count = [writer.acknowledged for writer in writers], saved()
    _until(lambda: saved() >= count + 2)
    time.sleep(pause_s)
    losses = [len(writer.losses) for writer in writers]
    server.kill()
    acknowledged = [writer.acknowledged for writer in writers]
    server.start()
    _until(wrote)
    for writer, known, least in zip(writers, losses, floor, strict=True):
        for lost, kept in writer.losses[known:]:
            yield lost, max(0, least - kept)


def _folder(kills: int, every_ms: int, generator: random.Random) -> dict[str, int]:
    """Kills one server `kills` times, then counts its steps."""
    counts = dict.fromkeys(("steps", "lost", "told", "missing", "doubled", "lost_before_snapshot"), 0)
    ended = threading.Event()
    with tempfile.TemporaryDirectory() as folder:
        flags = (f"--snapshot={folder}/snapshots", f"--snapshot-every={every_ms}ms", "--log-level=error")
        with Server(f"unix://{folder}/s", *flags) as server:
            writers = [Writer(server.address, number, ended) for number in range(WRITERS)]
            learner = threading.Thread(target=_learn, args=(server.address, ended))
            learner.start()
            try:
                with innet.connect(server.address, timeout=PATIENCE_S, reconnect_for=PATIENCE_S) as memory:
                    for _ in range(kills):
                        for lost, before in _kill(server, writers, memory, generator.uniform(0, 2e-3 * every_ms)):
                            counts["told"] += 1
                            counts["lost"] += lost
                            counts["lost_before_snapshot"] += before
            finally:
                ended.set()
                for writer in writers:
                    writer.join()
                learner.join()
            tags = _tags(server.address)
        for writer in writers:
            unique = np.unique(tags[writer.number])
            counts["steps"] += len(unique)
            counts["doubled"] += len(tags[writer.number]) - len(unique)
            counts["missing"] += len(np.setdiff1d(np.arange(writer.acknowledged), unique))
    return counts


def killed(times: int = 100, every_ms: int = 200, seed: int = 0) -> None:
    """Kills a server with snapshots under load, and counts tagged steps that are missing or doubled.

    Args:
        times: Kills.
        every_ms: Interval of its snapshots.
        seed: Of the instants of the kills.
    """
    generator = random.Random(seed)
    total: dict[str, int] = {}
    left = times
    while left:
        kills = min(left, KILLS_OF_A_FOLDER)
        for name, count in _folder(kills, every_ms, generator).items():
            total[name] = total.get(name, 0) + count
        left -= kills
        print(f"{times - left} kills: {total}", file=sys.stderr, flush=True)
    system = "server with snapshots, killed"
    report.line("killed", system, total["steps"], "steps", kills=times, lost=total["lost"], told=total["told"])
    for name, goal in GOALS.items():
        report.closing("killed", system, goal=goal, steps=total[name], met=not total[name])
