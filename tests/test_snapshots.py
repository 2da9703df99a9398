"""Saving a memory of this process and restoring it: the same batches, and errors that say what to do."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import innet_drl as innet
from full_disk import full_device
from innet_drl import errors
from steps import VIEW, step, table


def filled(**options: Any) -> innet.Replay:
    """A seeded memory with two streams of 80 steps in chunks of 7, some of them sampled and updated."""
    replay = innet.Replay([table(**options)], seed=3)
    with replay.writer("t", 2, VIEW, chunk_steps=7) as writer:
        for t in range(80):
            writer.append(**step(t, 2))
    for _ in range(3):
        batch = replay.sample("t", 16, VIEW)
        replay.update_priorities("t", batch.key, np.arange(16) + 0.5)
    return replay


def test_batches_of_a_restored_memory_are_those_of_the_saved_one(tmp_path: Path) -> None:
    saved = filled(capacity=120)
    path = tmp_path / "replay.snapshot"
    saved.save(path)
    restored = innet.Replay([table(capacity=120)], seed=3)
    restored.restore(str(path))
    assert list(tmp_path.iterdir()) == [path]
    for _ in range(3):
        old, new = (replay.sample("t", 32, VIEW) for replay in (saved, restored))
        assert new.keys() == old.keys()
        for name in set(old) - {"key"}:
            np.testing.assert_array_equal(new[name], old[name], name)
        for replay, batch in ((saved, old), (restored, new)):
            assert replay.update_priorities("t", batch.key, np.arange(32)).applied == 32
    counts = [replay.stats()["tables"]["t"] for replay in (saved, restored)]
    for name in ("steps", "items", "bytes", "total_priority", "max_priority", "inserted_items", "sampled_items"):
        assert counts[0][name] == counts[1][name], name


def test_a_snapshot_of_the_last_release_is_restored() -> None:
    # Written by release 0.1.0 (format 2): `filled(capacity=120).save(...)`.
    same = filled(capacity=120)
    restored = innet.Replay(seed=3)
    restored.restore(Path(__file__).parent / "old_run" / "replay.snapshot")
    assert restored.tables() == same.tables()
    for _ in range(3):
        old, new = (replay.sample("t", 32, VIEW) for replay in (restored, same))
        for name in set(old) - {"key"}:
            np.testing.assert_array_equal(new[name], old[name], name)


def test_writers_go_on_in_a_restored_memory_of_another_size(tmp_path: Path) -> None:
    filled().save(tmp_path / "snapshot")
    with innet.Replay([table(capacity=50)]) as replay:
        replay.restore(tmp_path / "snapshot")
        assert 30 < replay.stats()["tables"]["t"]["steps"] <= 50
        assert replay.sample("t", 64, VIEW).action.min() >= 50
        with replay.writer("t", 1, VIEW, chunk_steps=7) as writer:
            for t in range(200):
                writer.append(**step(t))
        assert replay.sample("t", 64, VIEW).action.min() >= 150


def test_what_cannot_be_restored(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    saved = filled()
    saved.save(path)
    with pytest.raises(errors.ConfigError, match='table "t" is not empty: it has 160 steps'):
        saved.restore(path)
    with innet.Replay([table(priority_exponent=0.5)]) as other:
        with pytest.raises(errors.TableDiffersError, match=r"priority_exponent is 0\.5, asked for 0\.6"):
            other.restore(path)
        assert other.stats()["tables"]["t"]["steps"] == 0
    content = path.read_bytes()
    for damaged in (content[:-1], content[:50], b"", content[:200] + b"?" + content[201:], bytes(1000)):
        path.write_bytes(damaged)
        with innet.Replay() as empty:
            with pytest.raises(errors.CorruptError, match=f"{path} cannot be used: .*nothing was restored"):
                empty.restore(path)
            assert empty.stats()["tables"] == {}
    with pytest.raises(errors.StorageError, match="missing cannot be read") as caught:
        saved.restore(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT


def test_a_client_says_where_it_works(tmp_path: Path) -> None:
    with innet.Replay([table()]) as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        with innet.connect(server.addresses[0]) as client:
            for method in (client.save, client.restore):
                with pytest.raises(errors.ConfigError, match="call it in the process that made the replay"):
                    method(tmp_path / "snapshot")


def test_a_full_disk_is_told_as_such_and_the_earlier_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "snapshot"
    saved = filled()
    saved.save(path)
    content = path.read_bytes()
    full_device(tmp_path / "snapshot.partial")
    with pytest.raises(OSError, match="cannot be written") as caught:
        saved.save(path)
    assert isinstance(caught.value, errors.StorageError)
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == content
    assert list(tmp_path.iterdir()) == [path]
