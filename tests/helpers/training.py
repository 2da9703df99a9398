"""What the tests of training share: a run small enough for a test, and what it leaves."""

import dataclasses
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import innet_drl as innet
from innet_drl import train
from innet_drl.launch.actors import Actors, run_actor
from innet_drl.launch.launcher import Launcher, ProcessFailure
from innet_drl.launch.playing import ActorAssignment
from innet_drl.train import environments
from innet_drl.train.observe.metrics import Metrics, values_of
from innet_drl.train.play.evaluation import Evaluation
from innet_drl.train.published_run import RunPublisher, reports_table
from innet_drl.train.settings.config import PRESETS, Config

SMALL = dataclasses.replace(
    PRESETS["cartpole"],
    environments=4,
    min_size=128,
    capacity=4_000,
    batch_size=32,
    layers=(32,),
    hidden=32,
    epsilon_anneal_steps=0,
    steps=1_000,
    evaluation_games=3,
    evaluation_period=0,
    target_return=None,
    report_steps=200,
    report_seconds=0.1,
)
"""Cartpole, about 200 updates."""


def lines(run: Path) -> list[dict[str, Any]]:
    """The metrics of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def newest_lines(run: Path, most: int) -> list[dict[str, Any]]:
    """The newest lines of metrics of a run in progress, at most 64 KiB: tests poll them while the file grows."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            file.seek(max(0, end - (64 << 10)))
            whole = file.read().rpartition(b"\n")[0].splitlines()
    except FileNotFoundError:
        return []
    # The first one may be cut.
    return [json.loads(line) for line in whole[-most:] if line.startswith(b"{")]


def newest(run: Path) -> dict[str, Any]:
    """The newest line of metrics of a run in progress; empty before the first."""
    return (newest_lines(run, 1) or [{}])[-1]


def without_times(metrics: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without what depends on the clock or the system."""
    timed = {
        "time_s",
        "seconds_left",
        "agent_steps_per_s",
        "learner_updates_per_s",
        "learner_time",
        "actor_time",
        "actor_steps_per_s",
        "actor_waits",
        "processor_s",
        "processor_s_per_million_frames",
        "joules",
        "joules_per_million_frames",
        "resident_bytes",
    }
    return [{name: value for name, value in line.items() if name.partition("/")[0] not in timed} for line in metrics]


def small(**changes: Any) -> Config:
    """The small run with some settings changed."""
    return dataclasses.replace(SMALL, **changes)


class BothHavePlayed(train.Callback):
    """Ends a run once two actors have reported games, and an evaluation has ended if one is wanted.

    After a number of steps a quick actor may have taken all of them before the other one's first report.
    """

    def __init__(self, *, evaluated: bool = False) -> None:
        self._awaited = evaluated

    def on_evaluation(self, evaluation: Evaluation, agent_steps: int) -> None:
        self._awaited = False

    def on_metrics(self, metrics: Metrics) -> None:
        played = values_of(metrics, "actor_scores").keys()
        if not self._awaited and metrics["learner_updates"] > 150 and played == {"0", "1"}:
            raise train.StopTraining("both actors have played")


@contextmanager
def running_actors(
    config: Config, launcher: Launcher, address: str = "unix:///nowhere", first_step: int = 0, **options: Any
) -> Iterator[Actors]:
    """The actors of a run without a learner, whose memory takes reports alone."""
    with innet.Memory([reports_table("apex")]) as memory:
        if address.startswith("unix://") and address != "unix:///nowhere":
            memory.serve(address)
        run = RunPublisher(memory, "apex", config)
        with Actors(config, run, first_step, launcher, address, "apex", **options) as actors:
            yield actors


def fail_to_begin(assignment: ActorAssignment, pipe: Connection) -> None:
    """The main function of an actor whose environment cannot be made."""

    def make(*_: Any, **__: Any) -> None:
        raise RuntimeError("no licence")

    environments.make = make  # type: ignore[assignment]
    run_actor(assignment, pipe)


def fail_and_stay(assignment: ActorAssignment, pipe: Connection) -> None:
    """The main function of an actor that fails and does not end."""
    pipe.send(ProcessFailure("broken", fatal=False))
    threading.Event().wait()
