"""A small table and steps for it, for tests that are not about the steps."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

import innet_drl as innet

COLUMNS: dict[str, Any] = {"frame": ("uint8", (12, 8)), "action": "int64", "reward": "float32"}
VIEW = innet.NStep(stack=4, n=3, gamma=0.9, observation="frame")


def table(
    name: str = "t",
    *,
    capacity: int = 1000,
    sampler: Literal["prioritized", "uniform", "fifo", "lifo", "max_heap", "min_heap", "rank_based"] = "prioritized",
    **options: Any,
) -> innet.Table:
    """The table that `step` fits."""
    return innet.Table(name, COLUMNS, capacity, sampler=sampler, **options)


def step(t: int, streams: int = 1, *, episode: int = 10, **extra: Any) -> dict[str, Any]:
    """Step t of `streams` environments whose episodes terminate after `episode` steps.

    Every pixel and the action are t (modulo what they hold), the reward is 1.
    """
    last = t % episode == episode - 1
    return {
        "frame": np.full((streams, 12, 8), t % 256, np.uint8),
        "action": np.full(streams, t, np.int64),
        "reward": np.ones(streams, np.float32),
        "terminated": np.full(streams, last),
        "truncated": np.zeros(streams, bool),
        "first": np.full(streams, t % episode == 0),
        **extra,
    }


def fill(
    replay: innet.Replay,
    steps: int,
    *,
    name: str = "t",
    streams: int = 1,
    view: innet.NStep = VIEW,
    priority: float | None = None,
) -> None:
    """Writes `steps` steps of each stream, and waits until they are in the table."""
    extra: dict[str, Any] = {} if priority is None else {"priority": np.full(streams, priority)}
    with replay.writer(name, streams, view) as writer:
        for t in range(steps):
            writer.append(**step(t, streams, **extra))


def connect_and_fill(address: str) -> None:
    """What a child process does; it imports this module, which is quick."""
    with innet.connect(address) as replay:
        fill(replay, 20)


def still_works(replay: innet.Replay) -> bool:
    """A writer and a reader find the replay as it should be."""
    fill(replay, 20)
    return len(replay.sample("t", 4, VIEW, timeout=10)) == 4
