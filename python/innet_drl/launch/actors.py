"""Actors as processes of a run: the main function of one, and how the learner starts, polls and replaces them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import threading
import time
from collections import deque
from dataclasses import replace
from typing import Self

import innet_drl as innet
from innet_drl.launch.launcher import HUNG, Ended, Launcher, ProcessFailure, Stopped, import_failure, prepare_to_play
from innet_drl.launch.playing import MEMORY_LOST, ActorAssignment, play
from innet_drl.train import environments
from innet_drl.train.errors import ActorError
from innet_drl.train.observe.metrics import ActorReport
from innet_drl.train.published_run import RunPublisher
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

RESTART_MINUTES = 10.0
"""Period of the limit `actor_restarts`, in minutes."""


def run_actor(assignment: ActorAssignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of an actor's process."""
    playing = threading.Event()
    try:
        prepare_to_play()
        envs = environments.make(
            assignment.config, assignment.config.environments, threads=assignment.config.environment_threads
        )
        try:
            play(assignment, envs, playing=playing.set)
        finally:
            # A failed environment may fail again; the first error is the one to report.
            with contextlib.suppress(Exception):
                envs.close()
    except (Stopped, BrokenPipeError):
        pass
    except innet.ReplayError as error:
        pipe.send(
            ProcessFailure(str(error), fatal=isinstance(error, ValueError), counts=not isinstance(error, MEMORY_LOST))
        )
    # A simulator may end the interpreter.
    except (Exception, SystemExit) as error:
        # An error before the first step is fatal: a replacement would fail in the same way.
        pipe.send(ProcessFailure.of(error, fatal=not playing.is_set()))
    finally:
        pipe.close()


class Actors:
    """The actors of a run, with their reports. Use it as a context manager.

    Without a launcher they are started by users (`innet-drl actor`), for whom the run is published periodically.

    Args:
        config: The run's settings.
        run: The learner's side of the actors' reports.
        first_step: Agent steps of the run until now.
        launcher: Starts an actor for each index, and replaces those that died; `None` starts none.
        address: Address of the replay memory for the launcher's processes.
        name: Name of the table.
        token: Token of the replay memory.
    """

    def __init__(
        self,
        config: Config,
        run: RunPublisher,
        first_step: int,
        launcher: Launcher | None = None,
        address: str = "",
        name: str = "",
        token: str = "",
    ) -> None:
        self.launcher = launcher
        self._assignments = {
            f"actor {index}": ActorAssignment(config, index, address, name, first_step, token)
            for index in range(config.actors)
        }
        self._config = config
        self._run = run
        self._agent_steps = first_step
        self._next_publication = 0.0
        # Times of counted failures in the last `RESTART_MINUTES`.
        self._failures: deque[float] = deque()
        self._shown: set[str] = set()
        self._played: set[int] = set()
        """Actors that have reported since their start: their program was imported."""

    def __enter__(self) -> Self:
        if self.launcher is not None:
            try:
                for assignment in self._assignments.values():
                    self._start(assignment)
            except BaseException:
                self.launcher.close()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self.launcher is not None:
            self.launcher.close()

    def end(self, *, finished: bool) -> None:
        """Asks the launcher's actors to end, without waiting; the end of the context waits.

        Other actors exit if training has `finished`, and otherwise wait for the learner.
        """
        if self.launcher is not None:
            self.launcher.begin_end()
        elif finished:
            self._run.publish(self._agent_steps, ended=True)

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports received since the last call, without waiting. Replaces actors that died.

        Args:
            agent_steps: Steps of the run until now, from which a replacement, or an actor that joins, continues the
                exploration schedule.
        """
        self._agent_steps = agent_steps
        # Read first, so that the reports have what an actor did before it died.
        ended = [] if self.launcher is None else self.launcher.messages()
        if self.launcher is None and time.monotonic() >= self._next_publication:
            # A restarted server has lost the last publication.
            self._run.publish(agent_steps)
            self._next_publication = time.monotonic() + self._config.report_seconds
        reports = self._run.reports()
        self._played.update(report.actor for report in reports)
        for name, message in ended:
            self._replace(self._assignments[name], message, agent_steps)
        return reports

    def _start(self, assignment: ActorAssignment) -> None:
        assert self.launcher is not None, "only a launcher's processes end"
        self._played.discard(assignment.index)
        self.launcher.start(f"actor {assignment.index}", run_actor, assignment)

    def _replace(self, assignment: ActorAssignment, ended: Ended, agent_steps: int) -> None:
        index, failure = assignment.index, ended.failure
        limit = self._config.environment_timeout
        if ended.exit_code == HUNG and limit is not None:
            hung = f"its environments did not return for {limit:g} s (environment_timeout); its stacks are above"
            failure = failure or ProcessFailure(hung, fatal=False)
        reason = None if index in self._played else import_failure(ended.exit_code)
        if failure is None and reason is not None:
            failure = ProcessFailure(reason, fatal=True)
        if failure is None:
            failure = ProcessFailure(f"it ended with exit code {ended.exit_code}", fatal=False)
        # Each traceback is shown once; repetitions are one line.
        text = failure.message if failure.kind in self._shown else failure.whole
        self._shown.add(failure.kind)
        if failure.fatal:
            raise ActorError(f"actor {index} cannot play: {text}")
        left = self._restarts_left()
        if failure.counts:
            self._failures.append(time.monotonic())
            if left == 0:
                failures = len(self._failures)
                count = f" after {failures} failures of actors in {RESTART_MINUTES:g} minutes" if failures > 1 else ""
                raise ActorError(f"actor {index} failed, and no restart is left{count}: {text}")
            logger.error("actor %d failed and is replaced (%d restarts left): %s", index, left - 1, text)
        else:
            logger.warning("actor %d is replaced, which is no restart: %s", index, text)
        # With the seeds of a process that died before its first report, a deterministic failure would repeat.
        self._assignments[f"actor {index}"] = replace(assignment, attempt=assignment.attempt + 1)
        self._start(replace(self._assignments[f"actor {index}"], first_step=agent_steps))

    def _restarts_left(self) -> int:
        while self._failures and time.monotonic() - self._failures[0] >= 60 * RESTART_MINUTES:
            self._failures.popleft()
        return self._config.actor_restarts - len(self._failures)
