"""A recording of Breakout, so that every system pushes the same frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from innet_drl.papers.messages import TRANSITIONS
from innet_drl.papers.settings import ACTIONS, ENVIRONMENT, STREAMS
from innet_drl.train import environments
from innet_drl.train.config import Config

PUSHES = 8
"""Distinct pushes of a recording, which then repeats."""
SKIPPED = 100
"""Steps before the recording, as games start alike."""
STEPS = TRANSITIONS // STREAMS


def record(path: Path, seed: int = 0) -> None:
    """Plays `STREAMS` games at random and writes `PUSHES * STEPS` steps to an npz file."""
    random = np.random.default_rng(seed)
    envs = environments.make(Config(environment=ENVIRONMENT, stack=4, environments=STREAMS), STREAMS)
    observation = envs.reset(seed)
    final = np.zeros(STREAMS, np.bool_)
    rows: list[dict[str, Any]] = []
    for step_number in range(SKIPPED + PUSHES * STEPS):
        action = random.integers(0, ACTIONS, STREAMS)
        step = envs.step(action)
        ended = step.terminated | step.truncated
        rows.append(
            {
                "frame": np.ascontiguousarray(observation[:, -1]),
                "action": action.astype(np.uint8),
                "reward": np.sign(step.reward),
                "terminated": (step.terminated | step.life_lost) & ~final,
                "truncated": step.truncated & ~step.terminated & ~final,
                # A recording that repeats starts new stacks.
                "first": rows[-1]["final"] if step_number > SKIPPED else np.ones(STREAMS, np.bool_),
                "final": final,
                "q": random.random((STREAMS, ACTIONS), np.float32),
            }
        )
        observation, final = step.observation, ended
    envs.close()
    kept = rows[SKIPPED:]
    columns: dict[str, Any] = {name: np.stack([row[name] for row in kept]) for name in kept[0]}
    np.savez(path, **columns)


def load(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a recording, for `PUSHES` pushes."""
    with np.load(path) as columns:
        arrays = {name: columns[name] for name in columns.files}
    return [{name: array[index] for name, array in arrays.items()} for index in range(PUSHES * STEPS)]
