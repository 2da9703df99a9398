"""The tables of a report: results, settings, machines and versions, and shares of time; a column for each run."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from innet_drl.analysis.recorded_run import FinalEvaluation, RecordedRun
from innet_drl.train.observe.display import number, score, shown
from innet_drl.train.settings.config import Config

NOTHING = "-"
"""Cell of a value that was not recorded."""


@dataclass(frozen=True)
class Row:
    """A row of a table: a cell for each run."""

    name: str
    cells: Sequence[str]
    shares: Sequence[float] = ()
    """Lengths of bars behind the cells, as shares of 1."""

    @property
    def differs(self) -> bool:
        """Whether the runs differ in it."""
        return len(set(self.cells)) > 1


def results(runs: Sequence[RecordedRun]) -> list[Row]:
    """Returns the state of the runs and the most important numbers."""
    rows: list[tuple[str, Callable[[RecordedRun], str]]] = [
        ("state", lambda run: run.state),
        ("environment", lambda run: run.config.environment_name),
        ("training time", _last("time_s")),
        ("time left", lambda run: _last("seconds_left")(run) if run.is_training else NOTHING),
        ("began", _began),
        ("score, mean of the last 100 games", _last("return_mean")),
        ("best game", _last("return_best")),
        ("best evaluation", _last("evaluation_best")),
        ("evaluation after training", lambda run: _mean(run.evaluation)),
        ("the same with sticky actions", lambda run: _mean(run.evaluation and run.evaluation.sticky)),
        ("its interquartile mean, 95 % interval", _interval),
        ("agent steps", _last("agent_steps")),
        ("frames", _last("env_frames")),
        ("games", _last("games")),
        ("updates", _last("learner_updates")),
        ("steps/s, whole run", lambda run: _rate(run, "agent_steps")),
        ("updates/s, whole run", lambda run: _rate(run, "learner_updates")),
        ("replay ratio: target", lambda run: f"{run.config.samples_per_insert:g}"),
        ("replay ratio: since the start", _last("samples_per_insert")),
        ("replay ratio: at the end", _last("samples_per_insert_now")),
        ("memory, steps", _last("replay_steps")),
        ("memory, size", _last("replay_bytes")),
        ("lines of metrics", lambda run: f"{run.lines:,}"),
    ]
    return _known([Row(name, [cell(run) for run in runs]) for name, cell in rows])


def settings(runs: Sequence[RecordedRun]) -> tuple[list[Row], list[Row]]:
    """Returns the settings that differ, between the runs or for one run from the defaults, and all settings."""
    configs = [run.config.as_dict() for run in runs]
    rows = [Row(name, [_setting(config[name]) for config in configs]) for name in configs[0]]
    if len(runs) > 1:
        return [row for row in rows if row.differs], rows
    # Defaults are the same for all environments; CartPole accepts all of them, an Atari game may not.
    defaults = Config(environment="CartPole-v1").as_dict()
    return [row for row in rows if row.name == "environment" or row.cells[0] != _setting(defaults[row.name])], rows


def machines(runs: Sequence[RecordedRun]) -> list[Row]:
    """Returns machine and versions of each run's last session."""
    begun: list[dict[str, Any]] = [
        next((each for each in reversed(run.sessions) if "began" in each), {}) for run in runs
    ]
    names = {
        "host": "host",
        "processor": "processor",
        "cores": "cores",
        "device": "the learner's device",
        "kernel": "Linux",
        "python": "Python",
        "innet_drl": "innet-drl",
    }
    rows = [Row(label, [str(session.get(name, NOTHING)) for session in begun]) for name, label in names.items()]
    versions = [each["versions"] if isinstance(each.get("versions"), dict) else {} for each in begun]
    packages = dict.fromkeys(package for found in versions for package in found)
    rows += [Row(str(package), [str(found.get(package, NOTHING)) for found in versions]) for package in packages]
    return _known(rows)


def times(runs: Sequence[RecordedRun], name: str) -> list[Row]:
    """Returns the shares of a metric's activities, over the whole runs."""
    shares = [run.shares(name) for run in runs]
    activities = dict.fromkeys(key for run in runs for key in run.keys(name))
    return [
        Row(
            activity,
            [f"{share[activity]:.1%}" if activity in share else NOTHING for share in shares],
            [share.get(activity, 0.0) for share in shares],
        )
        for activity in sorted(activities, key=lambda activity: -sum(share.get(activity, 0.0) for share in shares))
    ]


def _known(rows: list[Row]) -> list[Row]:
    return [row for row in rows if set(row.cells) != {NOTHING}]


def _last(name: str) -> Callable[[RecordedRun], str]:
    return lambda run: shown(name, run.last(name))


def _rate(run: RecordedRun, name: str) -> str:
    seconds, count = run.last("time_s"), run.last(name)
    return number(count / seconds, 1) if seconds and count is not None else NOTHING


def _began(run: RecordedRun) -> str:
    began = [session["began"] for session in run.sessions if isinstance(session.get("began"), str)]
    if not began:
        return NOTHING
    try:
        first = f"{datetime.datetime.fromisoformat(began[0]):%Y-%m-%d %H:%M}"
    except ValueError:
        first = began[0]
    return first if len(began) == 1 else f"{first}; {len(began)} sessions"


def _mean(evaluation: FinalEvaluation | None) -> str:
    if evaluation is None:
        return NOTHING
    error = "" if evaluation.standard_error is None else f", standard error {score(evaluation.standard_error)}"
    return f"{score(evaluation.mean)}, {evaluation.games} games{error}"


def _interval(run: RecordedRun) -> str:
    if run.evaluation is None or run.evaluation.interval is None:
        return NOTHING
    low, high = map(score, run.evaluation.interval)
    return f"{score(run.evaluation.interquartile_mean)}, {low} to {high}"


def _setting(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    # Reports are shared: passwords in addresses are removed.
    return re.sub(r"(://[^/@\s]*:)[^/@\s]+@", r"\1…@", text)
