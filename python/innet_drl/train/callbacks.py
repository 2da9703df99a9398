"""Callbacks, which a run calls and which may end it.

They are called in the thread of `run`, between updates:

    class Watch(train.Callback):
        def on_evaluation(self, evaluation, agent_steps):
            if evaluation.mean > 400:
                raise train.StopTraining("good enough")

    train.run(train.preset("cartpole"), callbacks=[Watch()])
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.cost import Cost
from innet_drl.train.observe.metrics import Game, Meter, Metrics, Totals
from innet_drl.train.play.evaluation import Evaluation
from innet_drl.train.settings.config import Config

if TYPE_CHECKING:
    # This module must not import torch: it is imported to check arguments.
    from innet_drl.train.learn.learner import Learner
    from innet_drl.train.networks import Network


class StopTraining(Exception):  # noqa: N818 - it is no error, as StopIteration
    """Raised by a callback, ends training as `steps` or `minutes` do: with checkpoint, evaluation and result.

    The message is the reason for the log. Any other exception of a callback ends the run at once, and `run` raises it;
    a checkpoint is written only if the run has learned and has none.
    """


@dataclass(frozen=True)
class Result:
    """Outcome of a session."""

    folder: Path
    agent_steps: int
    learner_updates: int
    seconds: float
    """Seconds of training over all sessions of the run, without the evaluation after training and the video."""
    evaluation: Evaluation | None
    """The evaluation after training; `None` if training was interrupted or made no update."""
    best_mean: float | None = None
    """Mean score of the best evaluation of the run, whose agent is in `best.safetensors`."""
    cost: Cost | None = None
    """Processor seconds and joules of the run, and both per million frames."""


class Training:
    """The run of a callback, `self.training` in its methods: network, counters, and metrics of one's own."""

    def __init__(self, learner: Learner, totals: Totals, meter: Meter) -> None:
        self._learner = learner
        self._totals = totals
        self._meter = meter

    @property
    def network(self) -> Network:
        """The newest network, a torch module on the learner's device. Read it; changes would be learned from."""
        return self._learner.network

    @property
    def average(self) -> Network:
        """The trained agent: the running average of the network's weights, which evaluations play with."""
        return self._learner.average

    @property
    def learner_updates(self) -> int:
        """Steps of the optimizer."""
        return self._learner.updates

    @property
    def agent_steps(self) -> int:
        """Steps of all actors, as far as they are reported."""
        return self._totals.agent_steps

    def log(self, name: str, value: float) -> None:
        """Adds a value to the next line of metrics as `own/<name>`.

        Of several values of a name the last one counts; NaN and infinities are left out.
        """
        if math.isfinite(value):
            self._meter.record(f"own/{name}", float(value))


class Callback:
    """Base class of callbacks: override the methods that you need.

    They are called in the thread of `run`, between updates: the learner waits for them.
    """

    training: Training
    """The run; set before `on_start`."""

    def on_start(self, config: Config, folder: Path) -> None:
        """Training begins; the run's folder exists."""

    def on_metrics(self, metrics: Metrics) -> None:
        """A line of metrics was written: `metrics["agent_steps"]`, `metrics.get("evaluation_mean")`."""

    def on_games(self, games: list[Game]) -> None:
        """Games of actors have ended; each has the environment's `info` of its last step."""

    def on_evaluation(self, evaluation: Evaluation, agent_steps: int) -> None:
        """An evaluation of the agent after `agent_steps` has ended; includes the evaluation after training."""

    def on_checkpoint(self, path: Path) -> None:
        """A checkpoint was written."""

    def on_end(self, result: Result) -> None:
        """The run has ended without an error. `StopTraining` does nothing here."""

    def on_error(self, error: BaseException) -> None:
        """An error ends the run; `run` raises it after this call. `StopTraining` does nothing here."""


METHODS = [name for name in vars(Callback) if name.startswith("on_")]
"""Methods that a run calls."""


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Checks the callbacks of a run, before it begins."""
    if not isinstance(callbacks, Sequence):
        raise ConfigurationError(f"callbacks: it must be a list, callbacks=[...], and is {_name(callbacks)}")
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise ConfigurationError(f"callbacks: {_name(callback)} is a class: give an object, {_name(callback)}()")
        if not isinstance(callback, Callback):
            raise ConfigurationError(
                f"callbacks: {_name(callback)} is no train.Callback: call it in a method of a subclass "
                f"({', '.join(METHODS)})"
            )
        own = [kind for kind in type(callback).__mro__ if issubclass(kind, Callback)]
        for name in (name for kind in own for name in vars(kind) if name.startswith("on_")):
            if name not in METHODS:
                hint = closest(name, METHODS, f"it calls {', '.join(METHODS)}")
                raise ConfigurationError(f"callbacks: {_name(callback)} has {name}, which no run calls{hint}")
            given = list(inspect.signature(getattr(Callback, name)).parameters)[1:]
            try:
                inspect.signature(getattr(callback, name)).bind(*given)
            except TypeError as error:
                raise ConfigurationError(
                    f"callbacks: {name} of {_name(callback)} has to take ({', '.join(['self', *given])}): {error}"
                ) from error


def _name(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))
