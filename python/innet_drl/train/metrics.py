"""Metrics of a run: a line of metrics, and the meter that collects it from learner and actors.

The files are in `metrics_files.py`, because actors import this module without TensorBoard.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from innet_drl.train import prediction
from innet_drl.train.stopwatch import Laps, add_seconds

if TYPE_CHECKING:
    from innet_drl.train.cost import Cost
    from innet_drl.train.diagnostics import Diagnosis
    from innet_drl.train.learner import Update

RETURN_WINDOW = 100
"""Number of last games that `return_mean` averages."""
Info = bool | int | float | str
"""Values of an environment's `info` that reports have."""
COSTS = ("processor_s", "processor_s_per_million_frames", "joules", "joules_per_million_frames", "resident_bytes")
ACTOR_WINDOW = 20
"""Number of last games of an actor that `actor_scores` averages."""


@dataclass(frozen=True)
class Metrics:
    """One line of `metrics.jsonl`. Values that do not exist yet are null.

    Tags are of TensorBoard and Weights & Biases, whose x-axis is `agent_steps`; of several values they are prefixes.
    """

    time_s: Annotated[float, "counts/time_s"]
    """Seconds of training over all sessions of the run."""
    seconds_left: Annotated[float | None, "counts/seconds_left"]
    """Seconds until training ends by its minutes, or by its steps at the present rate."""
    env_frames: Annotated[int, "counts/env_frames"]
    """Emulator frames played; equal to `agent_steps` outside Atari."""
    agent_steps: int
    """Actions taken by all environments; resets are not counted."""
    agent_steps_per_s: Annotated[float, "charts/SPS"]
    """Rate since the last line."""
    learner_updates: Annotated[int, "counts/learner_updates"]
    """Steps of the optimizer."""
    learner_updates_per_s: Annotated[float, "charts/updates_per_s"]
    """Rate since the last line."""
    replay_steps: Annotated[int, "replay/steps"]
    """Steps in the replay memory."""
    replay_bytes: Annotated[int, "replay/bytes"]
    """Bytes of the steps in the replay memory."""
    return_mean: Annotated[float | None, "charts/episodic_return"]
    """Mean score, unclipped, of the last 100 games of the half of the environments that explores less."""
    return_best: Annotated[float | None, "charts/best_return"]
    """Best score of any game."""
    length_mean: Annotated[float | None, "charts/episodic_length"]
    """Mean length, in agent steps, of the games of `return_mean`."""
    epsilon: Annotated[float | None, "charts/epsilon"]
    """Mean probability of random actions over all environments."""
    td_loss: Annotated[float | None, "losses/td_loss"]
    """Mean weighted loss of the updates since the last line."""
    q_mean: Annotated[float | None, "losses/q_values"]
    """Mean Q-value of the sampled actions since the last line."""
    gradient_norm: Annotated[float | None, "losses/gradient_norm"]
    """Mean norm of the gradients, before clipping, of the updates since the last line."""
    parameter_version: Annotated[int, "parameters/version"]
    """Publications of the parameters."""
    parameter_lag: Annotated[float | None, "parameters/lag"]
    """Updates by which actors' parameters are older than the learner's, mean over the actors."""
    sample_age: Annotated[float | None, "replay/sample_age"]
    """Steps inserted between a transition's insertion and its sampling, mean since the last line."""
    samples_per_insert: Annotated[float, "replay/samples_per_insert"]
    """Transitions sampled for each one inserted, over the memory's life."""
    samples_per_insert_now: Annotated[float | None, "replay/samples_per_insert_now"]
    """Transitions sampled for each one inserted since the last line."""
    samples_per_insert_target: Annotated[float, "replay/samples_per_insert_target"]
    """The setting `samples_per_insert`."""
    stale_updates: Annotated[int, "replay/stale_updates"]
    """Priorities received for transitions already evicted."""
    games: Annotated[int, "counts/games"]
    """Games finished."""
    evaluation_mean: Annotated[float | None, "charts/evaluation_return"]
    """Mean score of the last evaluation."""
    evaluation_best: Annotated[float | None, "charts/best_evaluation_return"]
    """Mean score of the best evaluation."""
    learner_time: Annotated[dict[str, float], "learner_time"]
    """Shares of the learner's time since the last line."""
    actor_time: Annotated[dict[str, float], "actor_time"]
    """Shares of the actors' time since the last line."""
    actor_scores: Annotated[dict[str, float], "actor_return"]
    """Mean score, unclipped, of the last 20 games of each actor, by its number."""
    actor_steps_per_s: Annotated[dict[str, float], "actor_SPS"]
    """Agent steps of each actor per second since the last line."""
    actor_waits: Annotated[dict[str, float], "actor_waits"]
    """Share of the time since the last line in which each actor waited for the replay ratio."""
    processor_s: Annotated[float | None, "cost/processor_s"] = None
    """Processor seconds of all processes of the run (`Cost`)."""
    processor_s_per_million_frames: Annotated[float | None, "cost/processor_s_per_million_frames"] = None
    """Processor seconds of a million frames, over the run."""
    joules: Annotated[float | None, "cost/joules"] = None
    """Energy of processors and GPUs, where the machine counts it (`Cost`)."""
    joules_per_million_frames: Annotated[float | None, "cost/joules_per_million_frames"] = None
    """Joules of a million frames, over the run."""
    resident_bytes: Annotated[int | None, "cost/resident_bytes"] = None
    """Resident memory of all processes of the run; what they share counts in each of them."""
    learning_rate: Annotated[float | None, "charts/learning_rate"] = None
    """Adam's step size at the last update."""
    q_predicted: Annotated[float | None, "values/q_predicted"] = None
    """Mean Q-value that actors had for the actions they took, over the steps of the episodes that ended since the last
    line, in the half of the environments that explores less. Episodes are the learner's: the loss of a life may end
    one."""
    return_discounted: Annotated[float | None, "values/return_discounted"] = None
    """Mean discounted return that followed these actions, of rewards as the learner sees them."""
    priority_total: Annotated[float | None, "priorities/total"] = None
    """Sum of the priorities in the memory, after the exponent."""
    priority_max: Annotated[float | None, "priorities/max"] = None
    """Priority of new transitions that have none of their own, before the exponent."""
    priority_concentration: Annotated[float | None, "priorities/concentration"] = None
    """Mean sampling probability of the sampled transitions since the last line, times the transitions in memory: 1 if
    they are sampled uniformly; half of them never, 2."""
    policy_churn: Annotated[float | None, "diagnostics/policy_churn"] = None
    """Share of states whose best action, of the network that actors play with, has changed since the diagnosis before
    (Schaul et al., 2022); the diagnosis is `innet_drl.train.diagnostics`, and its values are the last one's."""
    policy_agreement: Annotated[float | None, "diagnostics/policy_agreement"] = None
    """Share of states for which the newest weights and their running average have the same best action."""
    dead_units: Annotated[dict[str, float], "dead_units"] = field(default_factory=dict)
    """Share of units, or filters, that are 0 in all states, of each ReLU in the order of computing."""
    feature_spread: Annotated[float | None, "diagnostics/feature_spread"] = None
    """Smallest standard deviation of a normaliser's input, over the root of its epsilon."""
    adam_epsilon_share: Annotated[float | None, "diagnostics/adam_epsilon_share"] = None
    """Share of the weights whose root of Adam's second moment is below Adam's epsilon."""
    equal_frames: Annotated[float | None, "diagnostics/equal_frames"] = None
    """Share of the stored stacked observations of which all frames are equal."""
    effective_sample_size: Annotated[float | None, "diagnostics/effective_sample_size"] = None
    """(sum w)^2 / (B sum w^2) of the weights of a batch, mean over batches: 1 if all are equal."""
    priority_percentiles: Annotated[dict[str, float], "priority_percentiles"] = field(default_factory=dict)
    """Percentiles of the new priorities, before the exponent."""
    own: Annotated[dict[str, float], "own"] = field(default_factory=dict)
    """Values that callbacks have logged since the last line (`Training.log`)."""


def score_of(rewards: float) -> float:
    """A sum of float32 rewards as a score, without digits beyond their precision: 0.30000001192 is 0.3."""
    total = float(rewards)
    return total if total.is_integer() else float(f"{total:.7g}")


@dataclass(frozen=True)
class Game:
    """A finished game."""

    environment: int
    """Number of the environment, counted over all actors."""
    score: float
    """Sum of its rewards, unclipped."""
    steps: int
    """Its length in agent steps."""
    info: dict[str, Info] = field(default_factory=dict)
    """The environment's `info` of its last step, as far as it is numbers, flags and short texts, 512 bytes as JSON.
    Names of nested ones are joined by slashes: `episode/r`."""


@dataclass(frozen=True)
class ActorReport:
    """An actor's report to the learner on the time since its last report."""

    actor: int
    steps: int
    games: list[Game]
    parameter_updates: int
    """The learner's count of updates when the actor's parameters were published."""
    seconds: dict[str, float]
    """Seconds of the actor's main thread by activity."""
    epsilon: float
    """Mean probability of random actions over the actor's environments, at its last step."""
    laps: Laps | None = None
    """Laps for a trace (`--trace-seconds`)."""
    predictions: prediction.Predictions = prediction.NONE
    """Predictions of the half of the environments that explores less."""
    notes: dict[str, str] = field(default_factory=dict)
    """What a user should know of the environments, by its subject, for the log."""


@dataclass
class _Sums:
    """Sums since the last line of metrics."""

    updates: int = 0
    of_updates: list[Any] = field(default_factory=lambda: [0.0] * 5)
    """Sums of loss, Q-value, gradient norm, age and probability, as tensors that are read when a line is due."""
    learning_rate: float | None = None
    predictions: prediction.Predictions = prediction.NONE
    diagnosis: Diagnosis | None = None
    steps_by_actor: dict[int, int] = field(default_factory=dict)
    learner_seconds: dict[str, float] = field(default_factory=dict)
    actor_seconds: dict[str, float] = field(default_factory=dict)


class Meter:
    """Aggregates reports of actors and updates of the learner to lines of metrics."""

    def __init__(self, environments: int, frames_per_step: int, samples_per_insert: float) -> None:
        self.agent_steps = 0
        self.games = 0
        self.evaluation_mean: float | None = None
        self.evaluation_best: float | None = None
        self.best: float | None = None
        self._environments = environments
        self._frames_per_step = frames_per_step
        self._samples_per_insert = samples_per_insert
        self._scores: deque[float] = deque(maxlen=RETURN_WINDOW)
        self._lengths: deque[int] = deque(maxlen=RETURN_WINDOW)
        self._scores_by_actor: dict[int, deque[float]] = {}
        self._parameter_updates: dict[int, int] = {}
        self._epsilon: dict[int, float] = {}
        self._sums = _Sums()
        self._own: dict[str, float] = {}
        self._sampled = self._inserted = 0
        self._waited: dict[str, float] | None = {}
        self.waits_s: dict[str, float] = {}
        """Seconds between the last two lines in which each actor, by its number, waited for the replay ratio."""
        self._earlier_s = 0.0
        self._started = self._last_time = time.perf_counter()
        self.reported_steps = self._last_updates = 0

    @property
    def session_s(self) -> float:
        """Seconds of this session."""
        return time.perf_counter() - self._started

    @property
    def time_s(self) -> float:
        """Seconds of training over all sessions."""
        return self._earlier_s + self.session_s

    @property
    def seconds_since_line(self) -> float:
        """Seconds since the last line of metrics."""
        return time.perf_counter() - self._last_time

    def leave_out(self, seconds: float) -> None:
        """Excludes `seconds` that were not training, such as an evaluation, from times and rates."""
        self._started += seconds
        self._last_time += seconds

    def add_report(self, report: ActorReport) -> None:
        """Adds the report of an actor."""
        self.agent_steps += report.steps
        self._parameter_updates[report.actor] = report.parameter_updates
        self._epsilon[report.actor] = report.epsilon
        steps = self._sums.steps_by_actor
        steps[report.actor] = steps.get(report.actor, 0) + report.steps
        add_seconds(self._sums.actor_seconds, report.seconds)
        self._sums.predictions += report.predictions
        scores = self._of_actor(report.actor)
        for game in report.games:
            self.games += 1
            self.best = game.score if self.best is None else max(self.best, game.score)
            scores.append(game.score)
            # Environments explore less with rising number; scores of the lower half are mostly exploration.
            if 2 * game.environment + 1 >= self._environments:
                self._scores.append(game.score)
                self._lengths.append(game.steps)

    @property
    def score(self) -> float | None:
        """Mean score of the last games of the environments that explore less; `None` before the first of them."""
        return _mean(list(self._scores))

    def _of_actor(self, actor: int) -> deque[float]:
        return self._scores_by_actor.setdefault(actor, deque(maxlen=ACTOR_WINDOW))

    def add_update(self, update: Update, mean_age: Any, mean_probability: Any) -> None:
        """Adds an update, and the means of its batch, without reading tensors: a read would wait for the GPU."""
        sums = self._sums
        sums.updates += 1
        sums.learning_rate = update.learning_rate
        added = (update.loss, update.q_mean, update.gradient_norm, mean_age, mean_probability)
        sums.of_updates = [total + value for total, value in zip(sums.of_updates, added, strict=True)]

    def log(self, name: str, value: float) -> None:
        """Adds a callback's value to the next line, unless it is NaN or infinite."""
        finite = _finite(float(value))
        if finite is not None:
            self._own[str(name)] = finite

    def add_diagnosis(self, diagnosis: Diagnosis) -> None:
        """Adds a diagnosis of the learner to the next line."""
        self._sums.diagnosis = diagnosis

    def add_evaluation(self, mean: float) -> None:
        """Adds the mean score of an evaluation."""
        self.evaluation_mean = mean
        self.evaluation_best = mean if self.evaluation_best is None else max(self.evaluation_best, mean)

    def add_learner_time(self, seconds: dict[str, float], acting: Collection[str] = ()) -> None:
        """Adds the learner's seconds by activity; `acting` are activities of the actor in a serial run."""
        add_seconds(self._sums.learner_seconds, {name: value for name, value in seconds.items() if name not in acting})
        acted = {name: value for name, value in seconds.items() if name in acting}
        if acted:
            add_seconds(self._sums.actor_seconds, acted)
            add_seconds(self._sums.learner_seconds, {"act": sum(acted.values())})

    @property
    def env_frames(self) -> int:
        """Emulator frames played."""
        return self.agent_steps * self._frames_per_step

    def line(
        self,
        updates: int,
        publications: int,
        table: dict[str, Any],
        seconds_left: Callable[[float], float | None] = lambda _: None,
        cost: Cost | None = None,
    ) -> Metrics:
        """Returns the metrics since the last line."""
        now = time.perf_counter()
        diagnosis = self._sums.diagnosis
        elapsed = max(now - self._last_time, 1e-9)
        sums, self._sums = self._sums, _Sums()
        by_actor = {str(actor): _mean(list(scores)) for actor, scores in sorted(self._scores_by_actor.items())}
        predictions = sums.predictions
        loss, q, norm, age, probability = (
            float(total) / sums.updates if sums.updates else None for total in sums.of_updates
        )
        lags = [updates - self._parameter_updates[actor] for actor in sums.steps_by_actor]
        steps_per_s = round((self.agent_steps - self.reported_steps) / elapsed, 2)
        left = seconds_left(steps_per_s)
        costs: dict[str, Any] = {name: getattr(cost, name, None) for name in COSTS}
        metrics = Metrics(
            time_s=round(self._earlier_s + now - self._started, 3),
            seconds_left=None if left is None else round(left, 1),
            env_frames=self.env_frames,
            agent_steps=self.agent_steps,
            agent_steps_per_s=steps_per_s,
            learner_updates=updates,
            learner_updates_per_s=round((updates - self._last_updates) / elapsed, 2),
            replay_steps=table["steps"],
            replay_bytes=table["bytes"],
            return_mean=self.score,
            return_best=self.best,
            length_mean=_mean(list(self._lengths)),
            epsilon=_mean([self._epsilon[actor] for actor in sums.steps_by_actor]),
            td_loss=_finite(loss),
            q_mean=_finite(q),
            gradient_norm=_finite(norm),
            parameter_version=publications,
            parameter_lag=_mean(lags),
            sample_age=age,
            samples_per_insert=table["sampled_items"] / max(table["inserted_items"], 1),
            samples_per_insert_now=self._ratio_now(table["sampled_items"], table["inserted_items"]),
            samples_per_insert_target=self._samples_per_insert,
            stale_updates=table["stale_updates"],
            games=self.games,
            evaluation_mean=self.evaluation_mean,
            evaluation_best=self.evaluation_best,
            learner_time=_shares(sums.learner_seconds),
            actor_time=_shares(sums.actor_seconds),
            actor_scores={actor: score for actor, score in by_actor.items() if score is not None},
            actor_steps_per_s={str(a): round(steps / elapsed, 2) for a, steps in sorted(sums.steps_by_actor.items())},
            actor_waits=self._waits(table.get("by_writer", []), elapsed),
            **costs,
            learning_rate=sums.learning_rate,
            q_predicted=_finite(predictions.q / predictions.steps) if predictions.steps else None,
            return_discounted=_finite(predictions.discounted / predictions.steps) if predictions.steps else None,
            priority_total=table.get("total_priority"),
            priority_max=table.get("max_priority"),
            priority_concentration=None
            if probability is None or "items" not in table
            else table["items"] * probability,
            **({} if diagnosis is None else vars(diagnosis)),
            own=self._own,
        )
        self._own = {}
        self._last_time, self.reported_steps, self._last_updates = now, self.agent_steps, updates
        return metrics

    def _ratio_now(self, sampled: int, inserted: int) -> float | None:
        more_sampled, more_inserted = sampled - self._sampled, inserted - self._inserted
        self._sampled, self._inserted = sampled, inserted
        # A restarted server counts from zero.
        return more_sampled / more_inserted if more_inserted > 0 and more_sampled >= 0 else None

    def _waits(self, writers: list[dict[str, Any]], elapsed: float) -> dict[str, float]:
        waited: dict[str, float] = {}
        for writer in writers:
            kind, _, actor = writer["name"].partition(" ")
            if kind == "actor":
                waited[actor] = waited.get(actor, 0.0) + writer["waited_s"]
        # Writers of joined actors outlive a session, so the first totals include waits of the previous session.
        earlier, self._waited = waited if self._waited is None else self._waited, waited
        # The writer of a restarted actor counts from zero.
        since = {actor: max(0.0, total - earlier.get(actor, 0.0)) for actor, total in waited.items()}
        self.waits_s = since
        return {actor: round(min(1.0, since[actor] / elapsed), 4) for actor in sorted(since, key=int)}

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain JSON values."""
        return {
            "time_s": self.time_s,
            "agent_steps": self.agent_steps,
            "games": self.games,
            "best": self.best,
            "evaluation_mean": self.evaluation_mean,
            "evaluation_best": self.evaluation_best,
            "scores": list(self._scores),
            "lengths": list(self._lengths),
            "scores_by_actor": {str(actor): list(scores) for actor, scores in self._scores_by_actor.items()},
            "updates": self._last_updates,
            "steps": self.reported_steps,
            "sampled": self._sampled,
            "inserted": self._inserted,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from a result of `state`."""
        self._earlier_s = state["time_s"]
        self.agent_steps = state["agent_steps"]
        self.games = state["games"]
        self.best = state["best"]
        self.evaluation_mean = state["evaluation_mean"]
        self._scores.extend(state["scores"])
        self.evaluation_best = state["evaluation_best"]
        self._lengths.extend(state["lengths"])
        for actor, scores in state["scores_by_actor"].items():
            self._of_actor(int(actor)).extend(scores)
        self._sampled, self._inserted = state["sampled"], state["inserted"]
        self._waited = None
        self._last_updates = state["updates"]
        self.reported_steps = state["steps"]


def _shares(seconds: dict[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: round(value / total, 4) for name, value in sorted(seconds.items())} if total else {}


def _mean(values: list[float] | list[int]) -> float | None:
    return sum(values) / len(values) if values else None


def _finite(value: float | None) -> float | None:
    # JSON has no NaN; a loss that has diverged is null.
    return value if value is not None and math.isfinite(value) else None
