"""Totals of a run: steps, games and scores of its actors, and the counters of its replay memory."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Any

from innet_drl.train.observe.metrics import ActorReport, Meter

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
        for name, (mean, count) in report.means.items():
            meter.record_mean(name, mean, count)
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
        meter.record("priority_total", table.get("total_priority"))
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
