"""Saving a memory of this process and restoring it: the same batches, and errors that say what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from full_disk import full_device
from steps import VIEW, step, table

import innet_drl as innet
from innet_drl import errors


def filled(**options: Any) -> innet.Memory:
    """A seeded memory with two streams of 80 steps in chunks of 7, some of them sampled and updated."""
    replay = innet.Memory([table(**options)], seed=3)
    with replay.writer("t", 2, VIEW, chunk_steps=7) as writer:
        for t in range(80):
            writer.append(**step(t, 2))
    for _ in range(3):
        batch = replay.sample("t", 16, VIEW)
        replay.update_priorities("t", batch.ids, np.arange(16) + 0.5)
    return replay


def assert_equal(new: innet.Batch, old: innet.Batch) -> None:
    """Checks that two batches are equal but for the ids, which name the items of one memory."""
    assert list(new.as_dict()) == list(old.as_dict())
    for name, array in new.as_dict().items():
        if name != "ids":
            np.testing.assert_array_equal(array, getattr(old, name), name)


def test_batches_of_a_restored_memory_are_those_of_the_saved_one(tmp_path: Path) -> None:
    saved = filled(capacity=120)
    path = tmp_path / "replay.snapshot"
    saved.save(path)
    restored = innet.Memory([table(capacity=120)], seed=3)
    restored.restore(str(path))
    assert list(tmp_path.iterdir()) == [path]
    for _ in range(3):
        old, new = (replay.sample("t", 32, VIEW) for replay in (saved, restored))
        assert_equal(new, old)
        for replay, batch in ((saved, old), (restored, new)):
            assert replay.update_priorities("t", batch.ids, np.arange(32)).applied == 32
    counts = [replay.stats()["tables"]["t"] for replay in (saved, restored)]
    for name in ("steps", "items", "bytes", "total_mass", "max_priority", "inserted_items", "sampled_items"):
        assert counts[0][name] == counts[1][name], name


def test_writers_go_on_in_a_restored_memory_of_another_size(tmp_path: Path) -> None:
    filled().save(tmp_path / "snapshot")
    with innet.Memory([table(capacity=50)]) as replay:
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
    with innet.Memory([table(priority_exponent=0.5)]) as other:
        with pytest.raises(errors.TableDiffersError, match=r"priority_exponent is 0\.5, in the snapshot 0\.6"):
            other.restore(path)
        assert other.stats()["tables"]["t"]["steps"] == 0
    content = path.read_bytes()
    for damaged in (content[:-1], content[:50], b"", content[:200] + b"?" + content[201:], bytes(1000)):
        path.write_bytes(damaged)
        with innet.Memory() as empty:
            with pytest.raises(errors.CorruptError, match=f"{path} cannot be used: .*nothing was restored"):
                empty.restore(path)
            assert empty.stats()["tables"] == {}
    with pytest.raises(errors.StorageError, match="missing cannot be read") as caught:
        saved.restore(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT


def test_only_files_are_replaced(tmp_path: Path) -> None:
    """A link stays, and its target is replaced."""
    path, link = tmp_path / "snapshot", tmp_path / "newest"
    saved = filled()
    link.symlink_to(path)
    with pytest.raises(errors.StorageError, match="newest cannot be written: No such file"):
        saved.save(link)
    path.write_bytes(b"an earlier one")
    saved.save(link)
    assert link.is_symlink()
    innet.Memory().restore(path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "device").symlink_to("/dev/null")
    listed = sorted(tmp_path.iterdir())
    words = {"pipe": "only a regular file is replaced", "device": "only a regular file", "folder": "Is a directory"}
    for other in (tmp_path / name for name in words):
        kind = other.stat().st_mode
        with pytest.raises(errors.StorageError, match=f"{other} cannot be written: .*{words[other.name]}"):
            saved.save(other)
        assert other.stat().st_mode == kind
    with pytest.raises(errors.StorageError, match="pipe cannot be read: it is not a regular file"):
        innet.Memory().restore(tmp_path / "pipe")
    assert sorted(tmp_path.iterdir()) == listed


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
