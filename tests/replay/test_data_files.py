"""Parquet files: damaged ones, of other programs, and what they have that a table does not store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_sets import NAMES, at, episodes, save

import innet_drl as innet
from innet_drl import datasets, errors, structures
from innet_drl.datasets import parquet

pytestmark = pytest.mark.usefixtures("minari_folder")


def test_files_of_others(tmp_path: Path) -> None:
    """Lists, tensors and binaries without `final` and `episode`; other dtypes and names."""
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
    for name in ("lists.parquet", "tensors.parquet"):
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
    path = tmp_path / "a.parquet"
    with innet.Memory(innet.Table("t", {"observation": "float32"}, 100, view=innet.Window(0, 0))) as replay:
        assert datasets.import_table(replay, "t", path).steps == 2
        assert [one.observation.tolist() for one in replay.episodes("t")] == [[1, 2]]
    with pytest.raises(errors.ReplayError):
        next(datasets.read(path))
    other = innet.Table("t", {"reward": "float32"}, 100, view=innet.Window(0, 0))
    with innet.Memory(other) as replay:
        with pytest.raises(errors.SchemaError, match=r"no column 'reward'.*it has .*terminated"):
            datasets.import_table(replay, "t", path)
        pq.write_table(pa.table(others), path)
        with pytest.raises(errors.SchemaError, match="no column 'terminated'; it has nulls, ragged"):
            datasets.import_table(replay, "t", path)


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


def test_pyarrow_reads_our_files(tmp_path: Path) -> None:
    expected = episodes(3, 5)
    datasets.write(tmp_path / "data.parquet", expected)
    table = pq.read_table(tmp_path / "data.parquet")
    assert table["reward"].type == pa.float32()
    assert table["episode"].to_pylist() == sorted(table["episode"].to_pylist())
    np.testing.assert_array_equal(
        np.array(table["observation/arm/joints"].to_pylist()),
        np.concatenate([one["observation"]["arm"]["joints"] for one in expected]),
    )


def test_integers_have_to_fit(tmp_path: Path) -> None:
    count = 4
    arrays: Any = {"observation": np.zeros((count, 1), np.float32), "reward": np.zeros(count)}
    flags: Any = {"terminated": np.ones(count, bool), "truncated": np.zeros(count, bool)}
    save(tmp_path / "a.parquet", {"action": np.array([0, 1, 2, 300]), **arrays, **flags})
    table = innet.Table(
        "t", {"observation": ("float32", (1,)), "action": "uint8", "reward": "float32"}, 100, view=innet.NStep()
    )
    with innet.Memory(table) as replay:
        with pytest.raises(errors.SchemaError, match="'action' has values that uint8 of table 't' does not hold"):
            datasets.import_table(replay, "t", tmp_path / "a.parquet")


def test_shapes_of_other_orders_are_refused(tmp_path: Path) -> None:
    count = 4
    image = np.random.default_rng(0).integers(0, 256, (count, 5, 6, 3), np.uint8)
    arrays: Any = {"action": np.zeros((count, 1), np.uint8), "reward": np.zeros((count, 1))}
    flags: Any = {"terminated": np.ones((count, 1), bool), "truncated": np.zeros((count, 1), bool)}

    def imported(shape: tuple[int, ...], image: Any, **changed: Any) -> Any:
        save(tmp_path / "a.parquet", {"observation": image, **arrays, **flags, **changed})
        columns: Any = {"observation": ("uint8", shape), "action": "uint8", "reward": "float32"}
        with innet.Memory(innet.Table("t", columns, 100, view=innet.NStep())) as replay:
            assert datasets.import_table(replay, "t", tmp_path / "a.parquet").steps == count
            return np.concatenate([one.observation for one in replay.episodes("t")])

    # Flags and numbers may be arrays of one, and values flat.
    np.testing.assert_array_equal(imported((5, 6, 3), image.reshape(count, -1)), image)
    np.testing.assert_array_equal(imported((5, 6), image[..., :1]), image[..., 0])
    with pytest.raises(errors.SchemaError, match=r"'observation' has the shape \(5, 6, 3\), and \(3, 5, 6\) in table"):
        imported((3, 5, 6), image)
    with pytest.raises(errors.SchemaError, match=r"column 'terminated' has the shape \(2,\), and is a number a row"):
        imported((5, 6, 3), image, terminated=np.ones((count, 2), bool))


FLAGS = {"terminated": np.array([False, False, True]), "truncated": np.zeros(3, bool)}


def written(path: Path, **columns: Any) -> Path:
    """A file of three rows by pyarrow."""
    pq.write_table(pa.table({**FLAGS, **columns}), path)
    return path


@pytest.mark.parametrize("kind", ["lists", "tensors", "permuted"])
def test_images_keep_their_shape(tmp_path: Path, kind: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), np.uint8)
    # Stored as (5, 3, 4), which the permutation turns into (4, 5, 3).
    moved = np.ascontiguousarray(np.moveaxis(image, 1, 3)).reshape(3, 60)
    storage = pa.FixedSizeListArray.from_arrays(moved.reshape(-1), 60)
    permuted = pa.fixed_shape_tensor(pa.uint8(), [5, 3, 4], permutation=[2, 0, 1])
    column: Any = {
        "lists": image.tolist(),
        "tensors": pa.FixedShapeTensorArray.from_numpy_ndarray(image),
        "permuted": pa.ExtensionArray.from_storage(permuted, storage),
    }[kind]
    path = written(tmp_path / "a.parquet", observation=column)
    np.testing.assert_array_equal(next(datasets.read(path))["observation"], image)
    for shape, fits in (((4, 5, 3), True), ((60,), True), ((3, 4, 5), False)):
        with innet.Memory(innet.Table("t", {"observation": ("uint8", shape)}, 100, view=innet.Window(0, 0))) as replay:
            if not fits:
                with pytest.raises(errors.SchemaError, match=r"has the shape \(4, 5, 3\), and \(3, 4, 5\) in table"):
                    datasets.import_table(replay, "t", path)
                continue
            datasets.import_table(replay, "t", path)
            np.testing.assert_array_equal(next(replay.episodes("t")).observation, image.reshape(3, *shape))


@pytest.mark.parametrize(
    ("name", "column", "reason"),
    [
        ("reward", pa.array([1.0, None, 2.0]), "has a null in row 1"),
        ("observation", pa.array([[1.0, 2.0], [1.0, 2.0], [None, 3.0]]), "has a null in row 2"),
        (
            "observation",
            pa.array([[1.0, 2.0], [None, 2.0], [1.0, 3.0]], pa.list_(pa.float64(), 2)),
            "has a null in row 1",
        ),
        ("observation", pa.array([[[1], [2]], [[3], None], [[4], [5]]]), "has a null in row 1"),
        ("observation", pa.array([[[1], [2]], [[3], [None]], [[4], [5]]]), "has a null in row 1"),
        ("terminated", pa.array([False, None, True]), "has a null in row 1"),
        ("terminated", pa.array([0.0, np.nan, 1.0]), "has nan in row 1, and is a flag"),
        ("truncated", np.array([0.0, np.nan, 1.0]), "has nan in row 1, and is a flag"),
        ("final", np.array([0, 2, 0]), "has 2 in row 1, and is a flag"),
        ("terminated", np.array(["False", "False", "True"]), "has False in row 0, and is a flag"),
        ("episode", np.array([0, np.nan, np.nan]), "has nan in row 1, and numbers the episodes"),
        ("first", np.array([1, np.nan, np.nan]), "has nan in row 1, and is a flag"),
    ],
)
def test_a_missing_value_is_refused_with_its_column_and_row(
    tmp_path: Path, name: str, column: Any, reason: str
) -> None:
    path = written(tmp_path / "a.parquet", **{name: column})
    with pytest.raises(errors.SchemaError, match=f"a.parquet: column '{name}' {reason}"):
        list(datasets.read(path))


def test_rows_are_counted_over_the_groups_of_a_file(tmp_path: Path) -> None:
    values = [[1.0]] * 100
    values[77] = [None]  # type: ignore[list-item]
    flags = pa.array([True] * 100)
    table = pa.table({"observation": values, "terminated": flags, "truncated": flags})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    with pytest.raises(errors.SchemaError, match="has a null in row 77"):
        list(datasets.read(tmp_path / "a.parquet"))


@pytest.mark.parametrize("name", NAMES)
def test_arrays_of_another_byte_order_are_stored(tmp_path: Path, name: str) -> None:
    given = {"observation": np.arange(6).reshape(3, 2), "action": np.arange(3), "reward": np.arange(3.0)}
    swapped = {column: array.astype(array.dtype.newbyteorder("S")) for column, array in given.items()}
    datasets.write(at(tmp_path, name), [{**swapped, **FLAGS}])
    read = next(datasets.read(at(tmp_path, name)))
    for column, array in given.items():
        np.testing.assert_array_equal(read[column][:3], array)
        assert read[column].dtype == array.dtype
    with pytest.raises(errors.SchemaError, match="column 'observation' is float128; a column has bool, or numbers of"):
        datasets.write(
            at(tmp_path, name.replace("v0", "v1")), [{**given, "observation": np.zeros((3, 2), np.longdouble), **FLAGS}]
        )


def read_whole(path: Path) -> dict[str, Any]:
    found = [structures.flatten(one) for one in datasets.read(path)]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]} if found else {}


def flipped_bits(content: bytes, every: int) -> Iterator[bytes]:
    """The content with another bit flipped in each copy."""
    for place in range(len(content) % every, len(content), every):
        yield content[:place] + bytes([content[place] ^ 1 << place // every % 8]) + content[place + 1 :]


def test_a_flipped_bit_of_a_page_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_GROUP_ROWS", 3000)
    path = tmp_path / "a.parquet"
    random = np.random.default_rng(0)
    ends = {"terminated": np.arange(6000) == 5999, "truncated": np.zeros(6000, bool)}
    datasets.write(path, [{"arm": random.random((6000, 2)), "reward": random.random(6000), **ends}])
    content = path.read_bytes()
    metadata = pq.read_metadata(path)
    chunks = [metadata.row_group(group).column(column) for group in range(2) for column in range(2)]
    for number, chunk in enumerate(chunks):
        assert chunk.has_dictionary_page == bool(number % 2)
        begin = chunk.dictionary_page_offset or chunk.data_page_offset
        # Beyond the header of the chunk's first page, which has no checksum; and the end of its last one.
        places = [*range(begin + 100, begin + 20_000, 997), begin + chunk.total_compressed_size - 1]
        for bit, place in enumerate(places):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1 << bit % 8]) + content[place + 1 :])
            with pytest.raises(errors.CorruptError, match=r"a\.parquet cannot be read"):
                read_whole(path)


@pytest.mark.parametrize("of_others", [False, True])
def test_lost_rows_are_noticed(tmp_path: Path, of_others: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    columns = {
        "observation": np.arange(400.0),
        "terminated": np.arange(400) % 10 == 9,
        "truncated": np.zeros(400, bool),
    }
    if of_others:
        table = pa.table(columns)
        settings: Any = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
        pq.write_table(table, path, row_group_size=100, **settings)
    else:
        monkeypatch.setattr(parquet, "_GROUP_ROWS", 100)
        datasets.write(path, [columns])
    for damaged in flipped_bits(path.read_bytes(), 5):
        path.write_bytes(damaged)
        with contextlib.suppress(errors.ReplayError):
            assert len(read_whole(path)["terminated"]) == 400
