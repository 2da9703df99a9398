"""Drawing batches as arrays ready for the network, and writing their priorities back."""

from __future__ import annotations

import numpy as np

import innet_drl as innet
from benchmarks import breakout, report


def sample(seconds: float = 5.0, batch: int = 512, items: int = 50_000, threads: int = 2) -> None:
    """Time of one batch, and of one batch of new priorities.

    Args:
        seconds: Length of each measurement.
        batch: Transitions in a batch.
        items: Items in the table.
        threads: Threads that decode.
    """
    table = breakout.table(2 * items)
    with innet.Replay([table]) as replay:
        breakout.fill(replay, items)
        _measure(replay, "in process", seconds, batch, threads)
    with breakout.server() as (address, _), innet.connect(address, tables=[table]) as replay:
        breakout.fill(replay, items)
        _measure(replay, "loopback TCP", seconds, batch, threads)


def _measure(replay: innet.Replay, system: str, seconds: float, batch: int, threads: int) -> None:
    random = np.random.default_rng(0)
    drawn = replay.sample("breakout", batch, breakout.VIEW, threads=threads)
    _check(drawn, batch)
    settings = {"batch": batch, "threads": threads}

    spent = report.timed(lambda: replay.sample("breakout", batch, breakout.VIEW, threads=threads), seconds)
    report.line("sample", system, spent["p50_ms"], "ms", **settings, **spent)
    with replay.batches("breakout", batch, breakout.VIEW, prefetch=4, threads=threads) as batches:
        spent = report.timed(lambda: next(batches), seconds)
    report.line("sample_prefetched", system, 1e3 / spent["per_s"], "ms", **settings, **spent)
    priorities = random.random(batch)
    spent = report.timed(lambda: replay.update_priorities("breakout", drawn.key, priorities), seconds)
    report.line("update_priorities", system, spent["p50_ms"], "ms", **settings, **spent)


def _check(drawn: innet.Batch, batch: int) -> None:
    shapes = drawn.observation.shape, drawn.next_observation.shape
    if shapes != ((batch, 4, 84, 84),) * 2 or not drawn.observation.any(axis=(1, 2, 3)).all():
        raise SystemExit(f"a batch has observations of shape {shapes}, or empty ones")
