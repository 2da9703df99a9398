"""A learner that continues from a checkpoint: the same updates as if it had not ended, in either memory layout."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from training import small

from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import RunFolderError
from innet_drl.train.learn.checkpoints import load_checkpoint, save_checkpoint
from innet_drl.train.learn.learner import Learner, Numerics
from innet_drl.train.learn.numerics import random_batch
from innet_drl.train.play.agent import load
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import PRESETS

SPEC = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
CONFIG = dataclasses.replace(PRESETS["breakout"], batch_size=4, target_period=2, device="cpu")


def learner(layout: torch.memory_format) -> Learner:
    made = Learner(CONFIG, SPEC)
    made.use(Numerics(torch.float32, layout))
    return made


def test_the_new_name_of_a_checkpoint_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name is in the directory, which a crash of the machine may lose on its own."""
    synced: list[tuple[Path, bool]] = []
    path = tmp_path / "one.safetensors"

    def sync(file: int) -> None:
        synced.append((Path(os.readlink(f"/proc/self/fd/{file}")), path.exists()))

    monkeypatch.setattr(os, "fsync", sync)
    save_checkpoint(path, {"model.weight": torch.ones(2)}, {})
    assert synced == [(path.with_name(f"{path.name}.partial"), False), (tmp_path, False), (tmp_path, True)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_it_goes_on_as_if_it_had_not_ended(tmp_path: Path, layout: torch.memory_format) -> None:
    torch.manual_seed(3)
    batches = [random_batch(SPEC, 4, torch.device("cpu")) for _ in range(6)]
    unbroken = learner(layout)
    for batch in batches[:3]:
        unbroken.update(batch)
    folder = RunFolder.new(tmp_path / "run")
    folder.begin(CONFIG)
    folder.save_checkpoint(100, unbroken.tensors(), {})
    resumed = learner(layout)
    resumed.load(folder.latest_checkpoint().tensors, updates=3, publications=0)
    for batch in batches[3:]:
        expected, got = unbroken.update(batch), resumed.update(batch)
        torch.testing.assert_close(got.td_error, expected.td_error)
    for name, value in unbroken.tensors().items():
        torch.testing.assert_close(resumed.tensors()[name], value)


def test_a_flipped_bit_in_a_tensor_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "1.safetensors"
    save_checkpoint(path, {"weights": torch.arange(64.0), "steps": torch.tensor(3, dtype=torch.bfloat16)}, {"a": 1})
    assert load_checkpoint(path).state == {"a": 1}
    whole = path.read_bytes()
    for damaged in (whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:], whole.replace(b'\\"a\\": 1', b'\\"a\\": 2')):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(RunFolderError, match=r"its checksum differs.*remove it to use the one before"):
            load_checkpoint(path)


def test_a_checkpoint_with_other_tensors_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    start.train(small(serial=True, steps=300), run)
    checkpoint = RunFolder.open(run).latest_checkpoint()
    norms = {f"{network}.features_norm.weight": torch.ones(8) for network in ("model", "target", "average")}
    save_checkpoint(checkpoint.path, {**checkpoint.tensors, **norms}, checkpoint.state)
    wanted = "another network than the run's settings make: they differ in features_norm.weight. Continue with"
    with pytest.raises(RunFolderError, match=f"{wanted} .* another folder"):
        load(run)
    for command in (["evaluate", str(run)], ["train", "--resume", str(run), "--steps", "400"]):
        assert main(command) == 1
        assert re.search(f"{wanted} .* another folder", capsys.readouterr().err)
