"""Metrics of a run: what each one means, the meter in which the parts of a run record them, the charts, and totals.

A new metric is a line of `METRICS`, and a call of `Meter.record` where its value arises.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from innet_drl.train.observe.stopwatch import WAITING, add_seconds

Metrics = Mapping[str, float]
"""A line of metrics: values by name, as far as they exist. Metrics of several values have the names
`<metric>/<key>`."""
Info = bool | int | float | str
"""Values of an environment's `info` that reports have."""


@dataclass(frozen=True)
class Metric:
    """Description of a metric."""

    tag: str
    """Its tag in TensorBoard and Weights & Biases, whose x-axis is `agent_steps`; of several values the prefix."""
    unit: str
    meaning: str


METRICS = {
    "time_s": Metric("counts/time_s", "seconds", "training time over all sessions of the run"),
    "seconds_left": Metric("counts/seconds_left", "seconds", "until training ends, at the present rate"),
    "env_frames": Metric("counts/env_frames", "frames", "emulator frames; outside Atari equal to agent_steps"),
    "agent_steps": Metric("counts/agent_steps", "steps", "actions in all environments, without resets"),
    "agent_steps_per_s": Metric("charts/SPS", "steps/s", "since the last line"),
    "learner_updates": Metric("counts/learner_updates", "updates", "steps of the optimizer"),
    "learner_updates_per_s": Metric("charts/updates_per_s", "updates/s", "since the last line"),
    "replay_steps": Metric("replay/steps", "steps", "in the replay memory"),
    "replay_bytes": Metric("replay/bytes", "bytes", "size of these steps"),
    "return_mean": Metric("charts/episodic_return", "score", "last 100 games of environments that explore less"),
    "return_best": Metric("charts/best_return", "score", "best game"),
    "length_mean": Metric("charts/episodic_length", "steps", "mean length of the games of return_mean"),
    "epsilon": Metric("charts/epsilon", "probability", "random actions, mean over the actors' reports"),
    "td_loss": Metric("losses/td_loss", "", "weighted loss, mean of the updates since the last line"),
    "q_mean": Metric("losses/q_values", "return", "Q-value of the sampled actions, mean since the last line"),
    "gradient_norm": Metric("losses/gradient_norm", "", "before clipping, mean of the updates since the last line"),
    "parameter_version": Metric("parameters/version", "publications", "publications of the learner's parameters"),
    "parameter_lag": Metric("parameters/lag", "updates", "since the actors' parameters, mean over their reports"),
    "sample_age": Metric("replay/sample_age", "steps", "inserted between a transition's insertion and its sampling"),
    "samples_per_insert": Metric("replay/samples_per_insert", "ratio", "samples of a transition, whole run"),
    "samples_per_insert_now": Metric("replay/samples_per_insert_now", "ratio", "the same since the last line"),
    "samples_per_insert_target": Metric("replay/samples_per_insert_target", "ratio", "setting samples_per_insert"),
    "stale_updates": Metric("replay/stale_updates", "transitions", "evicted before their new priority arrived"),
    "games": Metric("counts/games", "games", "finished games"),
    "evaluation_mean": Metric("charts/evaluation_return", "score", "mean of the last evaluation"),
    "evaluation_best": Metric("charts/best_evaluation_return", "score", "mean of the best evaluation"),
    "learner_time": Metric("learner_time", "share of 1", "the learner's time since the last line, by activity"),
    "actor_time": Metric("actor_time", "share of 1", "the actors' time since the last line, by activity"),
    "actor_scores": Metric("actor_return", "score", "mean of the last 20 games of each actor, by its number"),
    "actor_steps_per_s": Metric("actor_SPS", "steps/s", "of each actor since the last line"),
    "actor_waits": Metric("actor_waits", "share of 1", "time in which each actor waited for the replay ratio"),
    "processor_s": Metric("cost/processor_s", "seconds", "processor time of all processes of the run"),
    "processor_s_per_million_frames": Metric("cost/processor_s_per_million_frames", "seconds", "over the run"),
    "joules": Metric("cost/joules", "J", "energy of processors and GPUs, where the machine counts it"),
    "joules_per_million_frames": Metric("cost/joules_per_million_frames", "J", "over the run"),
    "resident_bytes": Metric("cost/resident_bytes", "bytes", "memory of all processes; shared memory counts in each"),
    "learning_rate": Metric("charts/learning_rate", "", "Adam's step size at the last update"),
    "priority_total": Metric("priorities/total", "priority", "sum in the memory, after the exponent"),
    "priority_max": Metric("priorities/max", "priority", "of new transitions without one, before the exponent"),
    "priority_concentration": Metric("priorities/concentration", "ratio", "1 if all transitions are sampled alike"),
    "own": Metric("own", "", "values that callbacks have logged since the last line, by name"),
}
"""Metrics by name, in the order of a line; docs/reference/statistics.md defines each exactly."""


def values_of(metrics: Metrics, name: str) -> dict[str, float]:
    """Returns the values of a metric of several values, by key."""
    return {key: value for each, value in metrics.items() for metric, _, key in [each.partition("/")] if metric == name}


def tags(metrics: Metrics) -> dict[str, float]:
    """Returns a line of metrics with TensorBoard's tags as names."""
    found = {}
    for name, value in metrics.items():
        metric, slash, key = name.partition("/")
        found[METRICS[metric].tag + slash + key] = value
    return found


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
    means: dict[str, float] = field(default_factory=dict)
    """Metrics that the actor records, by name; a line has the mean of all reports."""


class Meter:
    """What the parts of a run have recorded since the last line of metrics, and the clock of training."""

    def __init__(self) -> None:
        self._earlier_s = 0.0
        self._started = self._last_line = time.perf_counter()
        self._begin_line()

    def _begin_line(self) -> None:
        self._values: dict[str, float] = {}
        self._means: dict[str, tuple[Any, int]] = {}
        self._amounts: dict[str, float] = {}
        self._seconds: dict[str, dict[str, float]] = {}

    @property
    def session_s(self) -> float:
        """Seconds of training of this session."""
        return time.perf_counter() - self._started

    @property
    def time_s(self) -> float:
        """Seconds of training over all sessions."""
        return self._earlier_s + self.session_s

    @property
    def seconds_since_line(self) -> float:
        """Seconds since the last line of metrics."""
        return time.perf_counter() - self._last_line

    def leave_out(self, seconds: float) -> None:
        """Excludes `seconds` that were not training, such as an evaluation, from times and rates."""
        self._started += seconds
        self._last_line += seconds

    def resume(self, time_s: float) -> None:
        """Adds the seconds of training of earlier sessions."""
        self._earlier_s = time_s

    def record(self, name: str, value: float | None) -> None:
        """Records a value for the next line, in place of an earlier one; `None` has no effect."""
        if value is not None:
            self._values[name] = value

    def record_mean(self, name: str, value: Any) -> None:
        """Adds a value to a mean. A tensor is read when the line is due: a read would wait for the GPU."""
        total, count = self._means.get(name, (0.0, 0))
        self._means[name] = (total + value, count + 1)

    def scale(self, name: str, factor: float) -> None:
        """Multiplies a mean recorded since the last line by a factor that only the line has."""
        if name in self._means:
            total, count = self._means[name]
            self._means[name] = (total * factor, count)

    def record_rate(self, name: str, amount: float) -> None:
        """Adds to an amount, which the next line has per second."""
        self._amounts[name] = self._amounts.get(name, 0.0) + amount

    def record_seconds(self, name: str, seconds: Mapping[str, float]) -> None:
        """Adds seconds by activity, which the next line has as shares of their sum."""
        add_seconds(self._seconds.setdefault(name, {}), seconds)

    def line(self) -> dict[str, float]:
        """Returns the metrics since the last line, without those that are infinite or NaN, which JSON lacks."""
        now = time.perf_counter()
        elapsed = max(now - self._last_line, 1e-9)
        found = {"time_s": round(self._earlier_s + now - self._started, 3), **self._values}
        found |= {name: float(total) / count for name, (total, count) in self._means.items() if count}
        found |= {name: round(amount / elapsed, 4) for name, amount in self._amounts.items()}
        for name, seconds in self._seconds.items():
            whole = sum(seconds.values())
            found |= {f"{name}/{activity}": round(each / whole, 4) for activity, each in seconds.items() if whole}
        self._last_line = now
        self._begin_line()
        order = {name: number for number, name in enumerate(METRICS)}
        ordered = sorted(found.items(), key=lambda item: order[item[0].partition("/")[0]])
        return {name: value for name, value in ordered if math.isfinite(value)}


@dataclass(frozen=True)
class Panel:
    """A chart over the agent steps."""

    unit: str
    curves: Mapping[str, str]
    """Label of each metric, or of each key (`actor`) of one with several values."""
    runs: Literal["by metric", "by run", "one"] = "by metric"
    """Charts of several runs: one of each metric, with the runs as curves, or one of each run, or none."""
    is_share: bool = False
    is_stacked: bool = False
    is_logarithmic: bool = False

    @property
    def tags(self) -> list[str]:
        """TensorBoard's tags of the curves, as regular expressions."""
        found = []
        for name in self.curves:
            metric, slash, key = name.partition("/")
            found.append(f"{METRICS[metric].tag}{slash}{key}(/.*)?$")
        return found


PANELS = {
    "Score": Panel(
        "", {"return_mean": "mean of the last 100 games", "evaluation_mean": "evaluation", "return_best": "best game"}
    ),
    "Score of each actor": Panel("mean of its last 20 games", {"actor_scores": "actor"}, "by run"),
    "Q-loss": Panel("weighted", {"td_loss": ""}, is_logarithmic=True),
    "Memory": Panel("steps in the replay memory", {"replay_steps": ""}),
    "Replay ratio": Panel(
        "samples per insert",
        {
            "samples_per_insert_now": "reached",
            "samples_per_insert": "reached since the start",
            "samples_per_insert_target": "target",
        },
    ),
    "Throughput": Panel("steps/s", {"agent_steps_per_s": ""}),
    "Throughput of each actor": Panel("steps/s", {"actor_steps_per_s": "actor"}, "one"),
    "Updates": Panel("updates/s", {"learner_updates_per_s": ""}),
    "The learner waits for samples": Panel("share of its time", {f"learner_time/{WAITING}": ""}, is_share=True),
    "The actors wait for the learner": Panel("share of their time", {"actor_waits": "actor"}, "by run", is_share=True),
    "Q-value": Panel("sampled actions", {"q_mean": ""}),
    "Priorities": Panel("sum, after the exponent", {"priority_total": ""}),
    "Concentration of priorities": Panel("1 if uniform", {"priority_concentration": ""}),
    "Gradient norm": Panel("before clipping", {"gradient_norm": ""}),
    "Age of samples": Panel("steps", {"sample_age": ""}),
    "Lag of the actors' parameters": Panel("updates", {"parameter_lag": ""}),
    "Exploration": Panel("probability of random actions", {"epsilon": ""}),
    "Memory of all processes": Panel("bytes", {"resident_bytes": ""}),
    "Time left": Panel("seconds", {"seconds_left": ""}, "one"),
    "The learner's time": Panel("shares", {"learner_time": ""}, "one", is_share=True, is_stacked=True),
    "The actors' time": Panel("shares", {"actor_time": ""}, "one", is_share=True, is_stacked=True),
}
"""Charts by title."""


RETURN_WINDOW = 100
"""Number of last games that `return_mean` averages."""
ACTOR_WINDOW = 20
"""Number of last games of an actor that `actor_scores` averages."""
STATE = ("agent_steps", "games", "best", "evaluation_mean", "evaluation_best")
"""Attributes of `Totals` that a checkpoint has as they are."""


class Totals:
    """Steps, games and scores of all actors, over all sessions of the run.

    Args:
        environments: Environments of all actors.
        frames_per_step: Emulator frames of a step.
    """

    def __init__(self, environments: int, frames_per_step: int) -> None:
        self.agent_steps = 0
        self.reported_steps = 0
        """Steps at the last line of metrics, or at the start of the session."""
        self.games = 0
        self.best: float | None = None
        """Score of the best game."""
        self.evaluation_mean: float | None = None
        self.evaluation_best: float | None = None
        self._environments = environments
        self._frames_per_step = frames_per_step
        self._scores: deque[float] = deque(maxlen=RETURN_WINDOW)
        self._lengths: deque[int] = deque(maxlen=RETURN_WINDOW)
        self._scores_by_actor: dict[int, deque[float]] = {}

    @property
    def env_frames(self) -> int:
        """Emulator frames played."""
        return self.agent_steps * self._frames_per_step

    @property
    def score(self) -> float | None:
        """Mean score of the last games of the environments that explore less; `None` before the first of them."""
        return _mean(self._scores)

    def add_report(self, report: ActorReport, meter: Meter) -> None:
        """Adds the report of an actor, and records what it has for the next line alone."""
        self.agent_steps += report.steps
        meter.record_rate(f"actor_steps_per_s/{report.actor}", report.steps)
        meter.record_seconds("actor_time", report.seconds)
        for name, mean in report.means.items():
            meter.record_mean(name, mean)
        scores = self._of_actor(report.actor)
        for game in report.games:
            self.games += 1
            self.best = game.score if self.best is None else max(self.best, game.score)
            scores.append(game.score)
            # Environments explore less with rising number; scores of the lower half are mostly exploration.
            if 2 * game.environment + 1 >= self._environments:
                self._scores.append(game.score)
                self._lengths.append(game.steps)

    def add_evaluation(self, mean: float) -> None:
        """Adds the mean score of an evaluation."""
        self.evaluation_mean = mean
        self.evaluation_best = mean if self.evaluation_best is None else max(self.evaluation_best, mean)

    def record(self, meter: Meter) -> None:
        """Records the totals for a line of metrics."""
        meter.record("agent_steps", self.agent_steps)
        meter.record("env_frames", self.env_frames)
        meter.record_rate("agent_steps_per_s", self.agent_steps - self.reported_steps)
        self.reported_steps = self.agent_steps
        meter.record("games", self.games)
        meter.record("return_mean", self.score)
        meter.record("return_best", self.best)
        meter.record("length_mean", _mean(self._lengths))
        meter.record("evaluation_mean", self.evaluation_mean)
        meter.record("evaluation_best", self.evaluation_best)
        for actor, scores in sorted(self._scores_by_actor.items()):
            meter.record(f"actor_scores/{actor}", _mean(scores))

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, as plain JSON values."""
        by_actor = {str(actor): list(scores) for actor, scores in self._scores_by_actor.items()}
        games = {"scores": list(self._scores), "lengths": list(self._lengths), "scores_by_actor": by_actor}
        return {**{name: getattr(self, name) for name in STATE}, **games}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continues from a result of `state`."""
        for name in STATE:
            setattr(self, name, state[name])
        self.reported_steps = self.agent_steps
        self._scores.extend(state["scores"])
        self._lengths.extend(state["lengths"])
        for actor, scores in state["scores_by_actor"].items():
            self._of_actor(int(actor)).extend(scores)

    def _of_actor(self, actor: int) -> deque[float]:
        return self._scores_by_actor.setdefault(actor, deque(maxlen=ACTOR_WINDOW))


class MemoryCounters:
    """Counters of the replay memory, as totals and since the last line of metrics."""

    def __init__(self, *, resumed: bool) -> None:
        # Earlier sessions have counted what a resumed run finds at its first line.
        self._before: dict[str, float] | None = None if resumed else {}

    def record(self, meter: Meter, table: Mapping[str, Any]) -> dict[str, float]:
        """Records the counters of `ReplayMemory.stats` for a line of metrics.

        Returns:
            What was added since the last line: `sampled_items`, `inserted_items`, `blocked_samples`, and the seconds in
            which each actor waited for the replay ratio, by `actor <number>`.
        """
        now = {name: table.get(name, 0) for name in ("sampled_items", "inserted_items", "blocked_samples")}
        for writer in table.get("by_writer", ()):
            if writer["name"].startswith("actor "):
                now[writer["name"]] = now.get(writer["name"], 0.0) + writer["waited_s"]
        before, self._before = now if self._before is None else self._before, now
        # A restarted server, and the writer of a restarted actor, count from zero.
        added = {name: max(0, total - before.get(name, 0)) for name, total in now.items()}
        meter.record("replay_steps", table["steps"])
        meter.record("replay_bytes", table["bytes"])
        meter.record("stale_updates", table["stale_updates"])
        meter.record("priority_total", table.get("total_mass"))
        meter.record("priority_max", table.get("max_priority"))
        meter.record("samples_per_insert", now["sampled_items"] / max(now["inserted_items"], 1))
        # Recorded as a probability, which is 1 over the items if all are sampled alike.
        meter.scale("priority_concentration", table.get("items", math.nan))
        if added["inserted_items"]:
            meter.record("samples_per_insert_now", added["sampled_items"] / added["inserted_items"])
        for name in sorted(added):
            if name.startswith("actor "):
                # A wait counts when it ends, and may have begun before the last line.
                share = min(1.0, added[name] / max(meter.seconds_since_line, 1e-9))
                meter.record(f"actor_waits/{name.removeprefix('actor ')}", share)
        return added


def _mean(values: deque[float] | deque[int]) -> float | None:
    return sum(values) / len(values) if values else None
