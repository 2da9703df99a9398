"""The loop of an actor's process, whether a launcher or the user started it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

import innet_drl as innet
from innet_drl.launch.processes import LeavesRun, Stopped
from innet_drl.train.actor import Actor
from innet_drl.train.config import Config
from innet_drl.train.environments import Environments
from innet_drl.train.memory import ReplayMemory, RowWriter, memory_class, memory_settings
from innet_drl.train.metrics import ActorReport
from innet_drl.train.networks import make_network, published
from innet_drl.train.stopwatch import MEMORY, Stopwatch

REPORT_SECONDS = 0.5
CLOSE_SECONDS = 0.5
"""Seconds that an actor may take to send its last rows to a memory that outlives the run."""
MEMORY_LOST = (innet.errors.ExpiredError, innet.errors.UnknownTableError, innet.errors.ForbiddenError)
"""Errors after a restart of the server without the writers. The learner recreates the table, for which an actor's
token may lack the permission."""


class Run(Protocol):
    """The interface of a run to the loop of its actor."""

    def begin(self, actor: Actor, memory: ReplayMemory) -> None:
        """Called once, before the first step."""

    def flush(self, writer: RowWriter, fetch: Callable[[], object] | None) -> None:
        """Waits until the memory has taken all rows.

        They may wait for newer parameters (`max_version_lag`): `fetch` gets them, and is `None` without that limit.
        """

    def report(self, report: ActorReport) -> None:
        """Takes the actor's report, every `REPORT_SECONDS`."""


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
    """Agent steps of all actors until now."""
    attempt: int = field(default=0, kw_only=True)
    """Number of earlier processes of this actor, which changes the seeds."""
    token: str = field(repr=False)
    """Token of the replay memory; empty for none. Not from the environment, as the fork server's may be outdated."""


def play(
    assignment: ActorAssignment, envs: Environments, run: Run, playing: Callable[[], object] = lambda: None
) -> None:
    """Plays until `run` raises `LeavesRun`, a signal `Stopped`, or the memory an error; `playing` follows each step."""
    config, index = assignment.config, assignment.index
    stopwatch = Stopwatch()
    torch.set_num_threads(config.actor_threads)
    network = make_network(config, envs.spec)
    parameters, address, token = published(network, 0), assignment.address, assignment.token
    settings = memory_settings(config, envs.spec, assignment.name, parameters, address=address, token=token)
    with memory_class(config.replay).join(settings) as memory:
        writer = memory.writer(index)
        begin = {"first_step": assignment.first_step, "attempt": assignment.attempt}
        actor = Actor(config, index, envs, network, writer, **begin, stopwatch=stopwatch)

        def fetch() -> None:
            stopwatch.lap(MEMORY)
            actor.pull(memory)

        stopwatch.lap("start")
        run.begin(actor, memory)
        stopwatch.lap("start")
        reported = time.monotonic()
        vector_steps = 0
        try:
            while True:
                if vector_steps % config.pull_period == 0:
                    actor.pull(memory)
                actor.step()
                playing()
                vector_steps += 1
                if vector_steps % config.chunk_steps == 0:
                    # Chunks are full. Waiting for their acknowledgement keeps the actor from playing ahead of the
                    # replay ratio with old parameters, by the writer's pushes in flight.
                    run.flush(writer, fetch if config.max_version_lag else None)
                    stopwatch.lap(MEMORY)
                if time.monotonic() - reported >= REPORT_SECONDS:
                    run.report(actor.report())
                    reported = time.monotonic()
                    stopwatch.lap("report")
        except (Stopped, LeavesRun):
            if config.replay != "embedded":
                # Without a sampling learner the replay ratio may block the rows.
                with contextlib.suppress(innet.ReplayError):
                    writer.close(CLOSE_SECONDS)
            raise
