"""The loop of an actor's process, whether a launcher or the user started it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

import innet_drl as innet
from innet_drl.launch.launcher import LeavesRun, Stopped, watchdog
from innet_drl.train.environments import Environments
from innet_drl.train.memory import ReplayMemory, memory_class, memory_settings
from innet_drl.train.networks import make_network, published
from innet_drl.train.observe.stopwatch import MEMORY, Stopwatch
from innet_drl.train.play.actor import Actor
from innet_drl.train.settings.slices import ActorSettings

logger = logging.getLogger(__name__)

REPORT_SECONDS = 0.5
CALL_SECONDS = 1.0
"""Timeout of a call that waits for the learner; then the actor looks after its run."""
SILENT_SECONDS = 5.0
"""Seconds of a wait for the learner before the log names it, as for a server."""
CLOSE_SECONDS = 0.5
"""Seconds that an actor may take to send its last rows to a memory that outlives the run."""
MEMORY_LOST = (innet.errors.ExpiredError, innet.errors.UnknownTableError, innet.errors.ForbiddenError)
"""Errors after a restart of the server without the writers. The learner recreates the table, for which an actor's
token may lack the permission."""

Look = Callable[[ReplayMemory], object]
"""Looks after the run: called before the first step, with each report and during waits; may raise `LeavesRun`."""


@dataclass(frozen=True)
class ActorAssignment:
    """Arguments of an actor's process."""

    config: ActorSettings
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
    assignment: ActorAssignment,
    envs: Environments,
    look: Look = lambda _: None,
    playing: Callable[[], object] = lambda: None,
) -> None:
    """Plays until `look` raises `LeavesRun`, a signal `Stopped`, or the memory an error; calls `playing` each step."""
    config, index, name = assignment.config, assignment.index, assignment.name
    stopwatch = Stopwatch()
    torch.set_num_threads(config.actor_threads)
    network = make_network(config, envs.spec)
    parameters, address, token = published(network, 0), assignment.address, assignment.token
    settings = memory_settings(config, envs.spec, name, parameters, address=address, token=token)
    with memory_class(config.replay).join(settings) as memory:
        writer = memory.writer(index)
        actor = Actor(
            config,
            index,
            envs,
            network,
            writer,
            first_step=assignment.first_step,
            attempt=assignment.attempt,
            stopwatch=stopwatch,
            watchdog=watchdog(config.environment_timeout),
        )

        def flush() -> None:
            """Waits until the memory has taken all rows: for the replay ratio, that is the learner, and the server."""
            started, said = time.monotonic(), False
            while True:
                if config.max_version_lag:
                    # The rows may wait for newer parameters.
                    stopwatch.lap(MEMORY)
                    actor.pull(memory)
                try:
                    writer.flush(timeout=CALL_SECONDS)
                except innet.errors.DeadlineError as error:
                    if not said and time.monotonic() - started >= SILENT_SECONDS:
                        reason = str(error).removeprefix("the deadline passed: ")
                        logger.info("waiting for the learner of run %s: %s", name, reason)
                        said = True
                    look(memory)
                else:
                    if said:
                        logger.info("actor %d continues", index)
                    stopwatch.lap(MEMORY)
                    return

        stopwatch.lap("start")
        look(memory)
        _await_parameters(actor, memory, name, look)
        epsilon = actor.final_epsilon
        explores = f"{len(epsilon)} environments that explore with {epsilon[0]:.3g} to {epsilon[-1]:.3g}"
        logger.info("actor %d plays for run %s at %s, with %s", index, name, address, explores)
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
                    flush()
                if time.monotonic() - reported >= REPORT_SECONDS:
                    # Without the server, the report is sent with the next one, and the next flush logs the wait.
                    with contextlib.suppress(innet.errors.DeadlineError):
                        memory.write_report(actor.report(), CALL_SECONDS)
                        look(memory)
                    reported = time.monotonic()
                    stopwatch.lap("report")
        except (Stopped, LeavesRun):
            if config.replay != "embedded":
                # Without a sampling learner the replay ratio may block the rows.
                with contextlib.suppress(innet.ReplayError):
                    writer.close(CLOSE_SECONDS)
            raise


def _await_parameters(actor: Actor, memory: ReplayMemory, name: str, look: Look) -> None:
    """Waits for the learner's parameters."""
    said = False
    while not actor.pull(memory):
        if not said:
            logger.info("waiting for the learner of run %s: it has published no parameters", name)
            said = True
        time.sleep(CALL_SECONDS)
        look(memory)
