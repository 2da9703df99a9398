"""Scores for publication: standard evaluation protocols, and intervals over games or runs.

Statistics as in rliable (Agarwal et al., 2021): interquartile mean and 95 % percentile bootstrap. SciPy
computes both, because rliable 1.2 needs arch before 8.0, which has no wheel for Python 3.14 and fails to import with
pandas 3.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

import innet_drl as innet
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.display import Progress, score, silent
from innet_drl.train.play.agent import Agent, load
from innet_drl.train.play.evaluation import Evaluation, evaluate, joined
from innet_drl.train.settings.config import Config

PROTOCOLS: dict[str, dict[str, Any]] = {
    "mnih2015": {
        "evaluation_games": 30,
        "evaluation_epsilon": 0.05,
        "evaluation_frames": 18_000,
        "no_ops": 30,
        "sticky_actions": 0.0,
        "full_action_set": False,
    },
    "machado2018": {
        "evaluation_games": 100,
        "evaluation_frames": 18_000,
        "no_ops": 0,
        "sticky_actions": 0.25,
        "full_action_set": True,
    },
}
"""Settings of `--protocol`.

Mnih et al. (2015), "Human-level control through deep reinforcement learning", Methods: 30 games of up to 5 minutes,
epsilon 0.05, random no-ops, the game's own actions. Machado et al. (2018), "Revisiting the Arcade Learning
Environment", section 5: sticky actions of 0.25, 18 actions, games of up to 5 minutes, means of 100 games.
"""
ATARI_CONDITIONS = ("no_ops", "sticky_actions")
"""Conditions that only `atari/<game>` has."""
CONDITIONS = ("evaluation_games", "evaluation_epsilon", "evaluation_frames", *ATARI_CONDITIONS)
"""Settings of an evaluation, which must be equal for runs that are evaluated together."""
ENVIRONMENT = ("environment", "environment_args", "environment_wrappers", "full_action_set")
"""Settings of the game itself."""

CONFIDENCE = 0.95
"""Probability of the interval."""
RESAMPLES = 50_000
"""Number of bootstrap samples, as rliable's default."""


def aggregate(scores: Sequence[float]) -> dict[str, Any]:
    """Returns the interquartile mean and its interval, which is null for one score.

    The interquartile mean excludes the lowest and highest quarters; for fewer than four scores it is the mean.
    """
    # SciPy takes a second to import.
    from scipy import stats

    def interquartile_mean(values: Any, axis: int = -1) -> Any:
        return stats.trim_mean(values, 0.25, axis=axis)

    interval = None
    if len(scores) > 1:
        found = stats.bootstrap(
            (np.asarray(scores),),
            interquartile_mean,
            n_resamples=RESAMPLES,
            batch=1_000,
            confidence_level=CONFIDENCE,
            method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval
        interval = [float(found.low), float(found.high)]
    return {"interquartile_mean": float(interquartile_mean(np.asarray(scores))), "interval": interval}


@dataclass(frozen=True)
class Report:
    """An evaluation of one or several runs."""

    config: Config
    """Conditions of play."""
    protocol: str | None
    seeds: tuple[int, ...]
    runs: tuple[Path, ...]
    agents: tuple[Agent, ...]
    evaluations: tuple[Evaluation, ...]
    """Games of each run, with all seeds."""

    @property
    def scores(self) -> list[float]:
        """Means of several runs, or the scores of one run's games."""
        means = [evaluation.mean for evaluation in self.evaluations]
        return means if len(means) > 1 else self.evaluations[0].scores

    @functools.cached_property
    def figures(self) -> dict[str, Any]:
        """Interquartile mean of `scores`, its interval, and whether it is over runs or over games."""
        return {**aggregate(self.scores), "interval_over": "runs" if len(self.runs) > 1 else "games"}

    def __str__(self) -> str:
        lines = [f"{run}: {evaluation}" for run, evaluation in zip(self.runs, self.evaluations, strict=True)]
        mean, interval, over = self.figures.values()
        lines.append(f"interquartile mean {score(mean)}")
        if interval is not None:
            low, high = interval
            lines[-1] += (
                f", {CONFIDENCE:.0%} interval {score(low)} to {score(high)} (bootstrap over {len(self.scores)} {over})"
            )
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as plain JSON values: conditions, aggregates, and the games of each run."""
        conditions = dataclasses.asdict(self.evaluations[0])
        return {
            "innet_drl": innet.__version__,
            "environment": self.config.environment_name,
            "protocol": self.protocol,
            **{name: value for name, value in conditions.items() if name not in ("scores", "cut_off")},
            "seeds": list(self.seeds),
            "games": len(self.evaluations[0].scores),
            "mean": statistics.fmean(self.scores),
            **self.figures,
            "runs": [
                {
                    "run": str(run),
                    "checkpoint": str(agent.checkpoint),
                    "agent_steps": agent.agent_steps,
                    "learner_updates": agent.learner_updates,
                    "mean": evaluation.mean,
                    "standard_error": evaluation.standard_error,
                    "cut_off": evaluation.cut_off,
                    "scores": evaluation.scores,
                }
                for run, agent, evaluation in zip(self.runs, self.agents, self.evaluations, strict=True)
            ],
        }


def evaluate_runs(
    runs: Sequence[Path],
    *,
    best: bool = False,
    protocol: str | None = None,
    seeds: Sequence[int] = (0,),
    changes: Mapping[str, Any] = MappingProxyType({}),
    progress: Progress = silent,
) -> Report:
    """Plays `evaluation_games` games for each seed with the agents of several runs of one environment.

    `changes` override conditions (`CONDITIONS`) of the protocol or of the runs.
    """
    if not runs:
        raise ConfigurationError("innet-drl evaluate plays with the agents of runs: name their folders, runs/...")
    if len(set(seeds)) < len(seeds) or not seeds or min(seeds) < 0:
        raise ConfigurationError(f"--seeds {' '.join(map(str, seeds))}: give each seed once, at least 0")
    agents = [load(run, best=best) for run in runs]
    configs = [
        _conditions(run, agent.config.evaluated, protocol, changes) for run, agent in zip(runs, agents, strict=True)
    ]
    for run, config in zip(runs, configs, strict=True):
        _check_equal(runs[0], configs[0], run, config)
    played = []
    for number, (run, agent, config) in enumerate(zip(runs, agents, configs, strict=True), 1):
        name = f"run {number} of {len(runs)}, {run}" if len(runs) > 1 else str(run)
        played.append(_play(name, agent, config, seeds, progress))
    return Report(configs[0], protocol, tuple(seeds), tuple(runs), tuple(agents), tuple(played))


def _conditions(run: Path, config: Config, protocol: str | None, changes: Mapping[str, Any]) -> Config:
    wanted = {**(PROTOCOLS[protocol] if protocol else {}), **changes}
    if not config.is_atari:
        given = [_flag(name) for name in ATARI_CONDITIONS if name in changes]
        given += [f"--protocol {protocol}"] if protocol else []
        if given:
            raise ConfigurationError(
                f"{' and '.join(given)}: the environment of {run}, {config.environment_name}, is not atari/<game>: its "
                "games have the settings that it was made with (environment_args)"
            )
    if wanted.get("full_action_set", config.full_action_set) != config.full_action_set:
        has, needs = ("all 18", "the minimal set") if config.full_action_set else ("the minimal set", "all 18")
        raise ConfigurationError(
            f"--protocol {protocol}: it plays with {needs} of the actions, and {run} was trained with {has}: train "
            f"with full_action_set={wanted['full_action_set']}"
        )
    return dataclasses.replace(config, **wanted)


def _check_equal(first: Path, expected: Config, run: Path, config: Config) -> None:
    if changed := config.changed(expected, ENVIRONMENT):
        raise ConfigurationError(
            f"{run} and {first} differ in {' and '.join(changed)}: evaluate runs of one environment together"
        )
    names = [name for name in CONDITIONS if config.is_atari or name not in ATARI_CONDITIONS]
    different = [_flag(name) for name in config.changed(expected, names)]
    if different:
        raise ConfigurationError(f"{run} and {first} differ in {' and '.join(different)}: give one value for all")


def _flag(condition: str) -> str:
    """Returns the flag of `innet-drl evaluate` for a condition."""
    return f"--{condition.removeprefix('evaluation_').replace('_', '-')}"


def _play(name: str, agent: Agent, config: Config, seeds: Sequence[int], progress: Progress) -> Evaluation:
    def show(activity: str, done: str) -> None:
        progress(f"{activity} of {name}", f"seed {seed}, {done}" if len(seeds) > 1 else done)

    evaluations = []
    for seed in seeds:
        evaluation = evaluate(config, agent.network, seed=seed, progress=show)
        assert evaluation is not None
        evaluations.append(evaluation)
    return joined(evaluations)
