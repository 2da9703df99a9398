"""What a user can get wrong: one clear error each, a non-zero exit status, and nothing left running."""

import os
from pathlib import Path

import pytest

from innet_drl import launch
from innet_drl.cli import main
from innet_drl.faults import ActorError, RunFolderError
from innet_drl.folder import RunFolder
from training import small

TINY = ["--preset", "cartpole", "--serial", "--steps", "400", "--min-size", "300", "--evaluation-games", "2"]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that fails."""
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_missing_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(["train", "--environment", "atari/breakot", "--out", str(tmp_path / "run")], capsys)
    assert message == "error: there is no Atari game 'breakot': did you mean breakout?"


def test_a_missing_rom(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    message = error_of(["train", "--out", str(tmp_path / "run")], capsys)
    assert "the ROM of 'breakout' cannot be used" in message
    assert "ALE_ROMS_DIR" in message


def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix://{tmp_path}/nobody"
    flags = ["train", "--preset", "cartpole", "--replay", address, "--out", str(tmp_path / "run")]
    assert address in error_of(flags, capsys) or str(tmp_path / "nobody") in error_of(flags, capsys)


def test_a_full_disk_for_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writing to /dev/full fails as writing to a full disk does."""
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    message = error_of(["train", "--resume", str(run), "--steps", "2000"], capsys)
    assert "the disk is full" in message
    assert f"--resume {run}" in message


def test_a_full_disk_while_actors_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    message = error_of(["train", "--resume", str(run), "--no-serial", "--steps", "2000"], capsys)
    assert "the disk is full" in message


def test_a_full_disk_for_a_checkpoint_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    launch.train(small(serial=True, steps=300), run)
    before = RunFolder(run).latest_checkpoint()

    def no_space(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunFolderError, match="the disk is full"):
        launch.train(small(serial=True, steps=600), run, resume=True)
    assert RunFolder(run).latest_checkpoint().path == before.path
    assert not list(run.glob("checkpoints/*.partial"))


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    message = error_of(["train", *TINY, "--out", str(tmp_path / "file" / "run")], capsys)
    assert "the run's folder" in message


def test_a_folder_that_holds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(tmp_path / "run", small())
    message = error_of(["train", *TINY, "--out", str(tmp_path / "run")], capsys)
    assert f"--resume {tmp_path / 'run'}" in message


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.create(tmp_path / "run", small())
    assert "no checkpoint" in error_of(["train", "--resume", str(tmp_path / "run")], capsys)
    assert "no checkpoint" in error_of(["evaluate", str(tmp_path / "run")], capsys)


def test_actors_that_keep_dying_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors are told of an address where nobody listens."""
    from innet_drl import processes

    start = processes.Actors.__init__

    def elsewhere(self: processes.Actors, config: object, address: str, name: str, first_step: int) -> None:
        start(self, small(actor_restarts=1), f"unix://{tmp_path}/nobody", name, first_step)

    monkeypatch.setattr(processes.Actors, "__init__", elsewhere)
    with pytest.raises(ActorError, match="no restart is left"):
        launch.train(small(), tmp_path / "run")
