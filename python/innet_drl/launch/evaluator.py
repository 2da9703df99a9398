"""Evaluations in processes of their own, so that the learner does not wait for them."""

from __future__ import annotations

import logging
import multiprocessing.connection
from typing import Any, Self

import torch
from numpy.typing import NDArray

from innet_drl.launch.launcher import Ended, Launcher, ProcessFailure, Stopped, import_failure, prepare_to_play
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ProcessError
from innet_drl.train.networks import make_network
from innet_drl.train.play.evaluation import Evaluation, evaluate
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

NAME = "evaluator"
FAILURES = 3
"""Failed evaluations that are allowed; after one more the run continues without evaluations."""
STOP_SECONDS = 2.0
"""Seconds that a process may take to close its environments before it is killed."""

Parameters = dict[str, NDArray[Any]]


def run_evaluator(
    config: Config, spec: EnvironmentSpec, parameters: Parameters, pipe: multiprocessing.connection.Connection
) -> None:
    """The main function of an evaluation's process: plays, and sends the evaluation."""
    try:
        prepare_to_play()
        # The other cores are for the learner and the actors.
        torch.set_num_threads(1)
        network = make_network(config, spec)
        network.load_state_dict({name: torch.from_numpy(array) for name, array in parameters.items()})
        evaluation = evaluate(config, network, seed=config.seed, threads=1)
        assert evaluation is not None, "it is never stopped"
        pipe.send(evaluation)
    except (Stopped, BrokenPipeError):
        pass
    except Exception as error:
        pipe.send(ProcessFailure.of(error, fatal=False))
    finally:
        pipe.close()


class Evaluator:
    """Plays one evaluation at a time, each in a process of its own. Use it as a context manager.

    If one fails, a warning says so; after more than `FAILURES` of them there are no more.
    """

    def __init__(self, config: Config, spec: EnvironmentSpec, launcher: Launcher) -> None:
        self._config = config
        self._spec = spec
        self._launcher = launcher
        self._launcher.stop_seconds = STOP_SECONDS
        self._failures_left = FAILURES
        self._playing = False
        self._evaluation: Evaluation | None = None
        """Result of the process that has played and not ended yet."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._launcher.close()

    @property
    def idle(self) -> bool:
        """Whether `begin` may be called."""
        return not self._playing and self._failures_left >= 0

    def begin(self, parameters: Parameters) -> None:
        """Begins an evaluation of a network's arrays."""
        try:
            self._launcher.start(NAME, run_evaluator, self._config, self._spec, parameters)
        except ProcessError as error:
            self._fail(ProcessFailure(str(error), fatal=False))
        else:
            self._playing = True

    def result(self) -> Evaluation | None:
        """Returns the evaluation that has ended since the last call, without waiting."""
        for _, message in self._launcher.messages():
            if not isinstance(message, Ended):
                self._evaluation = message
                continue
            evaluation, self._evaluation, self._playing = self._evaluation, None, False
            if evaluation is None:
                reason = import_failure(message.exit_code) or "its process was killed"
                self._fail(message.failure or ProcessFailure(reason, fatal=False))
            return evaluation
        return None

    def _fail(self, failure: ProcessFailure) -> None:
        self._failures_left = -1 if failure.fatal else self._failures_left - failure.counts
        advice = "there will be others" if self._failures_left >= 0 else "there are no more during training"
        logger.warning("an evaluation failed, and training continues; %s: %s", advice, failure.whole)
