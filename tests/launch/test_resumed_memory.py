"""A run with actors apart continues with its memory, or says why it cannot."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from full_disk import full_device
from training import lines, small

from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train.learn.learner import Learner, Update
from innet_drl.train.memory import ReplayMemory
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs.trainer import Trainer

pytestmark = pytest.mark.slow

FIRST = small(min_size=256, steps=800)
MORE = dataclasses.replace(FIRST, steps=6_000)


def note(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The table's statistics before the actors start, and at the first update."""
    found: list[dict[str, Any]] = []
    memories: list[ReplayMemory] = []
    publish, update = Trainer.publish, Learner.update

    def before_the_actors(self: Trainer, memory: ReplayMemory) -> None:
        if not memories:
            memories.append(memory)
            found.append(memory.stats())
        publish(self, memory)

    def at_the_first_update(self: Learner, batch: Any) -> Update:
        if len(found) == 1:
            found.append(memories[0].stats())
        return update(self, batch)

    monkeypatch.setattr(Trainer, "publish", before_the_actors)
    monkeypatch.setattr(Learner, "update", at_the_first_update)
    return found


def test_learning_goes_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    first = start.train(FIRST, run)
    assert (run / "replay.snapshot").stat().st_size > 0
    written = lines(run)
    found = note(monkeypatch)
    second = start.train(MORE, run, resume=True)
    assert second.learner_updates > first.learner_updates
    begun, learned = found
    assert begun["steps"] >= FIRST.min_size
    assert begun["sampled_items"] >= FIRST.batch_size * first.learner_updates
    assert begun["max_priority"] > 0
    # The rate limiter holds the actors back before they could have filled an empty memory.
    assert learned["inserted_items"] - begun["inserted_items"] < FIRST.min_size
    (after, *_) = lines(run)[len(written) :]
    assert after["replay_steps"] >= begun["steps"]
    assert after["samples_per_insert"] > 0


def test_without_a_snapshot_the_memory_is_filled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    start.train(FIRST, run)
    (run / "replay.snapshot").unlink()
    found = note(monkeypatch)
    start.train(dataclasses.replace(MORE, checkpoint_replay=False), run, resume=True)
    begun, learned = found
    assert begun["steps"] == 0
    assert learned["items"] >= FIRST.min_size
    assert not (run / "replay.snapshot").exists()


def test_a_session_that_keeps_no_memory_removes_the_old_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start.train(FIRST, run)
    assert main(["train", "--resume", str(run), "--steps", "6000", "--no-checkpoint-replay"]) == 0
    assert not (run / "replay.snapshot").exists()


def test_memories_that_cannot_be_used_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start.train(FIRST, run)
    path = run / "replay.snapshot"
    checkpoints = sorted((run / "checkpoints").iterdir())

    def error_of(*flags: str) -> str:
        capsys.readouterr()
        assert main(["train", "--resume", str(run), "--steps", "6000", *flags]) == 1
        (line,) = capsys.readouterr().err.strip().splitlines()
        return line

    message = error_of("--n-step", "4", "--priority-exponent", "0.5")
    assert "with another priority_exponent and n_step" in message
    assert f"delete {path} to continue with an empty memory" in message
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    message = error_of()
    # By its checksum, or by a length that is none.
    assert f"the snapshot {path} cannot be used" in message
    assert f"delete {path} to continue with an empty memory" in message
    assert sorted((run / "checkpoints").iterdir()) == checkpoints
    path.unlink()
    assert main(["train", "--resume", str(run), "--steps", "6000"]) == 0
    assert path.exists()


def test_a_full_disk_for_the_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start.train(FIRST, run)
    content = (run / "replay.snapshot").read_bytes()
    full_device(run / "replay.snapshot.next.partial")
    capsys.readouterr()
    assert main(["train", "--resume", str(run), "--steps", "6000"]) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "the disk is full" in line
    assert f"--resume {run}" in line
    assert (run / "replay.snapshot").read_bytes() == content
    # The checkpoint is newer than the memory, and has none of its own.
    assert RunFolder(run).latest_checkpoint().state["snapshot"] is None


def test_a_snapshot_belongs_to_one_checkpoint(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = tmp_path / "run"
    first = start.train(FIRST, run)
    snapshot, unadopted = run / "replay.snapshot", run / "replay.snapshot.next"
    earlier = snapshot.read_bytes()
    second = start.train(dataclasses.replace(FIRST, steps=first.agent_steps + 300), run, resume=True)
    assert not unadopted.exists()
    checkpoint = RunFolder(run).latest_checkpoint()

    # Killed between the checkpoint and the new name of its snapshot.
    newest = snapshot.read_bytes()
    snapshot.rename(unadopted)
    snapshot.write_bytes(earlier)
    RunFolder(run).match_memory(checkpoint)
    assert snapshot.read_bytes() == newest
    assert not unadopted.exists()

    # Killed before the checkpoint: what was written for it belongs to none.
    unadopted.write_bytes(earlier)
    caplog.clear()
    RunFolder(run).match_memory(checkpoint)
    assert snapshot.read_bytes() == newest
    assert not caplog.records

    # The newest checkpoint was removed, or the file was copied from elsewhere.
    snapshot.write_bytes(earlier)
    start.train(dataclasses.replace(FIRST, steps=second.agent_steps + 300), run, resume=True)
    (told,) = [record.getMessage() for record in caplog.records if "another time" in record.getMessage()]
    assert str(snapshot) in told
    assert str(checkpoint.path) in told
