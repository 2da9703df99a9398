"""Training on this machine: makes or reopens the run's folder, and starts memory, actors and learners.

By default the first learner's process holds the memory and serves it on a Unix socket, and actors and the other
learners connect to it; with `--replay` all of them connect to a server.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cloudpickle
import torch

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.launch.actors import Actors
from innet_drl.launch.evaluator import Evaluator
from innet_drl.launch.learners import Learners, check_aggregator
from innet_drl.launch.processes import forbid_in_children, start_fork_server
from innet_drl.train import serial
from innet_drl.train.callbacks import Callback, Result
from innet_drl.train.config import Config, flag
from innet_drl.train.display import Display
from innet_drl.train.errors import ConfigurationError, ProcessError, RelayError
from innet_drl.train.memory import ReplayMemory, actor_token, memory_class, memory_token
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.targets import TargetsAhead
from innet_drl.train.trainer import Trainer

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.25
"""Timeout of a batch, and the period at which the first learner checks its actors."""


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    unused: bool = False,
    callbacks: Sequence[Callback] = (),
    display: Callable[[str], Display] = Display,
    signals: bool = False,
) -> Result:
    """Trains, evaluates, records a video, and writes everything to the run's folder.

    Args:
        config: The settings; a resumed run takes its own, with any changes.
        out: The run's folder: a new one, or with `resume` an existing one.
        resume: Continue from the folder's newest checkpoint.
        unused: Where there is a folder `out` already, make `<out>-2`, `<out>-3`, ...
        callbacks: Called on the way; they may end training.
        display: Makes what shows the metrics, from a title.
        signals: End training with a checkpoint at SIGINT and SIGTERM, if this is the main thread.

    Raises:
        TrainingError: A problem that the user can solve.
        innet_drl.ReplayError: The replay memory cannot be made or reached, or failed.
    """
    forbid_in_children()
    folder = RunFolder.open(out) if resume else RunFolder.unused(out) if unused else RunFolder.new(out)
    with folder.hold(), _torch_as_before():
        return _train(config, folder, callbacks, display, resume=resume, signals=signals)


@contextlib.contextmanager
def _torch_as_before() -> Iterator[None]:
    """Gives the caller its threads and random numbers of torch back, which a run sets."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _train(
    config: Config,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    display: Callable[[str], Display],
    *,
    resume: bool,
    signals: bool,
) -> Result:
    out = folder.path
    resumed = folder.latest_checkpoint() if resume else None
    if config.replay_ca is not None and not config.replay_ca.is_file():
        raise ConfigurationError(f"--replay-ca {config.replay_ca}: there is no such file")
    if resumed is not None and config.steps is not None and config.steps <= resumed.state["meter"]["agent_steps"]:
        raise ConfigurationError(
            f"{out} has taken its {config.steps:,} steps: go on with more of them, --resume {out} --steps N"
        )
    if config.learners > 1 and not memory_class(config.replay).learners_join:
        raise ConfigurationError(f"--learners {config.learners}: it must be 1 with --replay {config.replay}")
    if not config.serial:
        _check_pickles(config)
        start_fork_server()
    title = f"{config.environment_name} in {out}"
    with display(title) as shown:
        if not config.serial and config.replay != "embedded":
            # Before the trainer measures arithmetic, which takes seconds.
            shown.say(f"connecting to the replay memory at {config.replay}")
            for token in dict.fromkeys([memory_token(config), actor_token(config)]):
                memory_class(config.replay).check(config.replay, token, config.replay_ca)
        if config.learners > 1 and config.gradients != "embedded":
            shown.say(f"connecting to the aggregator at {config.gradients}")
            check_aggregator(config)
        trainer = None
        try:
            with Trainer(config, folder, shown, resumed, callbacks, signals=signals) as trainer:
                if config.serial:
                    serial.train(trainer)
                else:
                    train_parallel(trainer)
                return trainer.finish()
        except BaseException:
            if trainer is not None and trainer.learner.updates == 0:
                folder.discard()
            raise


def _check_pickles(config: Config) -> None:
    """Functions, classes and arguments of the settings reach other processes by pickle."""
    for field in dataclasses.fields(config):
        try:
            cloudpickle.dumps(getattr(config, field.name))
        except Exception as error:
            raise ConfigurationError(
                f"{flag(field.name)}: it cannot be pickled for the processes of the actors ({error}): make what "
                "it holds inside of the function, name it as module:name, or train in one process (serial=True)"
            ) from error


def train_parallel(trainer: Trainer) -> None:
    """Trains with actors in processes of their own until the trainer is finished, and leaves a checkpoint."""
    config = trainer.config
    trainer.display.say(f"starting the memory and {config.actors} actors")
    with (
        memory_class(config.replay).create(trainer.memory_settings()) as memory,
        contextlib.ExitStack() as running,
    ):
        trainer.restore_memory(memory)
        trainer.publish(memory)
        actors = running.enter_context(Actors(config, memory.address, trainer.name, trainer.meter.agent_steps))
        batches = running.enter_context(memory.batches(str(trainer.learner.device), timeout=WAIT_SECONDS))
        if trainer.learner.targets_ahead:
            batches = running.enter_context(TargetsAhead(trainer.learner, batches))
        if config.evaluation_period:
            trainer.evaluations.evaluator = running.enter_context(Evaluator(config, trainer.spec))
        learners = running.enter_context(_learners(trainer, memory.address)) if config.learners > 1 else None
        trainer.begin()
        try:
            _learn(trainer, memory, actors, batches)
            # Actors end while the last line and the checkpoint are written.
            actors.begin_end()
            if learners is not None:
                learners.end()
            trainer.report_rest(memory)
        except (innet.ReplayError, ProcessError, RelayError) as error:
            if trainer.meter.agent_steps > 0 or trainer.learner.updates > 0:
                trainer.checkpoint(memory=memory)
                logger.error("what was learned is kept: go on with --resume %s", trainer.folder.path)
            if learners is not None and isinstance(error, innet.errors.GradientError):
                raise learners.explain(error) from error
            raise
        trainer.checkpoint(memory=memory)


def _learn(trainer: Trainer, memory: ReplayMemory, actors: Actors, batches: Iterator[TorchBatch]) -> None:
    pending = incarnation = None
    checked = time.monotonic()
    while not trainer.finished:
        try:
            batch = next(batches)
        except innet.errors.DeadlineError as error:
            trainer.say(str(error).removeprefix("the deadline passed: "))
            batch = None
        trainer.stopwatch.lap("wait for a batch")
        if batch is not None:
            trainer.note = "learning"
            update = trainer.learn(batch)
            # Priorities are written one update late, so that the learner does not wait for a GPU to compute them.
            if pending is not None:
                ids, earlier = pending
                trainer.ask(functools.partial(memory.update_priorities, ids, trainer.priorities(earlier)))
            pending = (batch.ids, update)
            trainer.stopwatch.lap("priorities")
            trainer.publish_if_due(memory)
            trainer.evaluate_if_due()
        trainer.evaluations.take()
        if trainer.interrupted:
            # The last line of metrics is written while the actors end.
            break
        now = time.monotonic()
        if now - checked >= WAIT_SECONDS or batch is None:
            checked = now
            _check_actors(actors, trainer)
            if trainer.report_due_by_time:
                trainer.report(memory)
                if memory.incarnation != incarnation:
                    if incarnation is not None:
                        logger.warning("the server of the replay memory was started again: its memory was empty")
                        trainer.publish(memory)
                    incarnation = memory.incarnation
            if trainer.checkpoint_due:
                trainer.periodic_checkpoint(lambda: trainer.checkpoint(memory=memory))


def _check_actors(actors: Actors, trainer: Trainer) -> None:
    # The signal that interrupts the run may have ended actors too: they must not be replaced.
    if trainer.interrupted:
        return
    try:
        reports = actors.reports(trainer.meter.agent_steps)
    except ProcessError:
        if not trainer.interrupted:
            raise
        return
    for report in reports:
        trainer.meter.add_report(report)


@contextlib.contextmanager
def _learners(trainer: Trainer, memory: str) -> Iterator[Learners]:
    """The other learners; serves an aggregator for their gradients unless the settings name one."""
    config = trainer.config
    checkpoint = None if trainer.resumed is None else trainer.resumed.path
    with contextlib.ExitStack() as stack:
        server = config.gradients
        if server == "embedded":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="innet-"))
            server = f"unix://{directory}/gradients"
            empty = stack.enter_context(innet.Memory([]))
            stack.enter_context(empty.serve(server, gradients="127.0.0.1:0"))
        yield stack.enter_context(Learners(config, trainer.learner, memory, trainer.name, server, checkpoint))
