"""Evaluations in a process of their own, so that the learner does not wait for them."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray

from innet_drl.launch.processes import (
    ProcessFailure,
    Stopped,
    await_end,
    prepare_to_play,
    start,
    start_fork_server,
)
from innet_drl.train.config import Config
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ProcessError, TrainingError, WithFlags
from innet_drl.train.evaluation import Evaluation, evaluate
from innet_drl.train.networks import make_network
from innet_drl.train.stopwatch import Laps, Stopwatch

logger = logging.getLogger(__name__)

RESTARTS = 3
"""Processes that may fail and be replaced; then the run continues without evaluations."""
STOP_SECONDS = 2.0
"""Seconds that the process may take to close its environments before it is killed."""

Parameters = dict[str, NDArray[Any]]
ReportTimes = Callable[[dict[str, float], Laps | None], object]
"""Takes the seconds of the process by activity since the last call, and its laps for a trace."""


@dataclass(frozen=True)
class Played:
    """An evaluation, and the times of the process since the one before."""

    evaluation: Evaluation
    seconds: dict[str, float]
    laps: Laps | None


def run_evaluator(config: Config, spec: EnvironmentSpec, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of the evaluator's process: receives parameters, plays, and sends the evaluation."""
    try:
        prepare_to_play()
        # The other cores are the learner's and the actors'.
        torch.set_num_threads(1)
        stopwatch = Stopwatch()
        network = make_network(config, spec)
        stopwatch.lap("start")
        while True:
            received = pipe.recv()
            stopwatch.lap("wait for the learner")
            stopwatch.record(config.trace_seconds)
            network.load_state_dict({name: torch.from_numpy(array) for name, array in received.items()})
            evaluation = evaluate(config, network, seed=config.seed, threads=1)
            assert evaluation is not None, "it is never stopped"
            stopwatch.lap("evaluate")
            pipe.send(Played(evaluation, stopwatch.take(), stopwatch.take_laps()))
    except (Stopped, EOFError, BrokenPipeError):
        pass
    except TrainingError as error:
        pipe.send(ProcessFailure(error.with_flags, fatal=True))
    except Exception:
        pipe.send(ProcessFailure(traceback.format_exc(), fatal=False))
    finally:
        pipe.close()


class Evaluator:
    """The evaluator's process, which plays one evaluation at a time. Use it as a context manager.

    It starts with the first evaluation. If it fails, a warning says so, and the next evaluation gets a new process.

    Args:
        config: The run's settings.
        spec: Spec of the environment.
        report: Called with the times of the process after each evaluation.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, report: ReportTimes = lambda seconds, laps: None) -> None:
        self._config = config
        self._spec = spec
        self._report = report
        self._restarts_left = RESTARTS
        self._process: Any = None
        self._pipe: multiprocessing.connection.Connection | None = None
        self._playing: Future[Played | ProcessFailure] | None = None
        # Sending blocks until the process receives, which may be stopped: not in the learner's thread.
        self._thread = ThreadPoolExecutor(1, "evaluator")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        self._thread.shutdown()

    @property
    def idle(self) -> bool:
        """Whether `begin` may be called."""
        return self._playing is None and self._restarts_left >= 0

    def begin(self, parameters: Parameters) -> None:
        """Begins an evaluation of a network's arrays, which nothing may change meanwhile."""
        if self._process is None:
            try:
                start_fork_server()
                self._process, self._pipe = start(run_evaluator, "evaluator", self._config, self._spec)
            except ProcessError as error:
                self._fail(error.with_flags, fatal=False)
                return
        assert self._pipe is not None
        self._playing = self._thread.submit(_play, self._pipe, self._process.sentinel, parameters)

    def result(self) -> Evaluation | None:
        """Returns the evaluation that has ended since the last call, without waiting."""
        if self._playing is None or not self._playing.done():
            return None
        played, self._playing = self._playing.result(), None
        if isinstance(played, Played):
            self._report(played.seconds, played.laps)
            return played.evaluation
        self._fail(played.message, fatal=played.fatal)
        return None

    def _fail(self, reason: str, *, fatal: bool) -> None:
        self._stop()
        self._restarts_left = -1 if fatal else self._restarts_left - 1
        advice = "the next one gets a new process" if self._restarts_left >= 0 else "there are no more during training"
        logger.warning("an evaluation failed, and training continues; %s: %s", advice, WithFlags(reason))

    def _stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            await_end(self._process, STOP_SECONDS)
            self._process.close()
        # The thread's call has ended with the process.
        if self._playing is not None:
            self._playing.exception()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = self._playing = None


def _play(
    pipe: multiprocessing.connection.Connection, sentinel: int, parameters: Parameters
) -> Played | ProcessFailure:
    try:
        # A failure that was sent before the pipe broke can still be received.
        with contextlib.suppress(BrokenPipeError):
            pipe.send(parameters)
        # Environments that are forks of the process hold its end of the pipe, too.
        if pipe in multiprocessing.connection.wait([pipe, sentinel]):
            played: Played | ProcessFailure = pipe.recv()
            return played
    except (EOFError, OSError):
        pass
    return ProcessFailure("its process was killed", fatal=False)
