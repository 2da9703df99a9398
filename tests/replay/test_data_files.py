"""Parquet and npz files: damaged ones, of other programs, and what they have that a table does not store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import episodes

import innet_drl as innet
from innet_drl import datasets, errors
from innet_drl.datasets import parquet, rows


def test_files_of_others(tmp_path: Path) -> None:
    """Lists, tensors and binaries in Parquet; npz without `final` and `episode`; other dtypes and names."""
    random = np.random.default_rng(0)
    count = 50
    camera = random.integers(0, 256, (count, 4, 4), np.uint8)
    place = random.normal(size=(count, 2))
    ends = np.arange(count) % 10 == 9
    table = innet.Table(
        "t",
        {"frame": ("uint8", (4, 4)), "place": ("float32", (2,)), "action": "uint8", "reward": "float32"},
        100,
        view=innet.NStep(observation="frame"),
    )
    pq.write_table(
        pa.table(
            {
                "observation": pa.array([one.tobytes() for one in camera]),
                "place": pa.array(place.tolist()),
                "action": pa.array(np.arange(count) % 4),
                "reward": pa.array(np.ones(count)),
                "terminated": pa.array(ends),
                "truncated": pa.array(np.zeros(count, bool)),
                "extra": pa.array(["text"] * count),
            }
        ),
        tmp_path / "lists.parquet",
        row_group_size=7,
    )
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(place)
    pq.write_table(
        pa.table(
            {
                "observation": pa.array(camera.reshape(count, 16).tolist(), pa.list_(pa.uint8(), 16)),
                "place": tensors,
                "action": pa.array(np.arange(count) % 4),
                "reward": pa.array(np.ones(count)),
                "terminated": pa.array(ends),
                "truncated": pa.array(np.zeros(count, bool)),
            }
        ),
        tmp_path / "tensors.parquet",
    )
    arrays = {"observation": camera, "place": place, "action": np.arange(count) % 4, "reward": np.ones(count)}
    flags = {"terminated": ends, "truncated": np.zeros(count, bool)}
    given: Any = arrays | flags
    np.savez_compressed(tmp_path / "plain.npz", **given)
    for name in ("lists.parquet", "tensors.parquet", "plain.npz"):
        with innet.Memory(table) as replay:
            counts = datasets.import_table(replay, "t", tmp_path / name, columns={"frame": "observation"})
            assert (counts.episodes, counts.steps) == (5, count), name
            stored = list(replay.episodes("t"))
            np.testing.assert_array_equal(np.concatenate([one.frame for one in stored]), camera, name)
            np.testing.assert_array_equal(np.concatenate([one.place for one in stored]), place.astype(np.float32), name)


def test_columns_that_an_import_leaves_out_may_be_anything(tmp_path: Path) -> None:
    ends = {"terminated": np.array([False, True]), "truncated": np.zeros(2, bool)}
    wanted: Any = {"observation": np.array([1.0, 2.0], np.float32), **ends}
    others = {"nulls": pa.array([None, 1]), "ragged": pa.array([[1], [2, 3]]), "texts": pa.array(["a", None])}
    pq.write_table(
        pa.table({**{name: pa.array(array) for name, array in wanted.items()}, **others}), tmp_path / "a.parquet"
    )
    pickled: Any = {"seed": np.array(7), "names": np.array(["a", None], object), "weights": np.zeros(5)}
    np.savez(tmp_path / "a.npz", **wanted, **pickled)
    for name in ("a.parquet", "a.npz"):
        with innet.Memory(innet.Table("t", {"observation": "float32"}, 100, view=innet.Window(0, 0))) as replay:
            assert datasets.import_table(replay, "t", tmp_path / name).steps == 2
            assert [one.observation.tolist() for one in replay.episodes("t")] == [[1, 2]]
        with pytest.raises(errors.ReplayError):
            next(datasets.read(tmp_path / name))
        other = innet.Table("t", {"reward": "float32"}, 100, view=innet.Window(0, 0))
        with (
            innet.Memory(other) as replay,
            pytest.raises(errors.SchemaError, match=r"no column 'reward'.*it has .*terminated"),
        ):
            datasets.import_table(replay, "t", tmp_path / name)
    np.savez(tmp_path / "none.npz", **pickled)
    with (
        innet.Memory(other) as replay,
        pytest.raises(errors.SchemaError, match="no column 'terminated'; it has seed, names"),
    ):
        datasets.import_table(replay, "t", tmp_path / "none.npz")


def test_edited_files_are_read_as_they_are(tmp_path: Path) -> None:
    ends = {"terminated": np.array([False, True]), "truncated": np.zeros(2, bool)}
    path, edited = tmp_path / "a.parquet", tmp_path / "b.parquet"
    datasets.write(path, [{"action": np.array([1, 2]), "pixel": np.array([[-1], [2]], np.int8), **ends}])
    table = pq.read_table(path)
    index = table.schema.get_field_index("action")
    pq.write_table(table.set_column(index, "action", table["action"].cast(pa.float64())), edited)
    read = next(datasets.read(edited))
    assert (read["action"].tolist(), read["pixel"].tolist()) == ([1.0, 2.0], [[-1], [2]])
    ragged = {"observation": pa.array([b"ab", b"abcd"]), **{name: pa.array(array) for name, array in ends.items()}}
    pq.write_table(pa.table(ragged), path)
    with pytest.raises(errors.CorruptError, match="'observation' have 2 to 4 elements"):
        next(datasets.read(path))


def test_numpy_and_pyarrow_read_our_files(tmp_path: Path) -> None:
    expected = episodes(3, 5)
    datasets.write(tmp_path / "data.npz", expected)
    arrays = np.load(tmp_path / "data.npz")
    np.testing.assert_array_equal(
        arrays["observation/camera"], np.concatenate([one["observation"]["camera"] for one in expected])
    )
    assert arrays["episode"].tolist() == sorted(arrays["episode"])
    datasets.write(tmp_path / "data.parquet", expected)
    table = pq.read_table(tmp_path / "data.parquet")
    assert table["reward"].type == pa.float32()
    np.testing.assert_array_equal(
        np.array(table["observation/arm/joints"].to_pylist()),
        np.concatenate([one["observation"]["arm"]["joints"] for one in expected]),
    )


def test_integers_have_to_fit(tmp_path: Path) -> None:
    count = 4
    arrays: Any = {"observation": np.zeros((count, 1), np.float32), "reward": np.zeros(count)}
    flags: Any = {"terminated": np.ones(count, bool), "truncated": np.zeros(count, bool)}
    np.savez(tmp_path / "a.npz", action=np.array([0, 1, 2, 300]), **arrays, **flags)
    table = innet.Table(
        "t", {"observation": ("float32", (1,)), "action": "uint8", "reward": "float32"}, 100, view=innet.NStep()
    )
    with innet.Memory(table) as replay:
        with pytest.raises(errors.SchemaError, match="'action' has values that uint8 of table 't' does not hold"):
            datasets.import_table(replay, "t", tmp_path / "a.npz")


def test_shapes_of_other_orders_are_refused(tmp_path: Path) -> None:
    count = 4
    image = np.random.default_rng(0).integers(0, 256, (count, 5, 6, 3), np.uint8)
    arrays: Any = {"action": np.zeros((count, 1), np.uint8), "reward": np.zeros((count, 1))}
    flags: Any = {"terminated": np.ones((count, 1), bool), "truncated": np.zeros((count, 1), bool)}

    def imported(shape: tuple[int, ...], image: Any, **changed: Any) -> Any:
        np.savez(tmp_path / "a.npz", observation=image, **{**arrays, **flags, **changed})
        columns: Any = {"observation": ("uint8", shape), "action": "uint8", "reward": "float32"}
        with innet.Memory(innet.Table("t", columns, 100, view=innet.NStep())) as replay:
            assert datasets.import_table(replay, "t", tmp_path / "a.npz").steps == count
            return np.concatenate([one.observation for one in replay.episodes("t")])

    # Flags and numbers may be arrays of one, and values flat.
    np.testing.assert_array_equal(imported((5, 6, 3), image.reshape(count, -1)), image)
    np.testing.assert_array_equal(imported((5, 6), image[..., :1]), image[..., 0])
    with pytest.raises(errors.SchemaError, match=r"'observation' has the shape \(5, 6, 3\), and \(3, 5, 6\) in table"):
        imported((3, 5, 6), image)
    with pytest.raises(errors.SchemaError, match=r"column 'terminated' has the shape \(2,\), and is a number a row"):
        imported((5, 6, 3), image, terminated=np.ones((count, 2), bool))
    with pytest.raises(errors.SchemaError, match=r"a\.npz: array 'observation' is in Fortran order: save np\.asc"):
        imported((5, 6, 3), np.asfortranarray(image))
    with pytest.raises(errors.SchemaError, match=r"array 'reward' is a single number"):
        imported((5, 6, 3), image, reward=np.float32(0))


def small_episodes() -> Iterator[dict[str, Any]]:
    """Episodes with bytes, floats and final rows: a file of 7 kB."""
    random = np.random.default_rng(0)
    for steps in range(1, 9):
        final = np.arange(steps + 1) == steps
        yield {
            "observation": {
                "camera": random.integers(0, 256, (steps + 1, 2, 3), np.uint8),
                "arm": random.random(steps + 1),
            },
            "action": random.integers(0, 4, steps + 1),
            "reward": np.ones(steps + 1, np.float32),
            "terminated": np.arange(steps + 1) == steps - 1,
            "truncated": final & False,
            "final": final,
        }


def read_whole(path: Path) -> dict[str, Any]:
    found = [rows.flat(one) for one in datasets.read(path)]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]} if found else {}


def flipped_bits(content: bytes, every: int) -> Iterator[bytes]:
    """The content with another bit flipped in each copy."""
    for at in range(len(content) % every, len(content), every):
        yield content[:at] + bytes([content[at] ^ 1 << at // every % 8]) + content[at + 1 :]


@pytest.mark.parametrize("name", ["a.parquet", "a.npz"])
def test_a_flipped_bit_is_refused_or_changes_nothing(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 12)
    path = tmp_path / name
    datasets.write(path, small_episodes())
    expected, content = read_whole(path), path.read_bytes()
    refused = 0
    for damaged in flipped_bits(content, 9):
        path.write_bytes(damaged)
        try:
            found = read_whole(path)
        except errors.ReplayError:
            refused += 1
            continue
        assert list(found) == list(expected)
        for column, array in expected.items():
            assert found[column].dtype == array.dtype
            np.testing.assert_array_equal(found[column], array)
    # The rest are the times of zip's files, and bytes of Parquet that no reader looks at.
    assert refused > len(content) / 9 * 0.8


def test_rows_that_a_file_of_others_lost_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    table = pa.table(
        {"observation": np.arange(400.0), "terminated": np.arange(400) % 10 == 9, "truncated": np.zeros(400, bool)}
    )
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False, write_page_checksum=True)
    for damaged in flipped_bits(path.read_bytes(), 5):
        path.write_bytes(damaged)
        with contextlib.suppress(errors.ReplayError):
            assert len(read_whole(path)["terminated"]) == 400


def test_a_damaged_directory_or_shape_of_npz_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    datasets.write(path, small_episodes())
    content = path.read_bytes()
    # The length of a comment: `zipfile` takes the arrays after it for a part of it.
    entry = content.rindex(b"PK\1\2", 0, content.rindex(b"PK\1\2"))
    longer = content[: entry + 33] + b"\x40" + content[entry + 34 :]
    for damaged in (longer, content.replace(b", 2, 3)", b", 0, 3)")):
        path.write_bytes(damaged)
        with pytest.raises(errors.CorruptError, match=r"a\.npz cannot be read"):
            read_whole(path)
