"""Real Breakout steps to measure with, recorded once for each process, and the table they go to."""

from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from ale_py.vector_env import AtariVectorEnv

import innet_drl as innet

Row = dict[str, Any]
"""Arguments of `Writer.append`: arrays with one value for each stream."""

STREAMS = 16
VIEW = innet.NStep(stack=4, n=3, gamma=0.99)


def table(capacity: int, **settings: Any) -> innet.Table:
    """The table of a Breakout run."""
    return innet.Table(
        "breakout",
        {"frame": ("uint8", (84, 84)), "action": "uint8", "reward": "float32"},
        capacity,
        **settings,
    )


@functools.cache
def steps(count: int) -> list[Row]:
    """`count` rows of `STREAMS` environments each, played at random, as `Writer.append` takes them."""
    environments = AtariVectorEnv("breakout", num_envs=STREAMS, reward_clipping=True)
    random = np.random.default_rng(0)
    observation, _ = environments.reset(seed=0)
    first, final = np.ones(STREAMS, bool), np.zeros(STREAMS, bool)
    rows = []
    for _ in range(count):
        action = random.integers(0, 4, STREAMS)
        frame = observation[:, -1].copy()
        observation, reward, terminated, truncated, _ = environments.step(action)
        rows.append(
            {
                "frame": frame,
                "action": action.astype(np.uint8),
                "reward": reward.astype(np.float32),
                "terminated": terminated & ~final,
                "truncated": truncated & ~final,
                "first": first,
                "final": final,
                "q": random.random((STREAMS, 4), np.float32),
            }
        )
        first, final = final, terminated | truncated
    environments.close()
    return rows


def fill(replay: innet.Replay, items: int) -> None:
    """Writes recorded steps until the table has about `items` items."""
    rows = steps(500)
    with replay.writer("breakout", STREAMS, VIEW) as writer:
        while writer.items < items:
            for row in rows:
                writer.append(**row)
            writer.append(**last(rows))


def last(rows: list[Row]) -> Row:
    """One more row, in which every game ends: the recording can start again after it."""
    no, yes = np.zeros(STREAMS, bool), np.ones(STREAMS, bool)
    ended = rows[-1]["terminated"] | rows[-1]["truncated"]
    return {
        **rows[-1],
        "first": rows[-1]["final"],
        "final": ended,
        "terminated": yes & ~ended,
        "truncated": no,
    }


@contextlib.contextmanager
def server() -> Iterator[tuple[str, int]]:
    """`innet-replay serve` in a process of its own; yields its address on loopback TCP, and the process."""
    beside = Path(sysconfig.get_path("scripts")) / "innet-replay"
    command = str(beside) if beside.exists() else shutil.which("innet-replay")
    if command is None:
        raise SystemExit("innet-replay is not installed: run `make build`")
    with tempfile.TemporaryDirectory() as folder:
        socket = f"unix://{folder}/ready"
        process = subprocess.Popen(
            [command, "serve", "--listen", "innet://127.0.0.1:7719", "--listen", socket, "--log-level", "warn"],
        )
        try:
            # The socket file is there once both listeners are.
            while not Path(folder, "ready").exists():
                if process.poll() is not None:
                    raise SystemExit("innet-replay serve did not start: see its message above")
            yield "innet://127.0.0.1:7719", process.pid
        finally:
            process.terminate()
            process.wait()
