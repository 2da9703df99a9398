"""What a preset's measured runs have reached, for the last line of a run that is like them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from innet_drl.train.settings.config import Config
from innet_drl.train.settings.presets import PRESETS


@dataclass(frozen=True)
class Curve:
    """Scores of the environments that explore less, over updates: the mean of all runs of a report."""

    report: str
    runs: int
    points: tuple[tuple[int, float], ...]
    """Thousands of updates, and the score."""

    def at(self, updates: int) -> float:
        """The score after a number of updates, between two points by a straight line."""
        thousands, scores = zip(*self.points, strict=True)
        return float(np.interp(updates / 1000, thousands, scores))


CURVES = {
    "breakout": Curve(
        "docs/reports/2026-11-26-learning.md",
        4,
        (
            (0, 0),
            (10, 5.8),
            (20, 14.4),
            (30, 21.1),
            (40, 28.6),
            (50, 37.9),
            (60, 44.8),
            (80, 63.8),
            (100, 85.3),
            (109, 97.0),
        ),
    )
}
"""Curves by preset."""

_WITHOUT_INFLUENCE = (
    *("minutes", "steps", "seed", "replay", "namespace", "replay_ca", "replay_patience", "actor_patience"),
    *("environment_threads", "actor_threads", "actor_restarts", "environment_timeout"),
    *("prefetch", "max_bytes", "device", "learner_threads", "targets_ahead", "numerics", "layout"),
    *("evaluation_environment", "evaluation_environment_args", "evaluation_games", "evaluation_epsilon"),
    *("evaluation_frames", "evaluation_period", "target_return"),
    *("video", "checkpoint_minutes", "checkpoint_replay", "report_seconds", "report_steps", "trace_seconds"),
)
"""Settings that do not change what is learned by an update."""


def expectation(config: Config, updates: int, seconds: float) -> str | None:
    """Returns what runs with these settings had after as many updates, and what follows; `None` for other settings.

    Args:
        config: The run's.
        updates: Its updates.
        seconds: Its seconds of training, for the time that the rest takes at its rate.
    """
    neutral = {setting: getattr(config, setting) for setting in _WITHOUT_INFLUENCE}
    alike = (curve for name, curve in CURVES.items() if dataclasses.replace(PRESETS[name], **neutral) == config)
    curve = next(alike, None)
    if curve is None or updates == 0:
        return None
    end, best = curve.points[-1]
    runs = "a run" if curve.runs == 1 else f"{curve.runs} runs"
    had = f"{runs} with these settings scored {curve.at(updates):.0f} after as many updates"
    if updates >= 1000 * end:
        return f"{had} ({curve.report})"
    minutes = (1000 * end - updates) * seconds / updates / 60
    return f"{had}, and {best:.0f} after {1000 * end:,}: {minutes:.0f} minutes more at this rate ({curve.report})"
