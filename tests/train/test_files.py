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
from innet_drl.analysis.sweep.machine import this_machine
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.train import environments
from innet_drl.train.errors import RunFolderError
from innet_drl.train.files import new_file
from innet_drl.train.learn.checkpoints import save_checkpoint
from innet_drl.train.networks import make_network
from innet_drl.train.observe.times import Times
from innet_drl.train.play import video
from innet_drl.train.run_folder import RunFolder


def record(folder: Path) -> None:
    config = small(environment="brought:Drawn")
    network = make_network(config, environments.make(config, 1).spec)
    video.record(config, network, folder / "game.mp4", seconds=0.1)


def report(folder: Path) -> None:
    RunFolder(folder).begin(small())
    write_report([folder])


WRITTEN: dict[str, tuple[str, Callable[[Path], object]]] = {
    "best.partial": (
        "best.safetensors",
        lambda folder: save_checkpoint(folder / "best.safetensors", {"weight": torch.ones(2)}, {}),
    ),
    "config.partial": ("config.yaml", lambda folder: RunFolder(folder).begin(small())),
    "game.partial.mp4": ("game.mp4", record),
    "report.html.partial": ("report.html", report),
    "sweep.json.part": (
        "sweep.json",
        lambda folder: Sweep(this_machine("cpu"), "cartpole", small()).save(folder / "sweep.json"),
    ),
    "times.json.partial": ("times.json", lambda folder: Times(folder, resumed=False).write()),
}


@pytest.mark.parametrize("partial", WRITTEN)
def test_a_link_with_a_temporary_name_is_not_followed(tmp_path: Path, partial: str) -> None:
    name, write = WRITTEN[partial]
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


@pytest.mark.parametrize("partial", WRITTEN)
def test_only_files_are_replaced(tmp_path: Path, partial: str) -> None:
    """A pipe and a device stay; of a link the target is replaced. The times of a run are left out with a warning."""
    name, write = WRITTEN[partial]
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
    mine, partial = tmp_path / "mine", tmp_path / "partial"
    mine.write_text("a file of the user's")
    # Another process makes the link after the removal.
    monkeypatch.setattr(Path, "unlink", lambda path, missing_ok: path.symlink_to(mine))
    with pytest.raises(FileExistsError):
        new_file(partial)
    assert mine.read_text() == "a file of the user's"
