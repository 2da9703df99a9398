"""An actor that joins a run from any host: `innet-drl actor`.

It gets the run's settings from the replay server and plays. It outlives the learner and the server: while one of them
is away it waits, and logs the name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import innet_drl as innet
from innet_drl.errors import naming_extras
from innet_drl.launch.launcher import LeavesRun, Stopped
from innet_drl.signals import Interrupted, handle, leave_terminal
from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import ReplayMemory
from innet_drl.train.published_run import (
    CONNECTION_LOST,
    DOCUMENT,
    PublishedRun,
    check_address,
    published_runs,
)
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Period at which an idle actor polls the server for a run."""
CALL_SECONDS = 2.0
"""Timeout of a look at the published run."""


@dataclass(frozen=True)
class Joining:
    """Settings of one actor. The run's configuration has all others."""

    replay: str
    """Address of the server."""
    index: int
    """Number of the actor."""
    run: str | None = None
    """Name of the run; `None` for the only published one. Without `namespace`, the namespace and a slash are its
    prefix."""
    replay_ca: Path | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    """Settings of this host that replace the run's."""
    token: str = field(default="", repr=False)
    """Token of the server; empty for none."""
    namespace: str = ""
    """Namespace of the run; empty for the runs of all namespaces."""

    def connect(self) -> innet.Replay:
        """Connects to the server; waits for it without limit."""
        return innet.connect(
            self.replay,
            token=self.token,
            tls_ca=self.replay_ca,
            timeout=None,
            namespace=self.namespace or None,
        )

    def config(self, published: PublishedRun, name: str) -> Config:
        """Returns the run's settings with the changes of this host."""
        config = dataclasses.replace(published.config(), replay=self.replay, replay_ca=self.replay_ca, **self.changes)
        if self.index >= config.actors:
            raise ConfigurationError(
                f"--index {self.index}: run {name} has {config.actors} actors, 0 to {config.actors - 1}: its learner's "
                "actors is their number"
            )
        return config


class _RunEnded(LeavesRun):
    """Training has reached its end."""


class _RunChanged(LeavesRun):
    """The run has other settings than the actor."""


def run(joining: Joining) -> None:
    """Joins as a process of its own: `join` until SIGINT, SIGTERM or SIGHUP.

    Raises:
        Interrupted: One of these signals.
    """
    _end_on_signals()
    try:
        join(joining)
    except Stopped as stopped:
        logger.info("actor %d leaves the run", joining.index)
        raise Interrupted(stopped.args[0]) from None


def join(joining: Joining) -> None:
    """Plays until the run ends."""
    check_address(joining.replay)
    if joining.index < 0:
        raise ConfigurationError(f"--index {joining.index}: it must be at least 0")
    if joining.replay_ca is not None and not joining.replay_ca.is_file():
        raise ConfigurationError(f"replay_ca {joining.replay_ca}: there is no such file")
    name = joining.run
    while True:
        try:
            with joining.connect() as replay:
                name, published = _await_run(replay, joining, name)
            config = joining.config(published, name)
            environments.check(config)
            # The settings contain the namespace, so the prefix of the name is dropped.
            _play(joining, config, name.rpartition("/")[2], published)
        except _RunEnded:
            logger.info("run %s has ended", name)
            return
        except _RunChanged:
            logger.info("run %s has other settings: actor %d joins it again", name, joining.index)
        except CONNECTION_LOST as error:
            logger.warning("actor %d lost the server and waits for it: %s", joining.index, error)
            time.sleep(POLL_SECONDS)


def _await_run(replay: innet.Replay, joining: Joining, known: str | None) -> tuple[str, PublishedRun]:
    """Waits until the run is published: `known`, or else the only one."""
    said = ""
    while True:
        runs = published_runs(replay)
        live = {name: run for name, run in runs.items() if not run.ended and known in (None, name)}
        if len(live) > 1:
            raise ConfigurationError(
                f"{joining.replay} has several runs, {', '.join(live)}: name the actor's by --run, or by namespace"
            )
        if live:
            return live.popitem()
        if known in runs:
            raise _RunEnded
        wanted = "a learner" if known is None else f"the learner of run {known}"
        reason = "none has published its run there" + (f" but {', '.join(runs)}, which ended" if runs else "")
        within = f" --namespace {joining.namespace}" if joining.namespace else ""
        waiting = f"waiting for {wanted} (innet-drl learner --replay {joining.replay}{within}): {reason}"
        if waiting != said:
            logger.info("%s", waiting)
            said = waiting
        time.sleep(POLL_SECONDS)


def _play(joining: Joining, config: Config, name: str, published: PublishedRun) -> None:
    # torch is imported only after the run has been found.
    with naming_extras():
        from innet_drl.launch.playing import MEMORY_LOST, ActorAssignment, play

    envs = environments.make(config, config.environments, threads=config.environment_threads)
    if config.environment_timeout is not None:
        limit = config.environment_timeout
        logger.info("actor %d plays; SIGALRM ends it if a step takes %g s (environment_timeout)", joining.index, limit)
    try:
        steps = published.agent_steps
        assignment = ActorAssignment(config, joining.index, joining.replay, name, steps, joining.token)
        play(assignment, envs, _Look(joining.index, name, published))
    except MEMORY_LOST as error:
        logger.warning(
            "the server was started again without the run, and actor %d joins it anew: %s", joining.index, error
        )
        time.sleep(POLL_SECONDS)
    finally:
        # A failed environment may fail again; the first error is the one to report.
        with contextlib.suppress(Exception):
            envs.close()


class _Look:
    """Looks after the run of an actor that joined: whether it has ended or changed."""

    def __init__(self, index: int, name: str, published: PublishedRun) -> None:
        self._index = index
        self._name = name
        self._settings = published.settings
        self._version = 0

    def __call__(self, memory: ReplayMemory) -> None:
        """Raises `LeavesRun` if the run has ended, or has other settings."""
        if self._version == 0:
            self._warn_of_namesake(memory.replay)
        try:
            name = self._name + DOCUMENT
            found = memory.replay.get_parameters(name, newer_than=self._version, timeout=CALL_SECONDS)
        except innet.errors.DeadlineError:
            return
        if found is None:
            return
        self._version = found.version
        published = PublishedRun.of(found.tensors)
        if published.ended:
            _silence_core()
            raise _RunEnded
        if published.settings != self._settings or published.release != innet.__version__:
            raise _RunChanged

    def _warn_of_namesake(self, replay: innet.Replay) -> None:
        writers = replay.stats(timeout=None)["tables"][self._name]["by_writer"]
        # One of these writers is this process's own.
        namesakes = [each for each in writers if each["connected"] and each["name"] == f"actor {self._index}"]
        if len(namesakes) > 1:
            logger.warning(
                "another actor %d plays for run %s: give each an --index of its own, or their games are equal and "
                "explore alike",
                self._index,
                self._name,
            )


def _end_on_signals() -> None:
    """Makes the first signal raise `Stopped`, and the second one kill the process."""

    def stop(number: int, frame: object) -> None:
        leave_terminal(number)
        for other in handled:
            signal.signal(other, signal.SIG_DFL)
        _silence_core()
        raise Stopped(number)

    handled = handle(stop)
    os.register_at_fork(after_in_child=_as_environment)


def _silence_core() -> None:
    """Suppresses the core's warning about unsent last rows: the process is ending anyway."""
    logging.getLogger("innet_drl").setLevel(logging.ERROR)


def _as_environment() -> None:
    """Resets signals in environments' processes: the actor's process ends them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
