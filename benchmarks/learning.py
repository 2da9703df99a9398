"""Curves of training runs for a report."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import charts
from benchmarks.report import Line
from innet_drl.analysis.recorded_run import read_run

EVERY_S = 30.0
"""Seconds between two points of a curve."""
GAMES = 100
"""Last games whose mean is the score, as in a run's metrics."""
FRAMES = 4
"""Frames of a step of the Atari games."""


def learning(runs: tuple[Path, ...], record: Path) -> None:
    """Adds the curves of runs to the raw data of a report, and draws the picture beside it.

    Args:
        runs: Folders of runs, whose names are the curves' labels. A folder without `config.yaml` has TensorBoard's
            events of CleanRL.
        record: The raw data, such as `docs/reports/2026-11-26-learning/breakout.jsonl`. Other runs in it stay.
    """
    kept = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    lines = [line for line in kept if line["run"] not in {run.name for run in runs}]
    for run in runs:
        recorded = _ours(run) if (run / "config.yaml").is_file() else _cleanrl(run)
        lines += [{"run": run.name, **line} for line in recorded]
    record.parent.mkdir(parents=True, exist_ok=True)
    record.write_text("".join(json.dumps(line) + "\n" for line in lines))
    charts.learning(record, record.with_suffix(".svg"))


def _ours(folder: Path) -> Iterator[Line]:
    run = read_run(folder, folder.name)
    columns = [run.column(name) for name in ("time_s", "env_frames", "learner_updates", "return_mean")]
    yield from _thinned(np.stack(columns, 1).tolist())
    if run.evaluation is not None:
        yield {"evaluation": run.evaluation}


def _cleanrl(folder: Path) -> Iterator[Line]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0}).Reload()
    first = events.FirstEventTimestamp()
    games: deque[float] = deque(maxlen=GAMES)
    points = []
    for event in events.Scalars("charts/episodic_return"):
        games.append(event.value)
        points.append((event.wall_time - first, FRAMES * event.step, None, float(np.mean(games))))
    yield from _thinned(points)


def _thinned(points: list[Any]) -> Iterator[Line]:
    """The first point of each `EVERY_S` seconds, and the last one."""
    following = 0.0
    for number, (seconds, frames, updates, score) in enumerate(points, 1):
        if np.isfinite(score) and (seconds >= following or number == len(points)):
            following = seconds - seconds % EVERY_S + EVERY_S
            yield {
                "seconds": round(seconds),
                "frames": int(frames),
                "updates": None if updates is None else int(updates),
                "score": round(score, 2),
            }
