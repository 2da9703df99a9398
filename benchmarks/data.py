"""Data sets: export and import of a table, beside pyarrow with the same arrays, and their peak memory."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import innet_drl as innet
from benchmarks import report
from benchmarks.processes import peak_bytes
from innet_drl import datasets

SHAPES: dict[str, tuple[Any, int]] = {"vectors": (("float32", (4,)), 400_000), "frames": (("uint8", (84, 84)), 40_000)}
"""Observation and number of steps."""
EPISODE = 400


def data(rounds: int = 3) -> None:
    """Prints steps per second of exports, imports and readings, and the peak memory of a process that does each.

    Args:
        rounds: Turns of each way; the line has the median.
    """
    for kind in SHAPES:
        with tempfile.TemporaryDirectory(prefix="innet-") as folder:
            _measure(kind, Path(folder) / "data.parquet", rounds)


def _measure(kind: str, path: Path, rounds: int) -> None:
    ways = ("innet export", "pyarrow write", "innet import", "innet episodes", "pyarrow read")
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in ways:
            # In a process of its own, whose peak memory is the way's.
            command = [sys.executable, "-m", "benchmarks.data", way, kind, str(path)]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seconds, peak = map(float, output.split())
            found[way].append((seconds, peak))
    _, steps = SHAPES[kind]
    size = path.stat().st_size
    rates = {}
    for way, values in found.items():
        seconds, peak = np.median(values, 0)
        rates[way] = steps / seconds
        report.line(
            "data",
            f"{way}, {kind}",
            rates[way],
            "steps/s",
            steps=steps,
            rounds=rounds,
            peak_mib=round(peak / 2**20),
            file_mib=round(size / 2**20, 1),
        )
    report.closing(
        "data",
        f"innet, {kind}",
        export_to_plain=rates["innet export"] / rates["pyarrow write"],
        import_to_plain=rates["innet import"] / rates["pyarrow read"],
    )


def _episodes(kind: str) -> Iterator[dict[str, Any]]:
    """Random walks; of a frame most pixels stay."""
    (dtype, shape), steps = SHAPES[kind]
    random = np.random.default_rng(0)
    frame = random.integers(0, 256, shape).astype(dtype)
    for _ in range(steps // EPISODE):
        observation = np.repeat(frame[None], EPISODE, 0)
        if dtype == "uint8":
            rows = random.integers(0, shape[0] - 8, EPISODE)
            for t, row in enumerate(rows):
                observation[t, row : row + 8, :8] = t % 256
        else:
            observation = random.normal(size=(EPISODE, *shape)).astype(dtype)
        yield {
            "observation": observation,
            "action": random.integers(0, 4, EPISODE),
            "reward": np.ones(EPISODE, np.float32),
            "terminated": np.arange(EPISODE) == EPISODE - 1,
            "truncated": np.zeros(EPISODE, bool),
        }


def _table(kind: str) -> innet.Table:
    (dtype, shape), steps = SHAPES[kind]
    columns: dict[str, Any] = {"observation": (dtype, shape), "action": "int64", "reward": "float32"}
    return innet.Table("t", columns, steps + EPISODE, view=innet.NStep())


def _filled(kind: str) -> innet.Memory:
    replay = innet.Memory(_table(kind))
    with replay.writer("t", 1) as writer:
        for episode in _episodes(kind):
            writer.extend(**{name: array[:, None] for name, array in episode.items()})
    return replay


def _all_rows(kind: str) -> dict[str, Any]:
    episodes = list(_episodes(kind))
    return {name: np.concatenate([episode[name] for episode in episodes]) for name in episodes[0]}


def _way(way: str, kind: str, path: Path) -> float:
    """Seconds of one way, without what it needs before."""
    if way == "innet export":
        with _filled(kind) as replay:
            began = time.perf_counter()
            datasets.export_table(replay, "t", path)
            return time.perf_counter() - began
    if way == "innet import":
        with innet.Memory(_table(kind)) as replay:
            began = time.perf_counter()
            datasets.import_table(replay, "t", path)
            return time.perf_counter() - began
    if way == "innet episodes":
        with _filled(kind) as replay:
            began = time.perf_counter()
            for _ in replay.episodes("t"):
                pass
            return time.perf_counter() - began
    if way == "pyarrow write":
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = _all_rows(kind)
        began = time.perf_counter()
        columns = {}
        for name, array in rows.items():
            flat = array.reshape(len(array), -1)
            size = flat.shape[1]
            if array.ndim > 1 and array.dtype == np.uint8:
                columns[name] = pa.Array.from_buffers(pa.binary(size), len(array), [None, pa.py_buffer(flat)])
            elif array.ndim > 1:
                columns[name] = pa.FixedSizeListArray.from_arrays(pa.array(flat.reshape(-1)), size)
            else:
                columns[name] = pa.array(array)
        pq.write_table(
            pa.table(columns), path.with_stem("plain"), compression="zstd", compression_level=1, row_group_size=4096
        )
        return time.perf_counter() - began
    import pyarrow.parquet as pq

    began = time.perf_counter()
    pq.read_table(path)
    return time.perf_counter() - began


if __name__ == "__main__":
    _, way, kind, path = sys.argv
    seconds = _way(way, kind, Path(path))
    # `ru_maxrss` begins with that of the parent process.
    print(seconds, peak_bytes(os.getpid()))
