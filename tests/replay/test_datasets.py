"""Tables to files and back: equal rows, in each format, and errors that leave the table as it was."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from serving import SERVER_CLI, served_memories

import innet_drl as innet
from innet_drl import datasets, errors
from innet_drl.datasets import rows

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


@pytest.fixture
def replay() -> Iterator[innet.Memory]:
    with innet.Memory(innet.Table("t", COLUMNS, 2000, view=VIEW)) as memory:
        yield memory


@pytest.fixture(autouse=True)
def _minari(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))


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
    found, expected = rows.flat(dict(found.items())), rows.flat(expected)
    found.pop("first", None)
    assert sorted(found) == sorted(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, name)


NAMES = ["data.parquet", "data.npz", "minari:robot/random-v0"]


def at(folder: Path, name: str) -> str:
    return name if name.startswith("minari:") else str(folder / name)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(tmp_path: Path, name: str) -> None:
    expected = episodes(0, 40)
    counts = datasets.write(at(tmp_path, name), expected)
    assert counts.episodes == 40
    assert counts.rows == sum(len(one["final"]) for one in expected)
    assert counts.steps == counts.rows - 40
    found = list(datasets.read(at(tmp_path, name)))
    assert len(found) == 40
    for one, other in zip(found, expected, strict=True):
        assert_equal(one, other)
        assert isinstance(one["action"], tuple)


@pytest.mark.parametrize("name", NAMES)
def test_an_import_and_an_export_give_equal_data(replay: innet.Memory, tmp_path: Path, name: str) -> None:
    first, second = at(tmp_path, name), at(tmp_path, name.replace("data", "again").replace("random", "again"))
    expected = episodes(1, 30)
    written = datasets.write(first, expected)
    assert datasets.import_table(replay, "t", first) == written
    assert datasets.export_table(replay, "t", second) == written
    for one, other in zip(datasets.read(second), expected, strict=True):
        assert_equal(one, other)
    if not name.startswith("minari:"):
        # Byte for byte: the same columns, in the table's order, in the same groups of rows.
        third = at(tmp_path, f"third-{name}")
        with innet.Memory(innet.Table("t", COLUMNS, 2000, view=VIEW)) as copy:
            datasets.import_table(copy, "t", second)
            datasets.export_table(copy, "t", third)
        assert Path(third).read_bytes() == Path(second).read_bytes()


@pytest.mark.parametrize("name", NAMES[:2])
def test_windows_are_those_of_the_steps_as_they_were_played(replay: innet.Memory, tmp_path: Path, name: str) -> None:
    played = episodes(2, 20)
    settings: Any = {"sampler": "fifo", "max_times_sampled": 1, "view": VIEW}
    replay.create_table(innet.Table("played", COLUMNS, 2000, **settings))
    replay.create_table(innet.Table("imported", COLUMNS, 2000, **settings))
    with replay.writer("played", 1) as writer:
        for one in played:
            arrays = rows.flat(one) | {"first": np.arange(len(one["final"])) == 0}
            writer.extend(**rows.nested({column: array[:, None] for column, array in arrays.items()}))
    datasets.export_table(replay, "played", at(tmp_path, name))
    datasets.import_table(replay, "imported", at(tmp_path, name), priority=2.0)
    count = replay.stats()["tables"]["played"]["items"]
    assert count == replay.stats()["tables"]["imported"]["items"]
    batches = [replay.sample(table, count) for table in ("played", "imported")]
    for column in batches[0]:
        if column not in ("ids", "ages"):
            left, right = (rows.flat({column: batch[column]}) for batch in batches)
            for part in left:
                np.testing.assert_array_equal(left[part], right[part], part)


def test_what_a_running_table_has_is_exported(tmp_path: Path) -> None:
    """Several streams, open episodes, evicted beginnings; served."""
    columns: dict[str, Any] = {"observation": ("float32", (2,)), "action": "int64", "reward": "float32"}
    with served_memories(tmp_path, 1) as address, innet.connect(address) as client:
        client.create_table(innet.Table("t", columns, 500, view=innet.NStep()))
        with client.writer("t", 4, chunk_steps=10) as writer:
            for t in range(200):
                observation = np.stack([[environment, t] for environment in range(4)]).astype(np.float32)
                period = np.arange(4) * 3 + 20
                writer.append(
                    observation=observation,
                    action=np.zeros(4, np.int64),
                    reward=np.ones(4, np.float32),
                    terminated=np.zeros(4, bool),
                    truncated=t % period == period - 2,
                    final=t % period == period - 1,
                    first=t % period == 0,
                )
            writer.flush()
            counts = datasets.export_table(client, "t", tmp_path / "t.parquet")
        assert 400 < counts.rows <= 500
        client.create_table(innet.Table("copy", columns, 500, view=innet.NStep()))
        assert datasets.import_table(client, "copy", tmp_path / "t.parquet") == counts
        for one in datasets.read(tmp_path / "t.parquet"):
            environment, t = one["observation"].T
            assert len(np.unique(environment)) == 1
            assert (np.diff(t) == 1).all()
            assert not one["final"][:-1].any()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_data_sets_of_others(tmp_path: Path) -> None:
    """A data set as Minari's own collector makes it: more observations than steps, infos, an episode without an end."""
    from minari.data_collector import EpisodeBuffer

    random = np.random.default_rng(0)

    def buffer(steps: int, ended: bool) -> EpisodeBuffer:
        return EpisodeBuffer(
            observations={"goal": random.normal(size=(steps + 1, 2)), "hand": random.normal(size=(steps + 1, 3))},
            actions=random.integers(0, 3, steps),
            rewards=random.normal(size=steps),
            terminations=np.arange(steps) == (steps - 1 if ended else -1),
            truncations=np.zeros(steps, bool),
            infos={"success": np.arange(steps + 1) % 2 == 0},
        )

    buffers = [buffer(5, True), buffer(7, False)]
    space = gymnasium.spaces.Dict(
        goal=gymnasium.spaces.Box(-np.inf, np.inf, (2,)), hand=gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    )
    minari.create_dataset_from_buffers(
        "others/reach-v0", iter(buffers), observation_space=space, action_space=gymnasium.spaces.Discrete(3)
    )
    table = innet.Table.from_spaces(
        "reach", space, gymnasium.spaces.Discrete(3), 100, view=innet.NStep(), columns={"success": "bool"}
    )
    with innet.Memory(table) as replay:
        counts = datasets.import_table(replay, "reach", "minari:others/reach-v0")
        assert (counts.episodes, counts.steps, counts.rows) == (2, 12, 14)
        stored = list(replay.episodes("reach"))
        for one, given in zip(stored, buffers, strict=True):
            assert isinstance(given.observations, dict)
            np.testing.assert_array_equal(one.observation["hand"], given.observations["hand"].astype(np.float32))
            np.testing.assert_array_equal(one.action[:-1], given.actions)
            np.testing.assert_array_equal(one.success[:-1], given.infos["success"][:-1])
        # It has a last observation, to bootstrap from.
        assert stored[1].truncated[-2]


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


def test_infos_of_minari_do_not_replace_its_columns(tmp_path: Path) -> None:
    episode = minari.data_collector.EpisodeBuffer(
        observations=np.zeros((4, 2), np.float32),
        actions=np.array([1, 2, 3]),
        rewards=np.ones(3),
        terminations=np.array([False, False, True]),
        truncations=np.zeros(3, bool),
        infos={"action": np.array([9, 9, 9, 9]), "terminated": np.ones(4, bool), "lives": np.arange(4)},
    )
    spaces = {"observation_space": gymnasium.spaces.Box(-1, 1, (2,)), "action_space": gymnasium.spaces.Discrete(10)}
    arguments: Any = spaces
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        minari.create_dataset_from_buffers("infos/of-v0", [episode], **arguments)
    read = next(datasets.read("minari:infos/of-v0"))
    assert read["action"].tolist() == [1, 2, 3, 0]
    assert read["terminated"].tolist() == [False, False, True, False]
    assert read["lives"].tolist() == [0, 1, 2, 3]


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


def stored(replay: innet.Replay) -> Any:
    return {name: replay.stats()["tables"]["t"][name] for name in ("steps", "items", "inserted_steps", "max_priority")}


@pytest.mark.parametrize("name", ["data.parquet", "data.npz"])
def test_a_damaged_file_leaves_the_table_as_it_was(replay: innet.Memory, tmp_path: Path, name: str) -> None:
    datasets.write(tmp_path / "good.parquet", episodes(4, 3))
    datasets.import_table(replay, "t", tmp_path / "good.parquet")
    before = stored(replay)
    path = tmp_path / name
    datasets.write(path, episodes(4, 60))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for damaged in (whole[:middle], whole[:100], b"", whole[:-40] + bytes(40), flipped):
        path.write_bytes(damaged)
        with pytest.raises(
            errors.CorruptError, match=f"{name} cannot be read: .*damaged, cut off, or of another format"
        ):
            datasets.import_table(replay, "t", path)
    assert stored(replay) == before


def test_a_data_set_that_does_not_fit_leaves_the_table_as_it_was(replay: innet.Memory, tmp_path: Path) -> None:
    datasets.write(tmp_path / "good.parquet", episodes(5, 3))
    datasets.import_table(replay, "t", tmp_path / "good.parquet")
    before = stored(replay)

    def refused(change: Any, error: type[Exception], match: str) -> None:
        changed = [rows.nested({**rows.flat(one), **change(one)}) for one in episodes(5, 40)]
        # The fault is in the last episode alone, where the columns allow it.
        datasets.write(tmp_path / "bad.npz", changed)
        with pytest.raises(error, match=match):
            datasets.import_table(replay, "t", tmp_path / "bad.npz")
        assert stored(replay) == before

    def last_reward_is_nan(one: dict[str, Any]) -> dict[str, Any]:
        last_reward_is_nan.calls += 1  # type: ignore[attr-defined]
        reward = one["reward"].copy()
        reward[0] = np.nan if last_reward_is_nan.calls == 40 else reward[0]  # type: ignore[attr-defined]
        return {"reward": reward}

    last_reward_is_nan.calls = 0  # type: ignore[attr-defined]
    refused(last_reward_is_nan, errors.SchemaError, r'bad.npz: .*"reward" of stream 0 at step \d+ is NaN')
    wrong = "bad.npz: column 'half' has the shape \\(3,\\), and \\(2,\\) in table 't'"
    refused(lambda one: {"half": np.zeros((len(one["final"]), 3), np.float16)}, errors.SchemaError, wrong)
    dtype = "column 'action/0' is float64, and int64 in table 't': convert the file"
    refused(lambda one: {"action/0": np.zeros(len(one["final"]))}, errors.SchemaError, dtype)
    final = "a final row follows no terminated or truncated one"
    refused(
        lambda one: {"terminated": one["final"] & False, "truncated": one["final"] & False}, errors.SchemaError, final
    )
    datasets.write(tmp_path / "few.npz", [{n: v for n, v in one.items() if n != "mask"} for one in episodes(5, 2)])
    with pytest.raises(errors.SchemaError, match=r"few.npz has no column 'mask' for table 't'; it has"):
        datasets.import_table(replay, "t", tmp_path / "few.npz")
    datasets.write(tmp_path / "many.npz", episodes(6, 200))
    with pytest.raises(errors.SchemaError, match="steps, and table 't' holds 2000"):
        datasets.import_table(replay, "t", tmp_path / "many.npz")
    assert stored(replay) == before


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


def test_wrong_names_are_told(replay: innet.Memory, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"\*\.parquet, \*\.npz or minari:NAME, got '.*\.csv'"):
        datasets.import_table(replay, "t", tmp_path / "a.csv")
    with pytest.raises(errors.ConfigError, match="there is no file"):
        datasets.import_table(replay, "t", tmp_path / "a.npz")
    with pytest.raises(errors.ConfigError, match="no Minari data set 'x/y-v0' on this machine, there is none"):
        datasets.import_table(replay, "t", "minari:x/y-v0")
    with pytest.raises(errors.UnknownTableError):
        datasets.export_table(replay, "nothing", tmp_path / "a.npz")
    with pytest.raises(errors.ConfigError, match="there is no episode to write"):
        datasets.export_table(replay, "t", tmp_path / "a.npz")
    with pytest.raises(errors.StorageError, match="cannot be written"):
        datasets.write(tmp_path / "missing" / "a.parquet", episodes(0, 1))
    # The caller's own files.
    with pytest.raises(FileNotFoundError, match="recorded"):
        datasets.write(tmp_path / "a.npz", (dict(np.load(tmp_path / name)) for name in ["recorded"]))
    assert list(tmp_path.iterdir()) == []


def test_a_minari_name_that_is_taken_or_wrong_is_left_alone(tmp_path: Path) -> None:
    datasets.write("minari:robot/taken-v0", episodes(0, 2))
    for name, reason in (
        ("robot/taken-v0", "exists"),
        ("robot", "exists|no id"),
        ("", "no id"),
        (str(tmp_path), "no id|exists"),
    ):
        with pytest.raises(errors.ConfigError, match=reason):
            datasets.write(f"minari:{name}", episodes(0, 2))
    assert tmp_path.is_dir()
    assert len(list(datasets.read("minari:robot/taken-v0"))) == 2
    unlike = [{"frame" if name == "observation" else name: value for name, value in episodes(0, 1)[0].items()}]
    with pytest.raises(errors.SchemaError, match="no column 'observation', which a Minari data set has"):
        datasets.write("minari:robot/frames-v0", unlike)


def test_texts_and_options_of_another_format_are_refused(tmp_path: Path) -> None:
    text = [{**one, "note": np.array(["text"] * len(one["final"]))} for one in episodes(0, 1)]
    with pytest.raises(errors.SchemaError, match="column 'note' is <U4; a column has numbers or bool"):
        datasets.write(tmp_path / "a.npz", text)
    with pytest.raises(errors.ConfigError, match="a data set of Minari alone has the options author"):
        datasets.write(tmp_path / "a.npz", episodes(0, 1), author="nobody")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    for name in ("a.parquet", "a.npz"):
        path = tmp_path / name
        datasets.write(path, episodes(0, 3))
        before = path.read_bytes()
        uneven = [*episodes(0, 50), {"terminated": np.zeros(2, bool)}]
        with pytest.raises(errors.SchemaError, match="episode 50 has no 'truncated'"):
            datasets.write(path, uneven)
        other = [*episodes(0, 2), *[{**one, "half": one["half"].astype(np.float32)} for one in episodes(1, 1)]]
        with pytest.raises(errors.SchemaError, match=r"column 'half' is float32.*and float16.*in the first episode"):
            datasets.write(path, other)
        assert path.read_bytes() == before
        path.unlink()
    assert list(tmp_path.iterdir()) == []


PASSING = """
import pathlib, sys
import numpy as np
from innet_drl import datasets
from innet_drl.datasets import minari, parquet

def made():
    random = np.random.default_rng(0)
    for _ in range(150):
        ends = np.arange(32) == 30
        yield {
            "observation": random.integers(0, 256, (32, 128 * 1024), np.uint8),
            "action": np.zeros(32, np.int64),
            "reward": np.zeros(32, np.float32),
            "terminated": ends,
            "truncated": ends & False,
            "final": np.arange(32) == 31,
        }

def peak():
    # Not ru_maxrss, which begins with that of the process that started this one.
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])

next(made())
before = peak()
datasets.write(sys.argv[1], made())
total = sum(one["observation"].nbytes for one in datasets.read(sys.argv[1]))
print(total, peak() - before)
"""


@pytest.mark.parametrize("name", NAMES)
def test_memory_does_not_grow_with_the_data(tmp_path: Path, name: str) -> None:
    """600 MB pass through, and a part of it is held."""
    command = [sys.executable, "-c", PASSING, at(tmp_path, name)]
    total, grown = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert total == 150 * 32 * 128 * 1024
    assert grown < total / 2, f"{grown / 2**20:.0f} MiB"


def test_the_commands_export_and_import(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address, innet.connect(address) as client:
        for name in ("t", "copy"):
            client.create_table(innet.Table(name, COLUMNS, 2000, view=VIEW))
        datasets.write(tmp_path / "data.parquet", episodes(7, 10))

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run([*SERVER_CLI, *arguments], capture_output=True, text=True, check=False)

        done = run("import", "t", str(tmp_path / "data.parquet"), address, "--priority", "3")
        assert (done.returncode, done.stderr) == (0, "")
        assert "  10 episodes  " in done.stdout
        assert client.stats()["tables"]["t"]["max_priority"] == 3.0
        assert run("export", "t", str(tmp_path / "out.parquet"), address).returncode == 0
        assert run("import", "copy", str(tmp_path / "out.parquet"), address).returncode == 0
        found, expected = (list(client.episodes(name)) for name in ("copy", "t"))
        assert len(found) == len(expected) == 10
        failed = run("import", "nothing", str(tmp_path / "out.parquet"), address)
        assert failed.returncode == 1
        assert failed.stderr.startswith("innet-replay: ")
        assert "nothing" in failed.stderr
        assert run("export", "t", str(tmp_path / "a.csv"), address).returncode == 2
        helped = run("import", "--help")
        assert "usage: innet-replay import" in helped.stdout
        assert "export and import" in run("--help").stdout
