"""Evaluations in a process of their own, so that the learner does not wait for them."""

from __future__ import annotations

import logging
import multiprocessing.connection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

import torch
from numpy.typing import NDArray

from innet_drl.launch.launcher import Ended, Launcher
from innet_drl.launch.processes import ProcessFailure, Stopped, prepare_to_play
from innet_drl.train.config import Config
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ProcessError
from innet_drl.train.evaluation import Evaluation, evaluate
from innet_drl.train.networks import make_network
from innet_drl.train.stopwatch import Laps, Stopwatch
from innet_drl.train.times import Times

logger = logging.getLogger(__name__)

NAME = "evaluator"
RESTARTS = 3
"""Failed processes that are replaced; after that the run continues without evaluations."""
STOP_SECONDS = 2.0
"""Seconds that the process may take to close its environments before it is killed."""

Parameters = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Played:
    """An evaluation, and the times of the process since the previous one."""

    evaluation: Evaluation
    seconds: dict[str, float]
    laps: Laps | None


def run_evaluator(config: Config, spec: EnvironmentSpec, pipe: multiprocessing.connection.Connection) -> None:
    """The main function of the evaluator's process: receives parameters, plays, and sends the evaluation."""
    try:
        prepare_to_play()
        # The other cores are for the learner and the actors.
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
    except Exception as error:
        pipe.send(ProcessFailure.of(error, fatal=False))
    finally:
        pipe.close()


class Evaluator:
    """The evaluator's process, which plays one evaluation at a time. Use it as a context manager.

    It starts with the first evaluation. If it fails, a warning says so, and the next evaluation gets a new process.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, launcher: Launcher, times: Times | None = None) -> None:
        self._config = config
        self._spec = spec
        self._launcher = launcher
        self._launcher.stop_seconds = STOP_SECONDS
        self._times = times
        self._restarts_left = RESTARTS
        self._runs = False
        self._playing = False
        # Sending blocks while the process does not receive, so that it has its own thread.
        self._thread = ThreadPoolExecutor(1, "evaluator")
        self._sending: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # The end of the process unblocks the thread.
        self._launcher.close()
        self._thread.shutdown()

    @property
    def idle(self) -> bool:
        """Whether `begin` may be called."""
        return not self._playing and self._restarts_left >= 0

    def begin(self, parameters: Parameters) -> None:
        """Begins an evaluation of a network's arrays, which must not change meanwhile."""
        if not self._runs:
            try:
                self._launcher.start(NAME, run_evaluator, self._config, self._spec)
            except ProcessError as error:
                self._fail(ProcessFailure(str(error), fatal=False))
                return
        self._runs = self._playing = True
        self._sending = self._thread.submit(self._launcher.send, NAME, parameters)

    def result(self) -> Evaluation | None:
        """Returns the evaluation that has ended since the last call, without waiting."""
        evaluation = None
        for _, message in self._launcher.messages():
            if isinstance(message, Ended):
                self._fail(message.failure or ProcessFailure("its process was killed", fatal=False))
            else:
                if self._times is not None:
                    self._times.add(NAME, message.seconds, message.laps)
                evaluation, self._playing = message.evaluation, False
        return evaluation

    def _fail(self, failure: ProcessFailure) -> None:
        if self._sending is not None:
            # The next process must not receive these parameters.
            self._sending.cancel()
        self._runs = self._playing = False
        self._restarts_left = -1 if failure.fatal else self._restarts_left - failure.counts
        advice = "the next one gets a new process" if self._restarts_left >= 0 else "there are no more during training"
        logger.warning("an evaluation failed, and training continues; %s: %s", advice, failure.whole)
