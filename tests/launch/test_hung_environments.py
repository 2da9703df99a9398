"""Environments that hang: the run replaces their actor."""

from __future__ import annotations

import os
import types
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest
from places import HELPERS
from processes import Command
from training import running_actors, small

import innet_drl as innet
from innet_drl.launch import actors
from innet_drl.launch.launcher import LocalLauncher, ProcessFailure
from innet_drl.launch.playing import ActorAssignment
from innet_drl.train.errors import ActorError
from innet_drl.train.observe.metrics import ActorReport
from innet_drl.train.published_run import ReportWriter

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("holding", "is_async"), [(True, False), (False, True)])
def test_an_actor_that_hangs_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, holding: bool, is_async: bool
) -> None:
    """Also one that keeps the interpreter, and one whose environments are processes, which end with it."""
    monkeypatch.setenv("PYTHONPATH", str(HELPERS), prepend=os.pathsep)
    environment = ["brought:Hanging", "--environment-args", "hung=hung", f"holding_the_lock={str(holding).lower()}"]
    flags = ["--preset", "cartpole", "--steps", "2000", "--environments", "2", "--min-size", "100"]
    flags += ["--target-return", "None", "--evaluation-period", "0", "--evaluation-games", "1", "--no-video"]
    limits = ["--environment-timeout", "5", *(["--async-environments"] if is_async else [])]
    with Command("train", "--environment", *environment, *flags, *limits, folder=tmp_path) as training:
        assert training.end() == 0, training.output
    told = "its environments did not return for 5 s (environment_timeout); its stacks are above"
    assert training.output.count(f"actor 0 failed and is replaced (2 restarts left): {told}") == 1
    assert training.output.count("is replaced") == 1
    assert "most recent call first" in training.output
    assert ("async_vector_env.py" if is_async else "brought.py") in training.output
    hung = int((tmp_path / "hung").read_text())
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(hung).status() == psutil.STATUS_ZOMBIE


def fail(assignment: ActorAssignment, pipe: Connection) -> None:
    """The main function of an actor that fails."""
    pipe.send(ProcessFailure("broken", fatal=False))


def play_and_exit(assignment: ActorAssignment, pipe: Connection) -> None:
    """The main function of an actor whose simulator ends the interpreter."""
    with innet.connect(assignment.address) as replay:
        ReportWriter(replay, assignment.name, assignment.index).write(
            ActorReport(assignment.index, 10, [], 0, {}), None
        )
    os._exit(1)


def test_an_actor_that_has_played_may_exit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit code is that of a program which cannot be imported, as a replacement's would be, too."""
    monkeypatch.setattr(actors, "run_actor", play_and_exit)
    launcher = LocalLauncher()
    ended = "actor 0 failed, and no restart is left after 2 failures of actors in 10 minutes: it ended with exit code 1"
    with (
        pytest.raises(ActorError, match=ended),
        running_actors(small(actor_restarts=1), launcher, f"unix://{tmp_path}/replay") as running,
    ):
        while True:
            wait(list(launcher._pipes))
            running.reports(0)


def test_restarts_are_counted_over_ten_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "run_actor", fail)
    clock = [0.0]
    launcher = LocalLauncher()
    config = small(actor_restarts=1)
    monkeypatch.setattr(actors, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    with running_actors(config, launcher) as running:
        for clock[0] in (0.0, 600.0, 1200.0):
            wait(list(launcher._pipes))
            running.reports(0)
        clock[0] = 1799.0
        wait(list(launcher._pipes))
        with pytest.raises(ActorError, match="no restart is left after 2 failures of actors in 10 minutes: broken"):
            running.reports(0)
