"""Small rows: steps one by one and as blocks, in this process and over loopback, and small batches as tensors."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import innet_drl as innet
from benchmarks import report

COLUMNS: dict[str, Any] = {"observation": ("float32", (4,)), "action": "int64", "reward": "float32"}
"""A row of four floats, an action and a reward, as of CartPole."""
BLOCK = 1_000
BATCH = 64


def rows(rounds: int = 5, count: int = 20_000) -> None:
    """Prints microseconds and bytes of a row by `append` and by `extend`, and microseconds of a batch as tensors.

    Args:
        rounds: Turns of each way; the line has the median.
        count: Rows in a turn.
    """
    with innet.Memory(_table()) as memory:
        _written(memory, "in process", rounds, count)
        _sampled(memory, rounds)
    with (
        tempfile.TemporaryDirectory(prefix="innet-") as folder,
        innet.Memory() as served,
        served.serve(f"unix://{folder}/rows"),
        innet.connect(f"unix://{folder}/rows", tables=[_table()]) as client,
    ):
        _written(client, "served", rounds, count)


def _table() -> innet.Table:
    return innet.Table("rows", COLUMNS, 1 << 17, view=innet.NStep())


def _written(replay: innet.Replay, where: str, rounds: int, count: int) -> None:
    ways = {"append": _append, "extend": _extend}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            with replay.writer("rows", 1) as writer:
                began = time.perf_counter()
                way(writer, count)
                writer.flush()
                found[name].append(1e6 * (time.perf_counter() - began) / count)
    table = replay.stats()["tables"]["rows"]
    for name, values in found.items():
        report.line("rows", f"innet {name}, {where}", float(np.median(values)), "us", rounds=rounds, block=BLOCK)
    report.line("rows", f"innet, {where}", table["bytes"] / table["steps"], "bytes")
    report.closing(
        "rows",
        f"innet extend, {where}",
        times_append=float(np.median(found["append"]) / np.median(found["extend"])),
        goal="2 us",
        met=float(np.median(found["extend"])) <= 2.0,
    )


def _append(writer: innet.Writer, count: int) -> None:
    row = {name: values[0] for name, values in _block(1).items()}
    for _ in range(count):
        writer.append(**row)


def _extend(writer: innet.Writer, count: int) -> None:
    block = _block(BLOCK)
    for _ in range(count // BLOCK):
        writer.extend(**block)


def _block(steps: int) -> dict[str, Any]:
    """Random steps of one environment; no episode ends."""
    random = np.random.default_rng(0)
    return {
        "observation": random.normal(size=(steps, 1, 4)).astype(np.float32),
        "action": random.integers(0, 2, (steps, 1)),
        "reward": np.ones((steps, 1), np.float32),
        "terminated": np.zeros((steps, 1), bool),
        "truncated": np.zeros((steps, 1), bool),
    }


def _sampled(memory: innet.Memory, rounds: int) -> None:
    def wrapped() -> dict[str, Any]:
        """The arrays, each as a tensor on its memory, as a user without `device` has it."""
        batch = memory.sample("rows", BATCH)
        return {name: torch.from_numpy(array) for name, array in batch.as_dict().items()}

    ways: dict[str, Callable[[], Any]] = {
        "NumPy": lambda: memory.sample("rows", BATCH),
        "wrapped": wrapped,
        'device="cpu"': lambda: memory.sample("rows", BATCH, device="cpu"),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            for _ in range(500):
                way()
            found[name].append(1e6 * (time.perf_counter() - began) / 500)
    medians = {name: float(np.median(values)) for name, values in found.items()}
    for name, value in medians.items():
        report.line("tensors", f"innet {name}", value, "us", rounds=rounds, batch=BATCH)
    ratio = medians['device="cpu"'] / medians["wrapped"]
    report.closing("tensors", 'innet device="cpu"', goal="no slower than wrapped arrays", ratio=ratio, met=ratio <= 1.0)
