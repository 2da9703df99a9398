"""Actors as processes: the main function of one, and how the learner starts, polls and replaces them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch

import innet_drl as innet
from innet_drl.launch.processes import (
    MAIN_GUARD,
    ProcessFailure,
    Stopped,
    await_end,
    prepare_to_play,
    start,
    start_fork_server,
)
from innet_drl.train import environments
from innet_drl.train.actor import Actor
from innet_drl.train.config import Config
from innet_drl.train.errors import ActorError, TrainingError, WithFlags
from innet_drl.train.memory import ReplayMemory, RowWriter, actor_token, memory_class, memory_settings
from innet_drl.train.metrics import ActorReport
from innet_drl.train.networks import make_network, published

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
STOP_SECONDS = 10.0
"""Seconds that an actor may take to end before it is killed."""
PULL_SECONDS = 1.0
"""Seconds that an actor waits with its rows before it looks for newer parameters, with `max_version_lag`."""
CLOSE_SECONDS = 0.5
"""Seconds that an actor may take to send its last rows to a memory that outlives the run."""
IMPORT_FAILED = 1
"""Exit code of a process that raised before its main function, which sends every error."""
MEMORY_LOST = (innet.errors.ExpiredError, innet.errors.UnknownTableError, innet.errors.ForbiddenError)
"""Errors of actors whose server was started again without their writers. The learner makes the table again, which the
token of actors may not allow."""


@dataclass(frozen=True)
class ActorAssignment:
    """Arguments of an actor's process."""

    config: Config
    index: int
    address: str
    """Address of the replay memory."""
    name: str
    """Name of the table and the parameters."""
    first_step: int
    """Agent steps of all actors in earlier sessions."""
    token: str = field(repr=False)
    """Token of the replay memory, empty for none. The environment of the fork server is older than the run's."""


def run_actor(assignment: ActorAssignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of an actor's process."""
    playing = threading.Event()
    try:
        prepare_to_play()
        envs = environments.make(
            assignment.config, assignment.config.environments, threads=assignment.config.environment_threads
        )
        try:
            _play(assignment, envs, pipe, playing)
        finally:
            # What ended the play is the failure to report; environments that failed may fail again.
            with contextlib.suppress(Exception):
                envs.close()
    except (Stopped, BrokenPipeError):
        pass
    except TrainingError as error:
        pipe.send(ProcessFailure(error.with_flags, fatal=True))
    except innet.ReplayError as error:
        pipe.send(
            ProcessFailure(str(error), fatal=isinstance(error, ValueError), by_memory=isinstance(error, MEMORY_LOST))
        )
    except Exception as error:
        # A replacement would meet the same before its first step.
        pipe.send(ProcessFailure.unforeseen(error, fatal=not playing.is_set()))
    finally:
        pipe.close()


def _play(
    assignment: ActorAssignment,
    envs: environments.Environments,
    pipe: multiprocessing.connection.Connection,
    playing: threading.Event,
) -> None:
    config = assignment.config
    torch.set_num_threads(config.actor_threads)
    network = make_network(config, envs.spec)
    settings = memory_settings(
        config,
        envs.spec,
        assignment.name,
        published(network, 0),
        address=assignment.address,
        token=assignment.token,
    )
    with memory_class(config.replay).join(settings) as memory:
        writer = memory.writer(assignment.index)
        actor = Actor(config, assignment.index, envs, network, writer, first_step=assignment.first_step)
        reported = time.monotonic()
        vector_steps = 0
        try:
            while True:
                if vector_steps % config.pull_period == 0:
                    actor.pull(memory)
                actor.step()
                playing.set()
                vector_steps += 1
                if vector_steps % config.chunk_steps == 0:
                    # Chunks are full. Waiting for them keeps the actor from playing ahead of the replay ratio with
                    # old parameters, by as many pushes as the writer would hold in flight.
                    _flush(actor, writer, memory, config)
                    actor.stopwatch.lap("write")
                if time.monotonic() - reported >= REPORT_SECONDS:
                    pipe.send(actor.report())
                    reported = time.monotonic()
        except Stopped:
            if config.replay != "embedded":
                # The replay ratio may not admit the rows, now that no learner samples.
                with contextlib.suppress(innet.ReplayError):
                    actor.close(CLOSE_SECONDS)


def _flush(actor: Actor, writer: RowWriter, memory: ReplayMemory, config: Config) -> None:
    """Waits until the rows are stored; they may wait for newer parameters."""
    if not config.max_version_lag:
        writer.flush(timeout=None)
        return
    while True:
        actor.pull(memory)
        try:
            writer.flush(timeout=PULL_SECONDS)
        except innet.errors.DeadlineError:
            continue
        return


class Actors:
    """The actor processes of a run. Use it as a context manager.

    Args:
        config: The run's settings.
        address: Address of the replay memory.
        name: Name of the table and the parameters.
        first_step: Agent steps of earlier sessions.
    """

    def __init__(self, config: Config, address: str, name: str, first_step: int) -> None:
        self._assignments = [
            ActorAssignment(config, index, address, name, first_step, actor_token(config))
            for index in range(config.actors)
        ]
        self._restarts_left = config.actor_restarts
        self._failures = 0
        self._shown: set[str] = set()
        self._processes: dict[int, Any] = {}
        self._pipes: dict[multiprocessing.connection.Connection, int] = {}

    def __enter__(self) -> Self:
        try:
            for assignment in self._assignments:
                self._start(assignment)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def begin_end(self) -> None:
        """Asks every actor to end, without waiting: leaving the context waits."""
        for process in self._processes.values():
            process.terminate()

    def _stop(self) -> None:
        self.begin_end()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            await_end(process, max(0.0, deadline - time.monotonic()))
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports received since the last call, without waiting. Replaces actors that died.

        Args:
            agent_steps: Steps of the run until now: a replacement continues the exploration schedule from there.

        Raises:
            ActorError: No restart is left, or a replacement would fail in the same way.
        """
        reports: list[ActorReport] = []
        for pipe, index in list(self._pipes.items()):
            # Environments that are forks of the actor hold its end of the pipe, too.
            failure, ended = None, not self._processes[index].is_alive()
            try:
                while failure is None and pipe.poll():
                    message = pipe.recv()
                    if isinstance(message, ProcessFailure):
                        failure, ended = message, True
                    else:
                        reports.append(message)
            except EOFError:
                ended = True
            if ended:
                self._replace(pipe, failure, agent_steps)
        return reports

    def _start(self, assignment: ActorAssignment) -> None:
        start_fork_server()
        process, pipe = start(run_actor, f"actor {assignment.index}", assignment, duplex=False)
        self._processes[assignment.index] = process
        self._pipes[pipe] = assignment.index

    def _replace(
        self, pipe: multiprocessing.connection.Connection, failure: ProcessFailure | None, agent_steps: int
    ) -> None:
        index = self._pipes.pop(pipe)
        pipe.close()
        process = self._processes.pop(index)
        await_end(process, STOP_SECONDS)
        if failure is None and process.exitcode == IMPORT_FAILED:
            reason = f"its process ended before it began, and printed why: {MAIN_GUARD}"
            failure = ProcessFailure(reason, fatal=True)
        if failure is None:
            failure = ProcessFailure(f"it ended with exit code {process.exitcode}", fatal=False)
        process.close()
        # A traceback is shown once; further failures of the same kind are one line each.
        reason = failure.message if failure.kind in self._shown else str(failure)
        self._shown.add(failure.kind)
        if failure.fatal:
            raise ActorError(f"actor {index} cannot play: {reason}")
        self._failures += not failure.by_memory
        if self._restarts_left == 0 and not failure.by_memory:
            count = f" after {self._failures} failures of actors" if self._failures > 1 else ""
            raise ActorError(f"actor {index} failed, and no restart is left{count}: {reason}")
        self._restarts_left -= not failure.by_memory
        left = self._restarts_left
        logger.error("actor %d failed and is replaced (%d restarts left): %s", index, left, WithFlags(reason))
        self._start(replace(self._assignments[index], first_step=agent_steps))
