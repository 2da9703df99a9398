"""The schedule of a run's evaluations, in the learner's thread or in parallel with it, and the best agent."""

from __future__ import annotations

import dataclasses
import logging
import time
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from innet_drl.train.errors import RunFolderError
from innet_drl.train.learn.learner import Learner
from innet_drl.train.play.evaluation import STICKY_ACTIONS, Evaluation, Evaluator, evaluate
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs.session import Session
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class EvaluatedAgent:
    """A copy of the trained agent at one time of training."""

    tensors: dict[str, Tensor]
    """Averaged weights, copied to the CPU."""
    agent_steps: int
    learner_updates: int

    def parameters(self) -> dict[str, NDArray[Any]]:
        """Returns the weights as an evaluator takes them."""
        return {name: value.numpy() for name, value in self.tensors.items()}

    def checkpoint(self) -> dict[str, Tensor]:
        """Returns the tensors as they are named in a checkpoint."""
        return {f"average.{name}": value for name, value in self.tensors.items()}

    def report(self, evaluation: Evaluation) -> dict[str, Any]:
        """Returns its evaluation with steps and updates, as plain JSON values."""
        counts = {"agent_steps": self.agent_steps, "learner_updates": self.learner_updates}
        means = {"mean": evaluation.mean, "standard_error": evaluation.standard_error}
        return {**counts, **means, **dataclasses.asdict(evaluation)}


def best_mean(folder: RunFolder) -> float | None:
    """Mean score of the best evaluated agent of a run; `None` without one."""
    mean: float | None = folder.best_agent().state["mean"] if folder.best.is_file() else None
    return mean


def save_if_best(folder: RunFolder, agent: EvaluatedAgent, evaluation: Evaluation) -> float:
    """Saves an agent whose evaluation is the best of its run; returns the best mean score.

    A process that follows the run (`evaluate --follow`) saves agents, too, so the file's score is read each time.
    """
    before = best_mean(folder)
    if before is not None and before >= evaluation.mean:
        return before
    folder.save_best(agent.checkpoint(), agent.report(evaluation))
    return evaluation.mean


class EvaluationSchedule:
    """Evaluates a learner's agent after every `evaluation_period` updates, and keeps the best one."""

    def __init__(self, session: Session, learner: Learner) -> None:
        self.evaluator: Evaluator | None = None
        """Plays evaluations in parallel with training; if `None`, this thread plays them."""
        self.reached_target = False
        """Whether an evaluation of this session reached the target return."""
        self.best_mean = best_mean(session.folder)
        """Mean score of the run's best evaluation."""
        self._session = session
        self._config = session.config
        self._learner = learner
        self._totals = session.totals
        self._due = False
        self._evaluating: EvaluatedAgent | None = None
        self._last: tuple[int, Evaluation] | None = None

    def begin_if_due(self) -> None:
        """Begins an evaluation if one is due, or plays it in this thread; call it after each update.

        An evaluation that becomes due during another one begins after it.
        """
        period = self._config.evaluation_period
        self._due |= period > 0 and self._learner.updates % period == 0
        if not self._due:
            return
        if self.evaluator is None:
            self._due = False
            self.evaluate()
        elif self.evaluator.idle:
            self._due = False
            self._evaluating = self.agent()
            self.evaluator.begin(self._evaluating.parameters())

    def take(self) -> None:
        """Records the result of a parallel evaluation that has ended, without waiting."""
        evaluation = None if self.evaluator is None else self.evaluator.result()
        if evaluation is not None:
            assert self._evaluating is not None
            self._record(evaluation, self._evaluating)

    def evaluate(self) -> Evaluation | None:
        """Evaluates the newest agent in this thread, unless it is evaluated already; `None` if interrupted."""
        if self._last is not None and self._last[0] == self._learner.updates:
            return self._last[1]
        started = time.perf_counter()
        evaluation = self._play(self._config)
        if evaluation is not None:
            self._record(evaluation, self.agent())
        self._session.meter.leave_out(time.perf_counter() - started)
        return evaluation

    def evaluate_sticky(self) -> Evaluation | None:
        """Evaluates the newest agent again with sticky actions; `None` outside Atari, or if the run has them anyway."""
        config = self._config
        if not config.evaluated.is_atari or config.sticky_actions:
            return None
        evaluation = self._play(dataclasses.replace(config, sticky_actions=STICKY_ACTIONS))
        if evaluation is not None:
            logger.info("the same agent: %s", evaluation)
        return evaluation

    def _play(self, config: Config) -> Evaluation | None:
        session = self._session
        return evaluate(
            config,
            self._learner.average,
            seed=config.seed,
            stopped=lambda: session.interrupted,
            progress=session.display.progress,
        )

    def agent(self) -> EvaluatedAgent:
        """Returns a copy of the newest agent, the average of the learner's weights."""
        state = self._learner.average.state_dict()
        tensors = {name: value.detach().cpu().clone() for name, value in state.items()}
        return EvaluatedAgent(tensors, self._totals.agent_steps, self._learner.updates)

    def _record(self, evaluation: Evaluation, agent: EvaluatedAgent) -> None:
        target = self._config.target_return
        self._last = (agent.learner_updates, evaluation)
        self._totals.add_evaluation(evaluation.mean)
        logger.info("after %s updates: %s", f"{agent.learner_updates:,}", evaluation)
        try:
            with self._session.folder.continuing():
                self.best_mean = save_if_best(self._session.folder, agent, evaluation)
        except RunFolderError as error:
            logger.warning("the best agent could not be kept: %s", error)
        self.reached_target |= target is not None and evaluation.mean >= target
        self._session.call("on_evaluation", evaluation, agent.agent_steps)
