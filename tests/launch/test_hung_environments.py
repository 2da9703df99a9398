"""Environments that hang: the run names the actor, and replaces it if it is asked to."""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path

import psutil
import pytest
from places import HELPERS
from processes import Command
from training import running_actors, small

import innet_drl as innet
from innet_drl import train
from innet_drl.launch import actors, local, silence
from innet_drl.launch.launcher import LocalLauncher
from innet_drl.launch.playing import ActorAssignment
from innet_drl.launch.processes import ProcessFailure
from innet_drl.launch.silence import Silence
from innet_drl.train.errors import ActorError
from innet_drl.train.observe.display import Display
from innet_drl.train.observe.metrics import ActorReport, Metrics
from innet_drl.train.published_run import ReportWriter

pytestmark = pytest.mark.slow

NAMED = "actor 0 has not stepped for"


def test_an_actor_is_named_once_after_a_minute_in_which_the_learner_looked(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    silent = Silence("it may hang", lambda: clock[0])
    silent.begin(0)
    silent.begin(1)
    caplog.set_level(logging.INFO)
    for clock[0] in range(1, 60):
        silent.check([1])
    assert not silent.note()
    # The learner evaluates for an hour, in which its actors wait.
    clock[0] = 3600.0
    silent.check([1])
    for clock[0] in (3601.0, 3602.0):
        silent.check([])
    assert silent.note() == "actor 0 has not stepped for 62 s: it may hang"
    assert silent.seconds(0) == 3602
    silent.check([0])
    assert not silent.note()
    assert [record.getMessage() for record in caplog.records] == [
        "actor 0 has not stepped for 60 s: it may hang",
        "actor 0 steps again",
    ]


class UntilNamed(Display):
    """Notes what the page says."""

    notes: tuple[str, ...] = ()

    def show_note(self, note: str, time_s: float | None = None) -> None:
        UntilNamed.notes += (note,)


class EndsOnceNamed(train.Callback):
    """Ends training once the page has named an actor."""

    def on_metrics(self, metrics: Metrics) -> None:
        if any(NAMED in note for note in UntilNamed.notes):
            raise train.StopTraining("the actor was named")


def test_the_page_and_the_log_name_an_actor_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(silence, "SILENT_SECONDS", 1.0)
    monkeypatch.setattr(UntilNamed, "notes", ())
    config = small(environment="brought:Hanging", environment_args={"hung": str(tmp_path / "hung")}, steps=None)
    local.train(config, tmp_path / "run", callbacks=[EndsOnceNamed()], display=UntilNamed)
    assert any(
        NAMED in record.getMessage() and "environment_timeout" in record.getMessage() for record in caplog.records
    )


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
    assert "Timeout (0:00:05)!" in training.output
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
    with running_actors(config, launcher, clock=lambda: clock[0]) as running:
        for clock[0] in (0.0, 600.0, 1200.0):
            wait(list(launcher._pipes))
            running.reports(0)
        clock[0] = 1799.0
        wait(list(launcher._pipes))
        with pytest.raises(ActorError, match="no restart is left after 2 failures of actors in 10 minutes: broken"):
            running.reports(0)
