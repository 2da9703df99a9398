"""What a request costs a server's processor: the figures of docs/explanation/scale.md, and of a simulated world."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import nnls
from serving import Server

import innet_drl as innet
from benchmarks import report
from benchmarks.processes import cpu_seconds, resident_bytes

VIEW = innet.Window(0, 0)
COUNTS = (1, 8, 64, 512)
"""Steps of a push, items of a batch, priorities of an update."""
SIZES = (8, 256, 4096, 28224)
"""Bytes of a step."""
PARAMETERS = (10_000, 100_000, 1_000_000, 10_000_000)
CONNECTIONS = 200
STORED = 200_000
"""Steps whose memory is measured."""


def service_times(seconds: float = 1.0) -> None:
    """Processor time of a server for single requests over TCP, fitted by non-negative least squares of relative errors.

    Args:
        seconds: Length of each measurement.
    """
    with tempfile.TemporaryDirectory() as folder, Server("innet://127.0.0.1:0", "--log-level=error") as server:
        with innet.connect(server.address) as memory:
            _fit("push", ("push", "step", "byte"), _pushes(memory, server, seconds))
            _fit("batch", ("batch", "item", "byte"), _batches(memory, server, seconds))
            _fit("update", ("update", "priority"), _updates(memory, server, seconds))
            _fit("get_parameters", ("get", "byte"), _parameters(memory, server, seconds))
        report.line("service_times", "connection", _connection(folder), "bytes", connections=CONNECTIONS)
        report.line("service_times", "stored step", _stored(folder), "bytes", steps=STORED)


Costs = list[tuple[tuple[float, ...], float]]
"""For each measurement, how often each part was taken, and microseconds."""


def _fit(name: str, parts: tuple[str, ...], costs: Costs) -> None:
    measured = np.array([each for _, each in costs])
    counts = np.array([each for each, _ in costs]) / measured[:, None]
    scale = counts.max(axis=0)
    fitted = nnls(counts / scale, np.ones(len(measured)))[0] / scale
    errors = counts @ fitted - 1
    told = {part: float(f"{each:.3g}") for part, each in zip(parts, fitted, strict=True)}
    largest = float(np.abs(errors).max())
    report.line("service_times", name, fitted[0], "us", **told, largest_error=round(largest, 3))


def _cost(server: Server, seconds: float, call: Callable[[], object]) -> float:
    """Microseconds of the server for a call."""
    for _ in range(3):
        call()
    end, count, before = time.monotonic() + seconds, 0, cpu_seconds(server.pid)
    while time.monotonic() < end:
        call()
        count += 1
    return 1e6 * (cpu_seconds(server.pid) - before) / count


def _table(size: int) -> innet.Table:
    return innet.Table(f"t{size}", {"x": innet.Column("uint8", (size,), codec="none")}, capacity=20_000)


def _block(count: int, size: int) -> dict[str, Any]:
    ends = np.zeros((count, 1), np.bool_)
    return {"x": np.ones((count, 1, size), np.uint8), "terminated": ends, "truncated": ends}


def _pushes(memory: innet.Replay, server: Server, seconds: float) -> Costs:
    costs: Costs = []
    for size, count in itertools.product(SIZES, COUNTS):
        memory.create_table(_table(size))
        with memory.writer(f"t{size}", 1, VIEW, chunk_steps=count) as writer:
            block = _block(count, size)

            def push(writer: innet.Writer = writer, block: dict[str, Any] = block) -> None:
                writer.extend(**block)
                writer.flush()

            costs.append(((1.0, count, count * size), _cost(server, seconds, push)))
    return costs


def _batches(memory: innet.Replay, server: Server, seconds: float) -> Costs:
    costs: Costs = []
    for size, count in itertools.product(SIZES, COUNTS):

        def sample(size: int = size, count: int = count) -> None:
            memory.sample(f"t{size}", count, VIEW)

        costs.append(((1.0, count, count * size), _cost(server, seconds, sample)))
    return costs


def _updates(memory: innet.Replay, server: Server, seconds: float) -> Costs:
    costs: Costs = []
    for count in COUNTS:
        ids = memory.sample("t8", count, VIEW).ids

        def update(ids: np.ndarray = ids) -> None:
            memory.update_priorities("t8", ids, np.ones(len(ids)))

        costs.append(((1.0, count), _cost(server, seconds, update)))
    return costs


def _parameters(memory: innet.Replay, server: Server, seconds: float) -> Costs:
    costs: Costs = []
    for size in PARAMETERS:
        memory.put_parameters("policy", {"w": np.ones(size, np.uint8)})
        costs.append(((1.0, size), _cost(server, seconds, lambda: memory.get_parameters("policy"))))
    return costs


def _connection(folder: str) -> float:
    """Bytes of a server's memory for a connection that has asked once."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(Server(f"unix://{folder}/s", "--log-level=error"))
        stack.enter_context(innet.connect(server.address)).stats()
        before = resident_bytes(server.pid)
        for _ in range(CONNECTIONS):
            stack.enter_context(innet.connect(server.address)).stats()
        return (resident_bytes(server.pid) - before) / CONNECTIONS


def _stored(folder: str) -> float:
    """Bytes of a server's memory for a step of 256 bytes with its item, beside the 256."""
    size = 256
    with Server(f"unix://{folder}/s", "--log-level=error") as server, innet.connect(server.address) as memory:
        before = resident_bytes(server.pid)
        memory.create_table(innet.Table("t", {"x": innet.Column("uint8", (size,), codec="none")}, capacity=STORED))
        with memory.writer("t", 1, VIEW, chunk_steps=50) as writer:
            for _ in range(STORED // 1000):
                writer.extend(**_block(1000, size))
        return (resident_bytes(server.pid) - before) / STORED - size
