"""Writers at full speed behind the replay ratio of a slower learner: how many steps of each are admitted."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks import report
from benchmarks.crew import Crew

WRITERS = 8
BATCH = 64
VIEW = innet.Window(0, 0)
TABLE = innet.Table("t", {"tag": "int64"}, 100_000, samples_per_insert=32, slack=6_400)
TRANSPORTS: dict[str, tuple[str, list[str]] | None] = {
    "in process": None,
    "Unix sockets": ("unix://{folder}/s", []),
    "TCP": ("innet://127.0.0.1:0", []),
    "TCP, 4 I/O threads": ("innet://127.0.0.1:0", ["--io-threads=4"]),
}
"""Address and flags of each transport's server; `None` in process."""
WINDOW_S = 10.0
POLL_S = 0.1
GOAL = 0.1


def write(address: str, number: int, pipe: Any) -> None:
    """Writes steps until its process is killed."""
    with innet.connect(address) as memory:
        pipe.send(None)
        _write(memory, number)


def _write(memory: innet.Replay, number: int) -> None:
    row: dict[str, Any] = {"tag": np.array([number]), "terminated": [False], "truncated": [False]}
    with contextlib.suppress(innet.errors.ClosedError):
        writer = memory.writer("t", 1, VIEW, name=str(number), timeout=None)
        while True:
            writer.append(**row)


def _learn(memory: innet.Replay) -> None:
    with contextlib.suppress(innet.errors.ClosedError):
        while True:
            memory.sample("t", BATCH, VIEW)


@contextlib.contextmanager
def _at_work(transport: str) -> Iterator[innet.Replay]:
    """Yields the memory while its writers and its learner run."""
    with ExitStack() as stack:
        threads = []
        if (serving := TRANSPORTS[transport]) is None:
            memory: innet.Replay = innet.Memory([TABLE])
            learner = memory
            threads = [threading.Thread(target=_write, args=(memory, each)) for each in range(WRITERS)]
        else:
            address, flags = serving
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = stack.enter_context(Server(address.format(folder=folder), "--log-level=error", *flags))
            memory = innet.connect(server.address, tables=[TABLE])
            learner = innet.connect(server.address)
            crew = stack.enter_context(Crew())
            for pipe in [crew.start(write, server.address, number) for number in range(WRITERS)]:
                crew.receive(pipe)
        threads.append(threading.Thread(target=_learn, args=(learner,)))
        for thread in threads:
            thread.start()
        try:
            yield memory
        finally:
            learner.close()
            memory.close()
            for thread in threads:
                thread.join()


def unfairness(times: list[float], steps: list[list[int]], window_s: float) -> float:
    """The largest difference between two writers over any window, as a share of the larger one's steps.

    Args:
        times: Time of each poll in seconds, [polls].
        steps: Steps admitted by then, [polls, writers].
        window_s: Shortest length of a window.
    """
    taken, worst = np.array(steps), 0.0
    for first, begin in enumerate(times):
        last = int(np.searchsorted(times, begin + window_s))
        if last == len(times):
            break
        admitted = taken[last] - taken[first]
        worst = max(worst, float(1 - admitted.min() / max(admitted.max(), 1)))
    return worst


def fairness(seconds: float = 40.0, window_s: float = WINDOW_S) -> None:
    """Steps admitted of eight writers at full speed, while a learner with a replay ratio of 32 lets few of them pass.

    Args:
        seconds: Length of each transport.
        window_s: Time over which the steps of the writers are compared: all such times, a tenth of a second apart.
    """
    for transport in TRANSPORTS:
        with _at_work(transport) as memory:
            times: list[float] = []
            steps: list[list[int]] = []
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                time.sleep(POLL_S)
                table = memory.stats()["tables"]["t"]
                by_writer = {each["name"]: each for each in table["by_writer"]}
                if len(by_writer) == WRITERS and table["blocked_pushes"]:
                    times.append(time.monotonic())
                    steps.append([by_writer[str(each)]["steps"] for each in range(WRITERS)])
        assert max(times, default=0.0) > end - 1, f"{transport}: a writer has ended, or none has ever waited"
        assert times[-1] >= times[0] + window_s, f"{transport}: no window of {window_s:g} s: take more --seconds"
        admitted = np.subtract(steps[-1], steps[0])
        waited = [each["waited_s"] for each in by_writer.values()]
        more = {"by_writer": admitted.tolist(), "blocked_pushes": table["blocked_pushes"], "waited_s": max(waited)}
        report.line("fairness", transport, admitted.sum() / (times[-1] - times[0]), "steps/s", **more)
        ratio = unfairness(times, steps, window_s) / GOAL
        goal = f"within {GOAL:.0%} of each other over any {window_s:g} s"
        report.closing("fairness", transport, goal=goal, ratio=ratio, met=ratio <= 1)
