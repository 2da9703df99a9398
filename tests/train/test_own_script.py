"""Functions and classes of the script that trains, in the settings of its run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from places import HELPERS

SCRIPT = """
import torch
from innet_drl import train
from training import small


class MyNet(torch.nn.Linear):
    def __init__(self, space, actions, config):
        super().__init__(space.shape[0], actions)


def squared(online, target, batch):
    q = online(batch.observation)
    error = batch.reward - q.gather(1, batch.action.long()[:, None])[:, 0]
    return error**2, error.abs(), q


if __name__ == "__main__":
    train.run(small(network=MyNet, loss=squared, serial={serial}, steps=300), folder="run")
"""
OTHER = """
import numpy
from innet_drl import train
print(train.load("run").act(numpy.zeros(4, numpy.float32)))
"""


def python(folder: Path, *arguments: str, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program in a folder."""
    path = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, input=text, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize(("serial", "command"), [(True, ("my_script.py",)), (False, ("-m", "my_script"))])
def test_the_agent_of_a_script_is_loaded_by_another(tmp_path: Path, serial: bool, command: tuple[str, ...]) -> None:
    (tmp_path / "my_script.py").write_text(SCRIPT.format(serial=serial))
    trained = python(tmp_path, *command)
    assert trained.returncode == 0, trained.stderr
    assert trained.stderr == ""
    settings = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (settings["network"], settings["loss"]) == ("my_script:MyNet", "my_script:squared")
    loaded = python(tmp_path, "-c", OTHER)
    assert loaded.stdout.strip() in ("0", "1"), loaded.stderr


def test_a_script_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    """As a notebook: the program has no file."""
    trained = python(tmp_path, "-", text=SCRIPT.format(serial=True))
    assert trained.returncode == 0, trained.stderr
    (line,) = trained.stderr.strip().splitlines()
    assert line.startswith("config.yaml has __main__:MyNet and __main__:squared, which other programs cannot import")
    loaded = python(tmp_path, "-c", OTHER)
    error = loaded.stderr.strip().splitlines()[-1]
    assert "loss __main__:squared: __main__ is the program that runs, and this one has no 'squared'" in error
    assert "In the run's config.yaml, replace __main__ by the name of a file" in error


def test_a_script_is_not_trained_by_loading_its_agent(tmp_path: Path) -> None:
    guarded = SCRIPT.format(serial=True)
    (tmp_path / "my_script.py").write_text(guarded.replace('if __name__ == "__main__":', "if True:"))
    assert python(tmp_path, "my_script.py").returncode == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    error = python(tmp_path, "-c", OTHER).stderr.strip().splitlines()[-1]
    assert "importing my_script raises ProcessError: a script that trains does so under `if __name__" in error
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def train_in(folder: Path, setting: str, before: str = "") -> str:
    """Runs a script that trains, and returns its standard error."""
    (folder / "mine.py").write_text(MINE.format(setting=setting, before=before))
    ended = python(folder, "mine.py")
    assert ended.returncode == 1
    return ended.stderr


MINE = """
import brought
import gymnasium
from innet_drl import train
from training import small


class Mine(brought.Counter):
    def __init__(self, size):
        super().__init__()


def refuses():
    raise RuntimeError("no licence")


if __name__ == "__main__":
    {before}
    train.run(small({setting}), folder="run")
"""


def test_a_missing_argument_of_an_environment_is_one_short_error(tmp_path: Path) -> None:
    error = train_in(tmp_path, "environment=Mine")
    assert error.count("Traceback") == 1
    assert "gymnasium/" not in error
    assert error.strip().endswith("missing 1 required positional argument: 'size'; its arguments are environment_args")


def test_an_error_of_the_users_code_keeps_its_own_frames(tmp_path: Path) -> None:
    error = train_in(tmp_path, "environment=refuses")
    assert error.count("Traceback") == 2
    assert 'raise RuntimeError("no licence")' in error
    assert "gymnasium/" not in error


def test_an_id_that_is_registered_under_the_guard_is_named(tmp_path: Path) -> None:
    register = "gymnasium.register('Mine-v0', lambda: Mine(3))"
    error = train_in(tmp_path, "environment='Mine-v0', serial=False", register)
    assert "actor 0 cannot play: Gymnasium cannot make 'Mine-v0'" in error
    assert "without the lines under `if __name__ == '__main__':`: register the id above them" in error
    assert error.count("Traceback") == 1
