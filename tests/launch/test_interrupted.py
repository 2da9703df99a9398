"""Ctrl-C in a program that calls `train.run`: Python raises `KeyboardInterrupt`, and a checkpoint is kept."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from typing import Any

import pytest
from training import small

from innet_drl import train
from innet_drl.train.run_folder import RunFolder

pytestmark = pytest.mark.slow


class CtrlC(train.Callback):
    """Sends this process the signal of Ctrl-C when the learner has made so many updates."""

    def __init__(self, updates: int) -> None:
        self.updates = updates
        self.ended_by: BaseException | None = None

    def on_metrics(self, metrics: train.Metrics) -> None:
        if metrics["learner_updates"] >= self.updates:
            signal.raise_signal(signal.SIGINT)

    def on_error(self, error: BaseException) -> None:
        self.ended_by = error


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="processes"),
        pytest.param({"serial": True}, id="serial"),
    ],
)
def test_what_was_learned_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any]) -> None:
    callback, run = CtrlC(updates=20), tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.run(small(steps=1_000_000, **changes), callbacks=[callback], folder=run)
    assert isinstance(callback.ended_by, KeyboardInterrupt)
    kept = RunFolder(run).latest_checkpoint()
    assert kept.state["learner"]["updates"] >= 20
    (line,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    call = f"--resume {run} (in Python resume=True)"
    assert line == f"interrupted: continue from {kept.path} with {call}"
    steps = kept.state["meter"]["agent_steps"] + 400
    resumed = train.run(small(steps=steps, **changes), folder=run, resume=True)
    assert resumed.learner_updates > kept.state["learner"]["updates"]


def test_the_memory_is_kept_with_the_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.run(small(steps=1_000_000), callbacks=[CtrlC(updates=20)], folder=run)
    assert (run / "replay.snapshot").is_file()


@pytest.mark.parametrize("serial", [True, False])
def test_a_run_that_has_not_learned_leaves_no_folder(tmp_path: Path, serial: bool) -> None:
    config = small(serial=serial, min_size=150_000, capacity=200_000, steps=None)
    with pytest.raises(KeyboardInterrupt):
        train.run(config, callbacks=[CtrlC(updates=0)], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
