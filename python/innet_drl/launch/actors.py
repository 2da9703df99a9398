"""Actors as processes: what runs in one, and how the learner starts, hears and replaces them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from loguru import logger

import innet_drl as innet
from innet_drl.launch.processes import ENDING, Failure, await_end, end_with_parent, forking, prepare
from innet_drl.train.config import Config
from innet_drl.train.errors import ActorError, TrainingError
from innet_drl.train.metrics import ActorReport

if TYPE_CHECKING:
    from innet_drl.train.actor import ParameterSource, RowWriter
    from innet_drl.train.environments import Spec
    from innet_drl.train.networks import QNetwork

REPORT_SECONDS = 0.5
STOP_SECONDS = 10.0
"""How long an actor may take to end before it is killed."""
CLOSE_SECONDS = 1.0
"""How long it may take to hand over what it played last to a server that stays."""


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
    token: str = field(repr=False)
    """Of the replay memory, empty for none. The process that actors are forked from has an older environment."""


class _Stopped(BaseException):
    """SIGTERM came: raised wherever the actor is, a blocked call included."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise _Stopped


def run_actor(assignment: Assignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of an actor's process."""
    # Ctrl-C reaches every process of the terminal; the learner is the one to end the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logger.remove()
    # The page is the learner's. What the core has to say here, it also says with the errors of its calls.
    logging.getLogger("innet_drl").addHandler(logging.NullHandler())
    logging.getLogger("innet_drl").propagate = False
    end_with_parent()
    try:
        signal.signal(signal.SIGTERM, _stop)
        # One that came since the start is raised here.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
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

    from innet_drl.train import environments
    from innet_drl.train.actor import Actor
    from innet_drl.train.networks import make_network

    config, name = assignment.config, assignment.name
    torch.set_num_threads(config.actor_threads)
    arena = environments.make(config, config.environments, threads=config.environment_threads)
    network = make_network(config, arena.spec)
    with _memory(assignment, arena.spec, network) as (replay, writer):
        actor = Actor(config, assignment.index, arena, network, writer, first_step=assignment.first_step)
        reported = time.monotonic()
        vector_steps = 0
        try:
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
        except _Stopped:
            if config.replay != "embedded":
                # The replay ratio may have no room for it, now that nobody draws.
                with contextlib.suppress(innet.ReplayError):
                    actor.close(CLOSE_SECONDS)


@contextlib.contextmanager
def _memory(assignment: Assignment, spec: Spec, network: QNetwork) -> Iterator[tuple[ParameterSource, RowWriter]]:
    """Where an actor's parameters come from and its rows go: a replay memory, or the baseline's Redis."""
    config, name = assignment.config, assignment.name
    if config.on_redis:
        from innet_drl.bench.messages import message_format
        from innet_drl.bench.redis_memory import RedisMemory, RedisWriter
        from innet_drl.train.learner import published

        shared = RedisMemory(assignment.address, name, assignment.token, published(network, 0))
        with contextlib.closing(shared):
            messages = message_format(config, spec, name)
            yield shared, RedisWriter(shared, messages, assignment.index, most_waiting=config.actors)
        return

    from innet_drl.train.actor import open_writer

    with innet.connect(assignment.address, token=assignment.token, tls_ca=config.replay_ca) as replay:
        yield replay, open_writer(replay, config, spec, name, assignment.index)


class Actors:
    """The actor processes of a run. Use it as a context manager.

    Args:
        config: The run's settings.
        address: Of the replay memory.
        name: Of the table and the parameters.
        first_step: Agent steps of earlier sessions.
    """

    def __init__(self, config: Config, address: str, name: str, first_step: int) -> None:
        token = "" if config.replay == "embedded" else os.environ.get("INNET_TOKEN", "").strip()
        self._assignments = [
            Assignment(config, index, address, name, first_step, token) for index in range(config.actors)
        ]
        self._restarts_left = config.actor_restarts
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

    def _stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            await_end(process, max(0.0, deadline - time.monotonic()))
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """The reports that came since the last call, without waiting. Replaces actors that died.

        Args:
            agent_steps: Of the run until now: exploration of a new actor goes on from there, with new games.

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
                        self._replace(pipe, message, agent_steps)
                        break
                    reports.append(message)
            except EOFError:
                self._replace(pipe, None, agent_steps)
        return reports

    def _start(self, assignment: Assignment) -> None:
        prepare()
        ours, theirs = forking.Pipe(duplex=False)
        process = forking.Process(
            target=run_actor, args=(assignment, theirs), name=f"actor-{assignment.index}", daemon=True
        )
        try:
            process.start()
        except (EOFError, OSError) as error:
            ours.close()
            theirs.close()
            raise ActorError(
                f"actor {assignment.index} cannot be started: the process that actors are forked from has ended "
                f"({type(error).__name__}); where it printed nothing, it was killed, perhaps for want of memory"
            ) from error
        # With our copy closed, the end of the process is the end of the pipe.
        theirs.close()
        self._processes[assignment.index] = process
        self._pipes[ours] = assignment.index

    def _replace(self, pipe: multiprocessing.connection.Connection, failure: Failure | None, agent_steps: int) -> None:
        index = self._pipes.pop(pipe)
        pipe.close()
        process = self._processes.pop(index)
        await_end(process, STOP_SECONDS)
        reason = failure.message if failure else f"it ended with exit code {process.exitcode}"
        process.close()
        if failure is not None and failure.fatal:
            raise ActorError(reason)
        if self._restarts_left == 0:
            raise ActorError(f"actor {index} failed, and no restart is left: {reason}")
        self._restarts_left -= 1
        logger.error(f"actor {index} failed and is replaced ({self._restarts_left} restarts left): {reason}")
        self._start(replace(self._assignments[index], first_step=agent_steps))
