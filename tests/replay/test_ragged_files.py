"""Ragged columns in data sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import innet_drl as innet
from innet_drl import Ragged, datasets, errors

COLUMNS: dict[str, Any] = {
    "observation": ("float32", (None, 2)),
    "tokens": ("int64", (None,)),
    "text": ("uint8", (None,)),
    "pixels": ("int8", (None, 2, 2)),
    "reward": "float32",
}


def episodes(seed: int) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)

    def ragged(name: str, rows: int) -> Ragged:
        column = innet.Column(*COLUMNS[name])
        lengths = random.integers(0, 6, rows)
        parts = [random.integers(-99, 99, (length, *column.shape[1:])).astype(column.dtype) for length in lengths]
        return Ragged.of(parts, column.dtype)

    made = []
    for rows in random.integers(1, 9, 12):
        episode: dict[str, Any] = {name: ragged(name, rows) for name in COLUMNS if name != "reward"}
        ends = np.arange(rows) == rows - 1
        made.append(
            {**episode, "reward": np.zeros(rows, np.float32), "terminated": ends, "truncated": np.zeros(rows, bool)}
        )
    return made


def assert_same(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name in COLUMNS:
            if name == "reward":
                np.testing.assert_array_equal(one[name], other[name])
            else:
                assert isinstance(one[name], Ragged)
                assert one[name].values.dtype == other[name].values.dtype
                assert one[name] == other[name], name


@pytest.mark.parametrize("seed", range(4))
def test_parquet_and_tables_have_the_same_values(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "data.parquet"
    written = episodes(seed)
    datasets.write(path, written)
    assert_same(list(datasets.read(path)), written)
    assert pa.types.is_large_list(pq.read_schema(path).field("tokens").type)
    table = innet.Table("t", COLUMNS, 1000, view=innet.Window(0, 0))
    with innet.Memory(table) as memory:
        datasets.import_table(memory, "t", path)
        assert_same(list(memory.episodes("t")), written)
        datasets.export_table(memory, "t", tmp_path / "again.parquet")
    assert_same(list(datasets.read(tmp_path / "again.parquet")), written)


def test_lists_of_other_files_become_ragged_columns(tmp_path: Path) -> None:
    path = tmp_path / "other.parquet"
    rows = {
        "tokens": pa.array([[1, 2], [], [3, 4, 5], [6]], pa.list_(pa.int32())),
        "same": pa.array([[1, 2]] * 4, pa.list_(pa.int64())),
        "text": pa.array(["ab", "", "ü", "longer"]),
        "terminated": [False, False, False, True],
        "truncated": [False] * 4,
    }
    pq.write_table(pa.table(rows), path)
    columns: dict[str, Any] = {"tokens": ("int32", (None,)), "same": ("int64", (None,)), "text": ("uint8", (None,))}
    with innet.Memory(innet.Table("t", columns, 100, view=innet.Window(0, 0))) as memory:
        datasets.import_table(memory, "t", path)
        (episode,) = memory.episodes("t")
        assert [part.tolist() for part in episode["tokens"]] == [[1, 2], [], [3, 4, 5], [6]]
        assert [part.tolist() for part in episode["same"]] == [[1, 2]] * 4
        assert [bytes(part).decode() for part in episode["text"]] == ["ab", "", "ü", "longer"]
    fixed = innet.Table("t", {"tokens": ("int32", (2,))}, 100, view=innet.Window(0, 0))
    with innet.Memory(fixed) as memory, pytest.raises(errors.SchemaError, match=r"'tokens' has the shape \(None,\)"):
        datasets.import_table(memory, "t", path)


def test_minari_does_not_take_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    written = [{**episode, "action": episode["reward"]} for episode in episodes(0)]
    with pytest.raises(errors.SchemaError, match="'observation' has values of any length, which are not written"):
        datasets.write("minari:ragged/test-v0", written)
