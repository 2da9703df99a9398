"""Data-parallel learners: each samples its own batches, and all apply the mean of their gradients.

The first learner is the run's process: it publishes, evaluates, writes files and decides when training ends. The
others are processes that start with the same weights, sample from the same memory and apply the same updates; their
weights stay equal bit for bit, which is checked at the end. A learner that dies ends the run with a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import torch

import innet_drl as innet
from innet_drl.gradients import GradientWorker
from innet_drl.launch.launcher import (
    Ended,
    LocalLauncher,
    ProcessFailure,
    end_with_parent,
    import_failure,
    silence_logs,
)
from innet_drl.signals import END_SIGNALS
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import LearnerError
from innet_drl.train.learn.checkpoints import load_checkpoint
from innet_drl.train.learn.data_parallel import SharedGradients, TrainingEnded, digest
from innet_drl.train.learn.learner import Learner, Numerics, use_device
from innet_drl.train.learn.targets import TargetsAhead
from innet_drl.train.memory import aggregator_token, memory_class, memory_settings
from innet_drl.train.settings.slices import LearnerSettings

logger = logging.getLogger(__name__)

WAIT_SECONDS = 0.5
"""Timeout of a batch; then a learner checks whether training has ended."""
DEADLINE_SECONDS = 300.0
"""Seconds that a learner waits for the others, with their checkpoints, before the run fails."""
STOP_SECONDS = 10.0
"""Seconds that a learner may take to end before it is killed."""
GPUS = "CUDA_VISIBLE_DEVICES"
"""Environment variable with the GPUs that a process sees."""
FAILURE_SECONDS = 2.0
"""Seconds to wait for the error message of a missing learner, and for its end."""
POLL_SECONDS = 0.05
"""Period at which the messages of learners are awaited."""


@dataclass(frozen=True)
class GradientJob:
    """The job that averages the gradients of a run."""

    address: str
    """Address of the server, for `innet_drl.connect`."""
    name: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class LearnerAssignment:
    """Arguments of a learner's process."""

    config: LearnerSettings
    spec: EnvironmentSpec
    number: int
    """Number of this learner; the run's process is 0."""
    memory: str
    """Address of the replay memory."""
    name: str
    """Name of the table."""
    job: GradientJob
    numerics: Numerics
    threads: int
    checkpoint: Path | None
    """The run's checkpoint to start from; `None` for fresh weights of the run's seed."""
    updates: int
    """Updates of earlier sessions."""
    token: str = field(repr=False)
    """Token of the replay memory."""
    gpus: str | None
    """The run's `CUDA_VISIBLE_DEVICES`, which Ray chooses after the start of the fork server."""


@dataclass(frozen=True)
class LearnerReady:
    """The first message of a learner: it has joined the job."""


@dataclass(frozen=True)
class LearnerResult:
    """The last message of a learner whose training has ended."""

    updates: int
    digest: bytes


LearnerMessage = LearnerReady | LearnerResult | Ended


class Learners:
    """The processes of the other learners, and this process's membership in their job. Use it as a context manager."""

    def __init__(
        self,
        config: LearnerSettings,
        learner: Learner,
        memory: str,
        name: str,
        server: str,
        checkpoint: Path | None,
        token: str,
        has_ended: Callable[[], bool],
    ) -> None:
        """`has_ended` is called while the others' gradients are waited for, and returns whether training has ended."""
        self._learner, self._has_ended = learner, has_ended
        self._job = GradientJob(server, f"{name[:40]}-{secrets.token_hex(4)}", aggregator_token(config))
        self._config = config
        self._assignments = [
            LearnerAssignment(
                config,
                learner.spec,
                number,
                memory,
                name,
                self._job,
                learner.numerics,
                torch.get_num_threads(),
                checkpoint,
                learner.updates,
                token,
                os.environ.get(GPUS),
            )
            for number in range(1, config.learners)
        ]
        self._launcher = LocalLauncher()
        self._launcher.stop_seconds = FAILURE_SECONDS
        self._stack = contextlib.ExitStack()
        self._last: dict[int, LearnerMessage] = {}
        """The last message of each learner; of one that has ended well, its result."""

    def __enter__(self) -> Self:
        try:
            for assignment in self._assignments:
                self._launcher.start(f"learner {assignment.number}", run_learner, assignment)
            worker = self._stack.enter_context(join(self._job, 0, self._config))
            for assignment in self._assignments:
                message = self._await(assignment.number, LearnerReady)
                if not isinstance(message, LearnerReady):
                    raise self._failed(assignment.number, message)
            self._learner.gradients = SharedGradients(worker, self._learner.network, self._attend)
        except BaseException:
            self._stop(0.0)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # After `end` learners exit by themselves. Otherwise their results are lost, and they are killed at once.
        ended = any(isinstance(message, LearnerResult) for message in self._last.values())
        self._stop(STOP_SECONDS if ended else 0.0)

    def _stop(self, seconds: float) -> None:
        self._learner.gradients = None
        self._stack.close()
        self._launcher.stop_seconds = seconds
        self._launcher.close()

    def end(self) -> None:
        """Ends training in all learners with the same update, and compares their weights."""
        assert self._learner.gradients is not None
        # Learners without a batch end training instead of their next mean: they would miss the last sum.
        self._launcher.begin_end()
        try:
            if not self._learner.gradients.ended:
                self._learner.gradients.end()
        except innet.errors.GradientError as error:
            raise self.explain(error) from error
        ours = LearnerResult(self._learner.updates, digest(self._learner.network))
        for assignment in self._assignments:
            number = assignment.number
            theirs = self._await(number, LearnerResult)
            if not isinstance(theirs, LearnerResult):
                raise self._failed(number, theirs)
            if theirs != ours:
                raise LearnerError(f"learner {number} ended with other weights than learner 0: {theirs}, not {ours}")
        logger.info("%d learners ended with the same weights", self._config.learners)

    def _attend(self) -> None:
        """Looks after the run while a sum waits for the other learners.

        A learner that fails between two sums fails no sum: the job would wait for its replacement.
        """
        self._receive()
        for number, message in self._last.items():
            if isinstance(message, Ended):
                raise self._failed(number, message)
        if self._has_ended():
            self._launcher.begin_end()

    def explain(self, error: innet.errors.GradientError) -> LearnerError:
        """Returns the error message of the learner that made a sum fail, if it sent one."""
        missing = error.missing if isinstance(error, innet.errors.MissingWorkerError) else ()
        for assignment in self._assignments:
            seconds = FAILURE_SECONDS if assignment.number in missing else 0.0
            message = self._await(assignment.number, Ended, seconds)
            if isinstance(message, Ended) and message.failure is not None:
                return self._failed(assignment.number, message)
        return LearnerError(f"the learners' gradients came to no sum: {error}")

    def _receive(self, number: int = 0) -> LearnerMessage | None:
        """Receives all messages; returns the last one of learner `number`."""
        for name, message in self._launcher.messages():
            learner = int(name.removeprefix("learner "))
            if not isinstance(self._last.get(learner), LearnerResult):
                self._last[learner] = message
        return self._last.get(number)

    def _await(
        self, number: int, kind: type[LearnerMessage], seconds: float = DEADLINE_SECONDS
    ) -> LearnerMessage | None:
        """Waits for a message of this kind, or the end of learner `number`; returns its last message."""
        deadline = time.monotonic() + seconds
        while not isinstance(message := self._receive(number), (kind, Ended)) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        return message

    def _failed(self, number: int, message: LearnerMessage | None) -> LearnerError:
        reason = f"it ended without a word, or kept the others waiting for {DEADLINE_SECONDS:g} s"
        if isinstance(message, Ended):
            failure = message.failure
            reason = failure.whole if failure else import_failure(message.exit_code) or reason
        return LearnerError(f"learner {number} failed: {reason}")


@contextlib.contextmanager
def join(job: GradientJob, number: int, config: LearnerSettings) -> Iterator[GradientWorker]:
    """Joins the run's gradient job as one of its learners."""
    with (
        innet.connect(job.address, token=job.token, tls_ca=config.replay_ca) as server,
        server.join_gradients(
            job.name, number, config.learners, name=f"learner {number}", deadline=DEADLINE_SECONDS
        ) as worker,
    ):
        yield worker


def run_learner(assignment: LearnerAssignment, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of a learner's process."""
    os.environ.pop(GPUS, None)
    if assignment.gpus is not None:
        os.environ[GPUS] = assignment.gpus
    # Signals reach every process of the run; the first learner ends the others, and kills them if necessary.
    ended = threading.Event()
    for number in END_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    silence_logs()
    end_with_parent()
    try:
        last: LearnerResult | ProcessFailure = _learn(assignment, pipe, ended)
    except Exception as error:
        last = ProcessFailure.of(error, fatal=True)
    # The first learner may have closed the pipe.
    with contextlib.suppress(OSError):
        pipe.send(last)
    pipe.close()


def _learn(
    assignment: LearnerAssignment, pipe: multiprocessing.connection.Connection, ended: threading.Event
) -> LearnerResult:
    config = assignment.config
    torch.set_num_threads(assignment.threads)
    torch.manual_seed(config.seed)
    learner = Learner(config, assignment.spec, assignment.number)
    use_device(learner.device)
    learner.use(assignment.numerics)
    if assignment.checkpoint is not None:
        learner.load(load_checkpoint(assignment.checkpoint).tensors, assignment.updates, 0)
    settings = memory_settings(
        config,
        assignment.spec,
        assignment.name,
        learner.parameters(),
        address=assignment.memory,
        token=assignment.token,
    )
    with contextlib.ExitStack() as running:
        memory = running.enter_context(memory_class(config.replay).join(settings))
        batches = running.enter_context(memory.batches(str(learner.device), timeout=WAIT_SECONDS))
        if learner.targets_ahead:
            batches = running.enter_context(TargetsAhead(learner, batches))
        worker = running.enter_context(join(assignment.job, assignment.number, config))
        learner.gradients = SharedGradients(worker, learner.network)
        pipe.send(LearnerReady())
        with contextlib.suppress(TrainingEnded):
            while True:
                try:
                    batch = next(batches)
                except innet.errors.DeadlineError:
                    if ended.is_set():
                        # Training has ended, and without a batch this learner would miss the sum that ends it.
                        learner.gradients.end()
                        break
                    continue
                update = learner.update(batch)
                memory.update_priorities(batch.ids, update.priorities())
    return LearnerResult(learner.updates, digest(learner.network))
