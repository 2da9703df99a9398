"""Curves of training runs for a report."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import charts
from benchmarks.table import today
from innet_drl.analysis.recorded_run import read_run

EVERY_S = 30.0
"""Seconds between two points of a curve."""
GAMES = 100
"""Last games whose mean is the score, as in a run's metrics."""
FRAMES = 4
"""Frames of a step of the Atari games."""

Line = dict[str, Any]


def learning(runs: tuple[Path, ...], name: str = "breakout") -> None:
    """Writes curves and a picture of them into the folder of today's report on learning, and prints the evaluations.

    Args:
        runs: Folders of runs, whose names are the curves' labels. A folder without `config.yaml` has TensorBoard's
            events of CleanRL.
        name: Name of the two files.
    """
    record = today("learning") / f"{name}.jsonl"
    with record.open("w") as file:
        for run in runs:
            recorded = _ours(run) if (run / "config.yaml").is_file() else _cleanrl(run)
            for line in recorded:
                file.write(json.dumps({"run": run.name, **line}) + "\n")
                if "evaluation" in line:
                    print(f"{run.name}: {json.dumps(line['evaluation'])}")
    charts.learning(record, record.with_suffix(".svg"))


def _ours(folder: Path) -> Iterator[Line]:
    run = read_run(folder, folder.name, 0, lambda *_: None)
    columns = [run.column(name) for name in ("time_s", "env_frames", "learner_updates", "return_mean")]
    yield from _thinned(np.stack(columns, 1).tolist())
    if run.evaluation is not None:
        yield {"evaluation": asdict(run.evaluation)}


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
