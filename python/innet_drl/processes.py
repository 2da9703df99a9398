"""Actors as processes: what runs in one, and how the learner starts, hears and replaces them.

A child tells the learner what it did over a pipe of its own, so that one that dies takes no lock with it. It
ends on SIGTERM, and when the learner's process is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
import traceback
from dataclasses import dataclass, field
from multiprocessing import forkserver
from types import FrameType, TracebackType
from typing import Any, Self

from loguru import logger

import innet_drl as innet
from innet_drl.config import Config
from innet_drl.faults import ActorError, TrainingError
from innet_drl.metrics import ActorReport

REPORT_SECONDS = 0.5
STOP_SECONDS = 10.0
"""How long an actor may take to end before it is killed."""

_forking = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Failure:
    """The last word of an actor that failed."""

    message: str
    fatal: bool
    """Another actor would fail in the same way."""


@dataclass(frozen=True)
class Assignment:
    """What an actor's process is told."""

    config: Config
    index: int
    address: str
    """Of the replay memory."""
    name: str
    """Of the table and the parameters."""
    first_step: int
    """Agent steps of all actors in earlier sessions."""
    token: str | None = field(default_factory=lambda: os.environ.get("INNET_TOKEN"), repr=False)
    """Of the replay memory; the process that actors are forked from has the environment of its start."""


class _Stopped(BaseException):
    """SIGTERM came: raised wherever the actor is, a blocked call included."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def prepare() -> None:
    """Starts the process that actors are forked from: it imports torch meanwhile, once for all of them.

    They are not forked from this one, whose threads and locks they would inherit in unknown states.
    """
    _forking.set_forkserver_preload(["innet_drl.actor", "innet_drl.processes"])
    forkserver.ensure_running()


def run_actor(assignment: Assignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of an actor's process."""
    # Ctrl-C reaches every process of the terminal; the learner is the one to end the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _stop)
    logger.remove()
    # The page is the learner's. What the core has to say here, it also says with the errors of its calls.
    logging.getLogger("innet_drl").addHandler(logging.NullHandler())
    logging.getLogger("innet_drl").propagate = False
    _end_with_parent()
    try:
        _play(assignment, pipe)
    except (_Stopped, BrokenPipeError):
        pass
    except TrainingError as error:
        pipe.send(Failure(str(error), fatal=True))
    except innet.ReplayError as error:
        pipe.send(Failure(str(error), fatal=False))
    except Exception:
        pipe.send(Failure(traceback.format_exc(), fatal=False))
    finally:
        pipe.close()


def _play(assignment: Assignment, pipe: multiprocessing.connection.Connection) -> None:
    import torch

    from innet_drl import environments
    from innet_drl.actor import Actor, open_writer
    from innet_drl.networks import make_network

    config, name = assignment.config, assignment.name
    torch.set_num_threads(config.actor_threads)
    arena = environments.make(config, config.environments, threads=config.environment_threads)
    with innet.connect(assignment.address, token=assignment.token, tls_ca=config.replay_ca) as replay:
        writer = open_writer(replay, config, arena.spec, name, assignment.index)
        actor = Actor(
            config,
            assignment.index,
            arena,
            make_network(config, arena.spec),
            writer,
            first_step=assignment.first_step,
        )
        reported = time.monotonic()
        vector_steps = 0
        while True:
            if vector_steps % config.pull_period == 0:
                actor.pull(replay, name)
            actor.step()
            vector_steps += 1
            if vector_steps % config.chunk_steps == 0:
                # Chunks are full. Waiting for them here keeps the actor from playing ahead of the replay
                # ratio with old parameters, by as many pushes as the writer would hold under way.
                writer.flush()
                actor.stopwatch.lap("write")
            if time.monotonic() - reported >= REPORT_SECONDS:
                pipe.send(actor.report())
                reported = time.monotonic()


def _end_with_parent() -> None:
    """Ends this process when the learner's is gone, even while a call is blocked."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


class Actors:
    """The actor processes of a run. Use it as a context manager.

    Args:
        config: The run's settings.
        address: Of the replay memory.
        name: Of the table and the parameters.
        first_step: Agent steps of earlier sessions.
    """

    def __init__(self, config: Config, address: str, name: str, first_step: int) -> None:
        self._assignments = [Assignment(config, index, address, name, first_step) for index in range(config.actors)]
        self._restarts_left = config.actor_restarts
        self._processes: dict[int, Any] = {}
        self._pipes: dict[multiprocessing.connection.Connection, int] = {}

    def __enter__(self) -> Self:
        for assignment in self._assignments:
            self._start(assignment)
        return self

    def __exit__(
        self,
        exception_type: type[BaseException] | None,
        exception: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            _await_end(process, max(0.0, deadline - time.monotonic()))
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def reports(self) -> list[ActorReport]:
        """The reports that came since the last call, without waiting. Replaces actors that died.

        Raises:
            ActorError: More of them died than are replaced, or the next would die in the same way.
        """
        reports: list[ActorReport] = []
        for pipe in multiprocessing.connection.wait(list(self._pipes), timeout=0):
            assert isinstance(pipe, multiprocessing.connection.Connection)
            try:
                while pipe.poll():
                    message = pipe.recv()
                    if isinstance(message, Failure):
                        self._replace(pipe, message)
                        break
                    reports.append(message)
            except EOFError:
                self._replace(pipe, None)
        return reports

    def _start(self, assignment: Assignment) -> None:
        ours, theirs = _forking.Pipe(duplex=False)
        process = _forking.Process(
            target=run_actor, args=(assignment, theirs), name=f"actor-{assignment.index}", daemon=True
        )
        process.start()
        # With our copy closed, the end of the process is the end of the pipe.
        theirs.close()
        self._processes[assignment.index] = process
        self._pipes[ours] = assignment.index

    def _replace(self, pipe: multiprocessing.connection.Connection, failure: Failure | None) -> None:
        index = self._pipes.pop(pipe)
        pipe.close()
        process = self._processes.pop(index)
        _await_end(process, STOP_SECONDS)
        reason = failure.message if failure else f"it ended with exit code {process.exitcode}"
        process.close()
        if failure is not None and failure.fatal:
            raise ActorError(reason)
        if self._restarts_left == 0:
            raise ActorError(f"actor {index} failed, and no restart is left: {reason}")
        self._restarts_left -= 1
        logger.error(f"actor {index} failed and is replaced ({self._restarts_left} restarts left): {reason}")
        self._start(self._assignments[index])


def _await_end(process: Any, seconds: float) -> None:
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
