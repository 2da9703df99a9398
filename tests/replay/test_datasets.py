"""Tables to files and back: equal rows, in each format, and errors that leave the table as it was."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from data_sets import COLUMNS, NAMES, VIEW, assert_equal, at, episodes
from serving import SERVER_CLI, served_memories

import innet_drl as innet
from innet_drl import datasets, errors, structures

pytestmark = pytest.mark.usefixtures("minari_folder")


@pytest.fixture
def replay() -> Iterator[innet.Memory]:
    with innet.Memory(innet.Table("t", COLUMNS, 2000, view=VIEW)) as memory:
        yield memory


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


def test_windows_are_those_of_the_steps_as_they_were_played(replay: innet.Memory, tmp_path: Path) -> None:
    played = episodes(2, 20)
    settings: Any = {"sampler": "fifo", "max_times_sampled": 1, "view": VIEW}
    replay.create_table(innet.Table("played", COLUMNS, 2000, **settings))
    replay.create_table(innet.Table("imported", COLUMNS, 2000, **settings))
    with replay.writer("played", 1) as writer:
        for one in played:
            arrays = structures.flatten(one) | {"first": np.arange(len(one["final"])) == 0}
            writer.extend(**structures.unflatten({column: array[:, None] for column, array in arrays.items()}))
    datasets.export_table(replay, "played", tmp_path / "data.parquet")
    datasets.import_table(replay, "imported", tmp_path / "data.parquet", priority=2.0)
    count = replay.stats()["tables"]["played"]["items"]
    assert count == replay.stats()["tables"]["imported"]["items"]
    batches = [replay.sample(table, count) for table in ("played", "imported")]
    for column in batches[0]:
        if column not in ("ids", "ages"):
            left, right = (structures.flatten({column: batch[column]}) for batch in batches)
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


def stored(replay: innet.Replay) -> Any:
    return {name: replay.stats()["tables"]["t"][name] for name in ("steps", "items", "inserted_steps", "max_priority")}


def test_a_damaged_file_leaves_the_table_as_it_was(replay: innet.Memory, tmp_path: Path) -> None:
    datasets.write(tmp_path / "good.parquet", episodes(4, 3))
    datasets.import_table(replay, "t", tmp_path / "good.parquet")
    before = stored(replay)
    path = tmp_path / "data.parquet"
    datasets.write(path, episodes(4, 60))
    whole = path.read_bytes()
    middle = len(whole) // 2
    flipped = whole[:middle] + bytes([whole[middle] ^ 255]) + whole[middle + 1 :]
    for damaged in (whole[:middle], whole[:100], b"", whole[:-40] + bytes(40), flipped):
        path.write_bytes(damaged)
        with pytest.raises(
            errors.CorruptError, match=r"data\.parquet cannot be read: .*damaged, cut off, or of another format"
        ):
            datasets.import_table(replay, "t", path)
    assert stored(replay) == before


def test_a_data_set_that_does_not_fit_leaves_the_table_as_it_was(replay: innet.Memory, tmp_path: Path) -> None:
    datasets.write(tmp_path / "good.parquet", episodes(5, 3))
    datasets.import_table(replay, "t", tmp_path / "good.parquet")
    before = stored(replay)

    def refused(change: Any, error: type[Exception], match: str) -> None:
        changed = [structures.unflatten({**structures.flatten(one), **change(one)}) for one in episodes(5, 40)]
        # The fault is in the last episode alone, where the columns allow it.
        datasets.write(tmp_path / "bad.parquet", changed)
        with pytest.raises(error, match=match):
            datasets.import_table(replay, "t", tmp_path / "bad.parquet")
        assert stored(replay) == before

    def last_reward_is_nan(one: dict[str, Any]) -> dict[str, Any]:
        last_reward_is_nan.calls += 1  # type: ignore[attr-defined]
        reward = one["reward"].copy()
        reward[0] = np.nan if last_reward_is_nan.calls == 40 else reward[0]  # type: ignore[attr-defined]
        return {"reward": reward}

    last_reward_is_nan.calls = 0  # type: ignore[attr-defined]
    refused(last_reward_is_nan, errors.SchemaError, r'bad.parquet: .*"reward" of stream 0 at step \d+ is NaN')
    wrong = "bad.parquet: column 'half' has the shape \\(3,\\), and \\(2,\\) in table 't'"
    refused(lambda one: {"half": np.zeros((len(one["final"]), 3), np.float16)}, errors.SchemaError, wrong)
    dtype = "column 'action/0' is float64, and int64 in table 't': convert the file"
    refused(lambda one: {"action/0": np.zeros(len(one["final"]))}, errors.SchemaError, dtype)
    final = "a final row follows no terminated or truncated one"
    refused(
        lambda one: {"terminated": one["final"] & False, "truncated": one["final"] & False}, errors.SchemaError, final
    )
    datasets.write(tmp_path / "few.parquet", [{n: v for n, v in one.items() if n != "mask"} for one in episodes(5, 2)])
    with pytest.raises(errors.SchemaError, match=r"few.parquet has no column 'mask' for table 't'; it has"):
        datasets.import_table(replay, "t", tmp_path / "few.parquet")
    datasets.write(tmp_path / "many.parquet", episodes(6, 200))
    with pytest.raises(errors.SchemaError, match="steps, and table 't' holds 2000"):
        datasets.import_table(replay, "t", tmp_path / "many.parquet")
    assert stored(replay) == before


@pytest.mark.parametrize("name", NAMES)
def test_misspelt_columns_are_refused_with_the_nearest_name(replay: innet.Memory, tmp_path: Path, name: str) -> None:
    datasets.write(at(tmp_path, name), episodes(5, 3))
    before = stored(replay)
    for columns, reason in (
        (
            {"rewrad": "half"},
            r"table 't' has no column 'rewrad', which `columns` names: did you mean reward\? It has",
        ),
        ({"reward": "rewrad"}, r"has no column 'rewrad' for table 't': did you mean reward\? It has"),
        ({"zz": "reward"}, r"table 't' has no column 'zz', which `columns` names; it has observation/camera, "),
    ):
        with pytest.raises(errors.SchemaError, match=reason):
            datasets.import_table(replay, "t", at(tmp_path, name), columns=columns)
        with pytest.raises(errors.SchemaError, match=reason):
            datasets.check(replay.table("t"), at(tmp_path, name), columns=columns)
    assert stored(replay) == before


def test_wrong_names_are_told(replay: innet.Memory, tmp_path: Path) -> None:
    with pytest.raises(errors.ConfigError, match=r"\*\.parquet or minari:NAME, got '.*\.csv'"):
        datasets.import_table(replay, "t", tmp_path / "a.csv")
    with pytest.raises(errors.ConfigError, match="there is no file"):
        datasets.import_table(replay, "t", tmp_path / "a.parquet")
    with pytest.raises(errors.ConfigError, match="no Minari data set 'x/y-v0' on this machine, there is none"):
        datasets.import_table(replay, "t", "minari:x/y-v0")
    with pytest.raises(errors.UnknownTableError):
        datasets.export_table(replay, "nothing", tmp_path / "a.parquet")
    with pytest.raises(errors.ConfigError, match="there is no episode to write"):
        datasets.export_table(replay, "t", tmp_path / "a.parquet")
    with pytest.raises(errors.StorageError, match="cannot be written"):
        datasets.write(tmp_path / "missing" / "a.parquet", episodes(0, 1))
    # The caller's own files.
    with pytest.raises(FileNotFoundError, match="recorded"):
        datasets.write(tmp_path / "a.parquet", (dict(np.load(tmp_path / name)) for name in ["recorded"]))
    assert list(tmp_path.iterdir()) == []


def test_texts_and_options_of_another_format_are_refused(tmp_path: Path) -> None:
    text = [{**one, "note": np.array(["text"] * len(one["final"]))} for one in episodes(0, 1)]
    with pytest.raises(errors.SchemaError, match="column 'note' is <U4; a column has bool, or numbers"):
        datasets.write(tmp_path / "a.parquet", text)
    with pytest.raises(errors.ConfigError, match="a data set of Minari alone has the options author"):
        datasets.write(tmp_path / "a.parquet", episodes(0, 1), author="nobody")


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    datasets.write(path, episodes(0, 3))
    before = path.read_bytes()
    uneven = [*episodes(0, 50), {"terminated": np.zeros(2, bool)}]
    with pytest.raises(errors.SchemaError, match="episode 50 has no 'truncated'"):
        datasets.write(path, uneven)
    other = [*episodes(0, 2), *[{**one, "half": one["half"].astype(np.float32)} for one in episodes(1, 1)]]
    with pytest.raises(errors.SchemaError, match=r"column 'half' is float32.*and float16.*in the first episode"):
        datasets.write(path, other)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    """As `Memory.save` does."""
    rest = {"terminated": np.zeros(3, bool), "truncated": np.zeros(3, bool), "final": np.zeros(3, bool)}
    (tmp_path / "elsewhere").mkdir()
    target, link = tmp_path / "elsewhere" / "target", tmp_path / "t.parquet"
    link.symlink_to(target)
    with pytest.raises(errors.StorageError, match="No such file"):
        datasets.write(link, [{"x": np.arange(3), **rest}])
    assert not target.exists()
    target.write_bytes(b"an earlier one")
    datasets.write(link, [{"x": np.arange(3), **rest}])
    assert link.is_symlink()
    (read,) = datasets.read(link)
    assert read["x"].tolist() == [0, 1, 2]
    assert [path.name for path in target.parent.iterdir()] == ["target"]


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


def test_the_log_of_an_import_that_timed_out_has_the_rows_of_the_table(
    make_replay: Callable[..., innet.Replay], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    columns: Any = {"observation": "float32", "action": "int64", "reward": "float32"}
    # It takes some hundred steps without samples.
    table = innet.Table("t", columns, 5000, view=innet.NStep(), samples_per_insert=1.0, min_size=100, slack=500.0)
    replay = make_replay([table])
    ends = np.arange(4000) % 10 == 9
    flags = {"terminated": ends, "truncated": ends & False}
    steps = {"observation": np.zeros(4000), "action": np.zeros(4000, np.int64), "reward": np.zeros(4000)}
    datasets.write(tmp_path / "a.parquet", [{**steps, **flags}])
    with pytest.raises(errors.DeadlineError):
        datasets.import_table(replay, "t", tmp_path / "a.parquet", timeout=0.5)
    stored = replay.stats()["tables"]["t"]["inserted_steps"]
    assert 0 < stored == sum(len(one) for one in replay.episodes("t")) < 4000
    assert f"a.parquet ended early: table 't' has got {stored} rows since its start, of 4000" in caplog.text


def calls_of(work: Callable[..., object], *arguments: Any) -> int:
    """Calls of Python's functions, built-in ones included, which take the time where arrays are small."""
    count = 0

    def counted(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(counted)
    try:
        work(*arguments)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", NAMES)
def test_the_work_for_one_step_episodes_is_linear(tmp_path: Path, name: str) -> None:
    one = {
        "observation": np.zeros((1, 2), np.float32),
        "action": np.zeros(1, np.int64),
        "reward": np.zeros(1),
        "terminated": np.ones(1, bool),
        "truncated": np.zeros(1, bool),
    }
    # A first call imports modules.
    datasets.write(at(tmp_path, name.replace("v0", "v1")), [one])
    counts: dict[str, list[int]] = {"write": [], "read": [], "import": []}
    each = 10 if name.startswith("minari:") else 350
    for number in (each, 2 * each, 3 * each):
        path = at(tmp_path, name.replace("random", f"n{number}"))
        counts["write"].append(calls_of(datasets.write, path, [one] * number))
        counts["read"].append(calls_of(list, datasets.read(path)))
        columns: Any = {"observation": ("float32", (2,)), "action": "int64", "reward": "float32"}
        with innet.Memory(innet.Table("t", columns, 2000, view=innet.NStep())) as replay:
            counts["import"].append(calls_of(datasets.import_table, replay, "t", path))
    for work, (few, more, most) in counts.items():
        assert most < 1.1 * (few + more), work


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
