"""Several learners: each draws batches of its own, and all apply the mean of their gradients, summed in the network.

The first learner is the run's process: it publishes, evaluates, writes and decides when training is over. The others
are processes that begin with the same weights, draw from the same memory and take the same updates; they stay equal
bit for bit, which is checked at the end. A learner that dies ends the run with a checkpoint.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import multiprocessing.connection
import os
import secrets
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from loguru import logger
from torch import Tensor, nn

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.launch.processes import ENDING, Failure, await_end, end_with_parent, forking
from innet_drl.train.config import Config
from innet_drl.train.environments import Spec
from innet_drl.train.errors import LearnerError, TrainingError
from innet_drl.train.learner import Learner, Numerics

WAIT_SECONDS = 0.5
"""How long a learner waits for a batch before it looks whether training is over."""
STOP_SECONDS = 10.0
"""How long a learner may take to end before it is killed."""
LAST_WORD_SECONDS = 2.0
"""How long is waited for what a missing learner has to say."""


@dataclass(frozen=True)
class Place:
    """Where the gradients of a run are summed."""

    address: str
    """Of the server, for `innet_drl.connect`."""
    job: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class Assignment:
    """What a learner's process is told."""

    config: Config
    spec: Spec
    number: int
    """Of this learner; the run's process is 0."""
    memory: str
    """Address of the replay memory."""
    name: str
    """Of the table."""
    place: Place
    numerics: Numerics
    threads: int
    checkpoint: Path | None
    """The run's checkpoint to begin with; `None` for fresh weights of the run's seed."""
    updates: int
    """Updates of earlier sessions."""
    token: str = field(repr=False)
    """Of the replay memory."""


@dataclass(frozen=True)
class Joined:
    """The first word of a learner: it has its place."""


@dataclass(frozen=True)
class Ended:
    """The last word of a learner whose training is over."""

    updates: int
    digest: bytes


class TrainingIsOver(Exception):  # noqa: N818 - no error
    """The first learner has ended training: the update under way is none."""


class SharedGradients:
    """The mean of all learners' gradients. One more value tells whether training is over.

    Args:
        worker: This learner's place in the job.
        network: Whose gradients they are.
    """

    def __init__(self, worker: innet.GradientWorker, network: nn.Module) -> None:
        self._worker = worker
        self._parameters = list(network.parameters())
        self._values = np.zeros(sum(parameter.numel() for parameter in self._parameters) + 1, np.float32)
        self._whole = torch.from_numpy(self._values)

    def mean(self) -> None:
        """Replaces every `grad` by its mean over all learners.

        Raises:
            TrainingIsOver: In place of it.
            innet_drl.errors.GradientError: A learner has gone; the message names it.
        """
        self._values[-1] = 0.0
        for parameter, part in self._parts():
            assert parameter.grad is not None
            # In the order of the shape, whatever the layout: learners may differ in that.
            part.copy_(parameter.grad)
        self._worker.sum(self._values, mean=True)
        if self._values[-1] > 0.0:
            raise TrainingIsOver
        for parameter, part in self._parts():
            assert parameter.grad is not None
            parameter.grad.copy_(part)

    def end(self) -> None:
        """Tells all learners that training is over: in place of a mean, which all of them lose."""
        self._values[:] = 0.0
        self._values[-1] = 1.0
        self._worker.sum(self._values, mean=True)

    def _parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        start = 0
        for parameter in self._parameters:
            yield parameter, self._whole[start : start + parameter.numel()].view(parameter.shape)
            start += parameter.numel()


class Learners:
    """The other learners' processes, and this process's place among them. Use it as a context manager.

    Args:
        config: The run's settings.
        learner: This process's.
        memory: Address of the replay memory, for the others.
        name: Of the table.
        server: Address of a server that sums gradients.
        checkpoint: The run's checkpoint to begin with.
    """

    def __init__(
        self, config: Config, learner: Learner, memory: str, name: str, server: str, checkpoint: Path | None
    ) -> None:
        token = os.environ.get("INNET_TOKEN", "").strip()
        job = f"{name[:40]}-{secrets.token_hex(4)}"
        place = Place(server, job, "" if config.gradients == "embedded" else token)
        self._learner = learner
        self._place = place
        self._config = config
        self._assignments = [
            Assignment(
                config,
                learner.spec,
                number,
                memory,
                name,
                place,
                learner.numerics,
                torch.get_num_threads(),
                checkpoint,
                learner.updates,
                "" if config.replay == "embedded" else token,
            )
            for number in range(1, config.learners)
        ]
        self._processes: list[Any] = []
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._stack = contextlib.ExitStack()
        self._ended = False

    def __enter__(self) -> Self:
        try:
            for assignment in self._assignments:
                self._start(assignment)
            worker = self._stack.enter_context(join(self._place, 0, self._config))
            for number, pipe in enumerate(self._pipes, 1):
                word = _next_word(pipe, self._config.learner_deadline)
                if not isinstance(word, Joined):
                    raise _failed(number, word)
            self._learner.gradients = SharedGradients(worker, self._learner.network)
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _start(self, assignment: Assignment) -> None:
        ours, theirs = forking.Pipe()
        process = forking.Process(
            target=run_learner, args=(assignment, theirs), name=f"learner-{assignment.number}", daemon=True
        )
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def _stop(self) -> None:
        self._learner.gradients = None
        self._stack.close()
        # One that was told that training is over ends by itself. Nothing of the others is worth waiting for.
        for process in self._processes:
            await_end(process, STOP_SECONDS if self._ended else 0.0)
            process.close()
        for pipe in self._pipes:
            pipe.close()

    def end(self) -> None:
        """Ends training in all learners with the same update, and compares their weights.

        Raises:
            LearnerError: One failed, or has other weights.
        """
        assert self._learner.gradients is not None
        for pipe in self._pipes:
            # Its learner may have ended: then the sum tells.
            with contextlib.suppress(OSError):
                pipe.send(None)
        try:
            self._learner.gradients.end()
        except innet.errors.GradientError as error:
            raise self.explained(error) from error
        self._ended = True
        ours = Ended(self._learner.updates, digest(self._learner.network))
        for number, pipe in enumerate(self._pipes, 1):
            theirs = _next_word(pipe, self._config.learner_deadline)
            if not isinstance(theirs, Ended):
                raise _failed(number, theirs)
            if theirs != ours:
                raise LearnerError(f"learner {number} ended with other weights than learner 0: {theirs}, not {ours}")
        logger.info(f"{len(self._pipes) + 1} learners ended with the same weights")

    def explained(self, error: innet.errors.GradientError) -> LearnerError:
        """What a failed sum was about: the last word of a learner that is missing, where it had one."""
        missing = error.missing if isinstance(error, innet.errors.MissingWorkerError) else ()
        for number, pipe in enumerate(self._pipes, 1):
            word = _next_word(pipe, LAST_WORD_SECONDS if number in missing else 0.0)
            if isinstance(word, Failure):
                return _failed(number, word)
        return LearnerError(f"the learners' gradients came to no sum: {error}")


def _next_word(pipe: multiprocessing.connection.Connection, seconds: float) -> Joined | Ended | Failure | None:
    try:
        word = pipe.recv() if pipe.poll(seconds) else None
    except (EOFError, OSError):
        return None
    assert word is None or isinstance(word, Joined | Ended | Failure)
    return word


def _failed(number: int, word: Joined | Ended | Failure | None) -> LearnerError:
    said = (
        word.message if isinstance(word, Failure) else "it ended without a word, or was too slow (--learner-deadline)"
    )
    return LearnerError(f"learner {number} failed: {said}")


@contextlib.contextmanager
def join(place: Place, number: int, config: Config) -> Iterator[innet.GradientWorker]:
    """A learner's place in the run's job."""
    with (
        innet.connect(place.address, token=place.token, tls_ca=config.replay_ca) as server,
        server.join_gradients(
            place.job, number, config.learners, name=f"learner {number}", deadline=config.learner_deadline
        ) as worker,
    ):
        yield worker


def digest(network: nn.Module) -> bytes:
    """SHA-256 of a network's parameters."""
    sha = hashlib.sha256()
    for parameter in network.parameters():
        sha.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return sha.digest()


def run_learner(assignment: Assignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of a learner's process."""
    # They reach every process of the run; learner 0 is the one to end it, and kills who does not hear.
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    logger.remove()
    logging.getLogger("innet_drl").addHandler(logging.NullHandler())
    logging.getLogger("innet_drl").propagate = False
    end_with_parent()
    try:
        last: Ended | Failure = _learn(assignment, pipe)
    except (TrainingError, innet.ReplayError) as error:
        last = Failure(str(error), fatal=True)
    except Exception:
        last = Failure(traceback.format_exc(), fatal=True)
    # The run may be over.
    with contextlib.suppress(OSError):
        pipe.send(last)
    pipe.close()


def _learn(assignment: Assignment, pipe: multiprocessing.connection.Connection) -> Ended:
    from innet_drl.train.actor import make_view
    from innet_drl.train.checkpoints import load_checkpoint
    from innet_drl.train.targets import TargetsAhead

    config, name = assignment.config, assignment.name
    torch.set_num_threads(assignment.threads)
    torch.manual_seed(config.seed)
    learner = Learner(config, assignment.spec)
    learner.use(assignment.numerics)
    if assignment.checkpoint is not None:
        learner.load(load_checkpoint(assignment.checkpoint).tensors, assignment.updates, 0)
    with contextlib.ExitStack() as running:
        replay = running.enter_context(
            innet.connect(assignment.memory, token=assignment.token, tls_ca=config.replay_ca)
        )
        batches: Iterator[TorchBatch] = running.enter_context(
            replay.batches(
                name,
                config.batch_size,
                make_view(config, assignment.spec),
                beta=config.importance_exponent,
                prefetch=config.prefetch,
                device=str(learner.device),
                timeout=WAIT_SECONDS,
            )
        )
        if learner.targets_ahead:
            batches = running.enter_context(TargetsAhead(learner, batches))
        worker = running.enter_context(join(assignment.place, assignment.number, config))
        learner.gradients = SharedGradients(worker, learner.network)
        pipe.send(Joined())
        with contextlib.suppress(TrainingIsOver):
            while True:
                try:
                    batch = next(batches)
                except innet.errors.DeadlineError:
                    if pipe.poll(0):
                        # Training is over, and there is no batch to hear it with.
                        learner.gradients.end()
                        break
                    continue
                update = learner.update(batch)
                replay.update_priorities(name, batch.key, update.priorities())
    return Ended(learner.updates, digest(learner.network))
