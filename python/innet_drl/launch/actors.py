"""Actors as processes of a run: the main function of one, and how the learner starts, polls and replaces them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Self

import innet_drl as innet
from innet_drl.launch.launcher import Ended, Launcher
from innet_drl.launch.playing import MEMORY_LOST, ActorAssignment, play
from innet_drl.launch.processes import ProcessFailure, Stopped, import_failure, prepare_to_play
from innet_drl.launch.silence import Silence
from innet_drl.train import environments, watchdog
from innet_drl.train.actor import Actor
from innet_drl.train.config import Config
from innet_drl.train.errors import ActorError
from innet_drl.train.memory import ReplayMemory, RowWriter
from innet_drl.train.metrics import ActorReport

logger = logging.getLogger(__name__)

RESTART_MINUTES = 10.0
"""Period of the limit `actor_restarts`, in minutes."""
FETCH_SECONDS = 1.0
"""Period at which an actor with blocked rows fetches newer parameters (`max_version_lag`)."""


class _LearnersRun:
    """The run of an actor that the learner started, with a pipe for reports."""

    def __init__(self, pipe: multiprocessing.connection.Connection) -> None:
        self._pipe = pipe

    def begin(self, actor: Actor, memory: ReplayMemory) -> None:
        """Does nothing: the learner publishes parameters before it starts actors."""

    def flush(self, writer: RowWriter, fetch: Callable[[], object] | None) -> None:
        """Waits without limit, as the learner ends its actors."""
        if fetch is None:
            writer.flush(timeout=None)
            return
        while True:
            fetch()
            with contextlib.suppress(innet.errors.DeadlineError):
                writer.flush(timeout=FETCH_SECONDS)
                return

    def report(self, report: ActorReport) -> None:
        """Sends the report to the learner's process."""
        self._pipe.send(report)


def run_actor(assignment: ActorAssignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of an actor's process."""
    playing = threading.Event()
    try:
        prepare_to_play()
        envs = environments.make(
            assignment.config, assignment.config.environments, threads=assignment.config.environment_threads
        )
        try:
            play(assignment, envs, _LearnersRun(pipe), playing.set)
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
    """The actor processes of a run. Use it as a context manager."""

    def __init__(
        self,
        config: Config,
        address: str,
        name: str,
        first_step: int,
        launcher: Launcher,
        token: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._assignments = {
            f"actor {index}": ActorAssignment(config, index, address, name, first_step, token)
            for index in range(config.actors)
        }
        self.launcher = launcher
        self.silence = Silence("an environment may hang (environment_timeout replaces the actor then)", clock)
        self._config = config
        self._clock = clock
        # Times of counted failures in the last `RESTART_MINUTES`.
        self._failures: deque[float] = deque()
        self._shown: set[str] = set()
        self._played: set[int] = set()
        """Actors that have reported since their start: their program was imported."""

    def __enter__(self) -> Self:
        try:
            for assignment in self._assignments.values():
                self._start(assignment)
        except BaseException:
            self.launcher.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.launcher.close()

    def end(self, *, finished: bool) -> None:
        """Asks every actor to end, without waiting; the end of the context waits."""
        self.launcher.begin_end()

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports received since the last call, without waiting. Replaces actors that died.

        Args:
            agent_steps: Steps of the run until now: a replacement continues the exploration schedule from there.
        """
        reports: list[ActorReport] = []
        for name, message in self.launcher.messages():
            if isinstance(message, Ended):
                self._replace(self._assignments[name], message, agent_steps)
            else:
                self._played.add(message.actor)
                reports.append(message)
        self.silence.check({report.actor for report in reports})
        return reports

    def _start(self, assignment: ActorAssignment) -> None:
        self.silence.begin(assignment.index)
        self._played.discard(assignment.index)
        self.launcher.start(f"actor {assignment.index}", run_actor, assignment)

    def _replace(self, assignment: ActorAssignment, ended: Ended, agent_steps: int) -> None:
        index, failure = assignment.index, ended.failure
        limit = self._config.environment_timeout
        # The last report may precede the step by up to a second.
        if ended.exit_code == watchdog.EXIT_CODE and limit is not None and self.silence.seconds(index) > limit - 1:
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
            self._failures.append(self._clock())
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
        while self._failures and self._clock() - self._failures[0] >= 60 * RESTART_MINUTES:
            self._failures.popleft()
        return self._config.actor_restarts - len(self._failures)
