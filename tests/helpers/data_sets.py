"""Episodes of all kinds of columns, for data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import innet_drl as innet
from innet_drl import datasets, structures

COLUMNS: dict[str, Any] = {
    "observation/camera": ("uint8", (12, 12)),
    "observation/arm/joints": ("float32", (3,)),
    "observation/arm/on": "bool",
    "action/0": "int64",
    "action/1": ("float64", (2, 2)),
    "reward": "float32",
    "mask": ("bool", (3,)),
    "half": ("float16", (2,)),
}
VIEW = innet.NStep(n=2)


def episode(random: np.random.Generator, steps: int, end: str) -> dict[str, Any]:
    """An episode of as many steps and, where it is truncated, a final row."""
    final = end != "none"
    count = steps + final
    flags = {name: np.zeros(count, bool) for name in ("terminated", "truncated", "final")}
    if final:
        flags[end][steps - 1] = flags["final"][-1] = True
    # The loss of a life within the episode.
    flags["terminated"][steps // 2] |= steps > 4
    row: dict[str, Any] = {
        "observation": {
            "camera": random.integers(0, 256, (count, 12, 12), np.uint8),
            "arm": {
                "joints": random.normal(size=(count, 3)).astype(np.float32),
                "on": random.random(count) < 0.5,
            },
        },
        "action": (random.integers(0, 4, count), random.normal(size=(count, 2, 2))),
        "reward": random.normal(size=count).astype(np.float32),
        "mask": random.random((count, 3)) < 0.5,
        "half": random.normal(size=(count, 2)).astype(np.float16),
        **flags,
    }
    if final:
        # A table keeps nothing but the observation of a final row.
        for array in (*row["action"], row["reward"], row["mask"], row["half"]):
            array[-1] = 0
    return row


def episodes(seed: int, count: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        episode(random, int(random.integers(1, 30)), random.choice(["terminated", "truncated"])) for _ in range(count)
    ]


def assert_equal(found: Any, expected: Any) -> None:
    found, expected = structures.flatten(dict(found.items())), structures.flatten(expected)
    found.pop("first", None)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, name)


def save(path: Path, arrays: dict[str, Any]) -> Path:
    """A Parquet file of arrays by pyarrow alone, with tensors where they have dimensions."""
    columns = {
        name: pa.FixedShapeTensorArray.from_numpy_ndarray(array)
        if isinstance(array, np.ndarray) and array.ndim > 1
        else pa.array(array)
        for name, array in arrays.items()
    }
    pq.write_table(pa.table(columns), path)
    return path


def load(path: Path) -> dict[str, Any]:
    """The arrays of a whole data set, with the number of each row's episode."""
    episodes = enumerate(map(structures.flatten, datasets.read(path)))
    found = [one | {"episode": np.full(len(one["final"]), number)} for number, one in episodes]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


NAMES = ["data.parquet", "minari:robot/random-v0"]


def at(folder: Path, name: str) -> str:
    return name if name.startswith("minari:") else str(folder / name)
