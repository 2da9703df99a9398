"""Recordings of Breakout, which give every system the same frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.paper.settings import ACTIONS, STREAMS
from innet_drl.redis.messages import TRANSITIONS

PUSHES = 8
"""Distinct pushes of a recording, which then repeats."""
SKIPPED = 100
"""Steps before the recording, because games start alike."""
STEPS = TRANSITIONS // STREAMS


def play(actions: NDArray[np.integer[Any]]) -> list[dict[str, Any]]:
    """Takes actions [steps, games], and returns a row of each step, named as the arguments of `Writer.append`."""
    from ale_py.vector_env import AtariVectorEnv

    games = actions.shape[1]
    environments = AtariVectorEnv("breakout", num_envs=games, reward_clipping=True)
    random = np.random.default_rng(0)
    observation, _ = environments.reset(seed=0)
    first, final = np.ones(games, np.bool_), np.zeros(games, np.bool_)
    rows = []
    for action in actions:
        frame = observation[:, -1].copy()
        observation, reward, terminated, truncated, _ = environments.step(action.astype(np.int64))
        rows.append(
            {
                "frame": frame,
                "action": action.astype(np.uint8),
                "reward": reward.astype(np.float32),
                "terminated": terminated & ~final,
                "truncated": truncated & ~final,
                "first": first,
                "final": final,
                "q": random.random((games, ACTIONS), np.float32),
            }
        )
        # In NEXT_STEP mode the row after an end is final, and the one after that first.
        first, final = final, terminated | truncated
    environments.close()
    return rows


def record(path: Path) -> None:
    """Plays `STREAMS` games at random and writes `PUSHES * STEPS` steps to an npz file."""
    actions = np.random.default_rng(0).integers(0, ACTIONS, (SKIPPED + PUSHES * STEPS, STREAMS))
    rows = play(actions)[SKIPPED:]
    # Repetitions of the recording start new stacks.
    rows[0]["first"] = np.ones(STREAMS, np.bool_)
    columns: dict[str, Any] = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    np.savez(path, **columns)


def load(path: Path) -> list[dict[str, Any]]:
    """Reads the rows of a recording, for `PUSHES` pushes."""
    with np.load(path) as columns:
        arrays = {name: columns[name] for name in columns.files}
    return [{name: array[index] for name, array in arrays.items()} for index in range(PUSHES * STEPS)]
