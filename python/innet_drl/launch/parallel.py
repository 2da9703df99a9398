"""The loop of the first learner, with actors in processes of their own.

By default its process holds the memory and serves it to actors and the other learners, on a Unix socket or the
launcher's address; with `--replay` all of them connect to a server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator

import innet_drl as innet
from innet_drl.launch.actors import Actors
from innet_drl.launch.evaluator import Evaluator
from innet_drl.launch.launcher import Launcher, LocalLauncher
from innet_drl.launch.learners import Learners
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.errors import ProcessError, ReplayMemoryError, resuming
from innet_drl.train.learn.data_parallel import TrainingEnded
from innet_drl.train.learn.targets import TargetsAhead
from innet_drl.train.memory import ReplayMemory, actor_token, memory_class
from innet_drl.train.observe.stopwatch import TimedBatches
from innet_drl.train.runs.trainer import Trainer

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.25
"""Timeout of a batch, and the period at which the first learner checks its actors."""


def train(trainer: Trainer, launchers: Callable[[], Launcher] | None) -> None:
    """Trains with actors in processes of their own until the trainer is finished, and writes a checkpoint."""
    config, settings = trainer.config, trainer.memory_settings()
    launcher = None if launchers is None else launchers()
    embedded = config.replay == "embedded"
    if embedded and launcher is not None and launcher.listen is not None:
        settings = dataclasses.replace(settings, address=launcher.listen, token=secrets.token_hex(16))
    trainer.session.display.say("starting the memory" + ("" if launcher is None else f" and {config.actors} actors"))
    with (
        memory_class(config.replay).create(settings) as memory,
        contextlib.ExitStack() as running,
    ):
        trainer.restore_memory(memory)
        trainer.preload(memory)
        trainer.stopwatch.lap("start")
        trainer.publish(memory)
        run = running.enter_context(memory.published_run())
        token = settings.token if embedded else actor_token(config)
        steps, name = trainer.totals.agent_steps, trainer.name
        actors = running.enter_context(Actors(config, run, steps, launcher, memory.address, name, token))
        device = str(trainer.learner.device)
        batches = running.enter_context(memory.batches(device, WAIT_SECONDS, config.actor_patience))
        if trainer.learner.targets_ahead:
            batches = ahead = running.enter_context(TargetsAhead(trainer.learner, batches))
            trainer.reporter.threads["targets"] = ahead.stopwatch
        if config.evaluation_period:
            evaluator = Evaluator(config, trainer.spec, (launchers or LocalLauncher)())
            trainer.evaluations.evaluator = running.enter_context(evaluator)
        learners = None
        if config.learners > 1:
            has_ended = functools.partial(_has_ended, actors, trainer)
            learners = running.enter_context(_learners(trainer, memory.address, settings.token, has_ended))
        trainer.begin()
        with trainer.keeping(lambda: trainer.checkpoint(memory)):
            try:
                _learn(trainer, memory, actors, batches)
                # Actors end in parallel with the last line and the checkpoint.
                actors.end(finished=not trainer.session.interrupted)
                if learners is not None:
                    learners.end()
                trainer.reporter.report_rest(memory)
            except (innet.ReplayError, ProcessError, ReplayMemoryError) as error:
                if trainer.totals.agent_steps > 0 or trainer.learner.updates > 0:
                    trainer.checkpoint(memory)
                    folder = trainer.session.folder.path
                    logger.error("a checkpoint has all updates: continue with %s", resuming(folder))
                if learners is not None and isinstance(error, innet.errors.GradientError):
                    raise learners.explain(error) from error
                raise
            trainer.checkpoint(memory)


def _learn(trainer: Trainer, memory: ReplayMemory, actors: Actors, batches: Iterator[TorchBatch]) -> None:
    pending = incarnation = None
    timed = TimedBatches(batches, trainer.stopwatch)
    checked = time.monotonic()
    while not trainer.finished:
        try:
            batch = next(timed)
            # The assignment freed the arrays of the previous batch.
            trainer.stopwatch.lap("free")
        except innet.errors.NoWritersError:
            raise
        except innet.errors.DeadlineError as error:
            trainer.session.say(str(error).removeprefix("the deadline passed: "))
            batch = None
        if batch is not None:
            trainer.session.note = "learning"
            try:
                update = trainer.learner.update(batch)
            except TrainingEnded:
                break
            trainer.stopwatch.lap("other")
            # Priorities are written one update later, so that the learner does not wait for the GPU.
            if pending is not None:
                ids, earlier = pending
                trainer.session.ask(functools.partial(memory.update_priorities, ids, trainer.priorities(earlier)))
            pending = (batch.ids, update)
            trainer.stopwatch.lap("priorities")
            trainer.publish_if_due(memory)
            trainer.evaluate_if_due()
        if trainer.session.interrupted:
            # The caller writes the last line of metrics while the actors end.
            break
        now = time.monotonic()
        if now - checked >= WAIT_SECONDS or batch is None:
            checked = now
            _check_actors(actors, trainer)
            trainer.evaluations.take()
            trainer.stopwatch.lap("other")
            if trainer.reporter.due_by_time:
                trainer.reporter.report(memory)
                if memory.incarnation != incarnation:
                    if incarnation is not None:
                        restored = memory.restored_steps
                        kept = (
                            f"it restored {restored:,} steps from its snapshot" if restored else "its memory was empty"
                        )
                        logger.warning("the server of the replay memory was started again: %s", kept)
                        trainer.publish(memory)
                    incarnation = memory.incarnation
            if trainer.checkpoint_due:
                trainer.periodic_checkpoint(lambda: trainer.checkpoint(memory))
        trainer.stopwatch.lap("other")


def _check_actors(actors: Actors, trainer: Trainer) -> None:
    # The signal that interrupts the run may also have ended actors, which must not be replaced.
    if trainer.session.interrupted:
        return
    try:
        reports = actors.reports(trainer.totals.agent_steps)
    except ProcessError:
        if not trainer.session.interrupted:
            raise
        return
    for report in reports:
        trainer.reporter.add_report(report)


def _has_ended(actors: Actors, trainer: Trainer) -> bool:
    """Looks after the actors while the other learners are waited for, which may themselves wait for steps."""
    trainer.session.say("waiting for the gradients of the other learners")
    _check_actors(actors, trainer)
    return trainer.session.interrupted


@contextlib.contextmanager
def _learners(trainer: Trainer, memory: str, token: str, has_ended: Callable[[], bool]) -> Iterator[Learners]:
    """Starts the other learners, and serves an aggregator for gradients unless the settings name one."""
    config = trainer.config
    checkpoint = None if trainer.resumed is None else trainer.resumed.path
    with contextlib.ExitStack() as stack:
        server = config.gradients
        if server == "embedded":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="innet-"))
            server = f"unix://{directory}/gradients"
            empty = stack.enter_context(innet.Memory([]))
            stack.enter_context(empty.serve(server, gradients="127.0.0.1:0"))
        learners = Learners(config, trainer.learner, memory, trainer.name, server, checkpoint, token, has_ended)
        yield stack.enter_context(learners)
