"""Files that a run or a command writes under a temporary name."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from training import small

from innet_drl.analysis.report import write_report
from innet_drl.analysis.sweep.sweep_file import Sweep, this_machine
from innet_drl.train import environments
from innet_drl.train.errors import RunFolderError
from innet_drl.train.files import replacing
from innet_drl.train.learn.checkpoints import save_checkpoint
from innet_drl.train.networks import make_network
from innet_drl.train.observe.stopwatch import Times
from innet_drl.train.play import video
from innet_drl.train.run_folder import RunFolder


def record(folder: Path) -> None:
    config = small(environment="brought:Drawn")
    network = make_network(config, environments.make(config, 1).spec)
    video.record(config, network, folder / "game.mp4", seconds=0.1)


def report(folder: Path) -> None:
    RunFolder(folder).begin(small())
    write_report([folder])


WRITTEN: dict[str, Callable[[Path], object]] = {
    "best.safetensors": lambda folder: save_checkpoint(
        folder / "best.safetensors",
        {"weight": torch.ones(2)},
        {},
    ),
    "config.yaml": lambda folder: RunFolder(folder).begin(small()),
    "game.mp4": record,
    "report.html": report,
    "sweep.json": lambda folder: Sweep(this_machine("cpu"), "cartpole", small()).save(
        folder / "sweep.json",
    ),
    "times.json": lambda folder: Times(folder, resumed=False).write(),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_link_with_a_temporary_name_is_not_followed(tmp_path: Path, name: str) -> None:
    write, partial = WRITTEN[name], f"{name}.partial"
    mine, folder = tmp_path / "mine", tmp_path / "folder"
    mine.write_text("a file of the user's")
    folder.mkdir()
    for target in (mine, tmp_path / "missing"):
        (folder / partial).symlink_to(target)
        write(folder)
        assert mine.read_text() == "a file of the user's"
        assert not (tmp_path / "missing").exists()
        assert (folder / name).is_file()
        assert not (folder / name).is_symlink()
        assert not (folder / partial).is_symlink()


@pytest.mark.parametrize("name", WRITTEN)
def test_only_files_are_replaced(tmp_path: Path, name: str) -> None:
    """A pipe and a device stay; of a link the target is replaced. The times of a run are left out with a warning."""
    write = WRITTEN[name]
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/null"), lambda path: path.symlink_to(tmp_path / "no")):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        make(folder / name)
        with contextlib.suppress(OSError, RunFolderError):
            write(folder)
            assert name == "times.json"
        assert not (folder / name).is_file()
        assert Path("/dev/null").is_char_device()
    folder = tmp_path / "last"
    folder.mkdir()
    target = tmp_path / f"target{Path(name).suffix}"
    target.write_bytes(b"")
    (folder / name).symlink_to(target)
    write(folder)
    assert (folder / name).is_symlink()
    assert target.stat().st_size > 0


def test_a_link_that_is_made_meanwhile_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("a file of the user's")
    # Another process makes the link after the removal.
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.symlink_to(mine))
    with pytest.raises(FileExistsError), replacing(tmp_path / "file"):
        pass
    assert mine.read_text() == "a file of the user's"
