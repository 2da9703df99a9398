"""Breakout played by a trained agent: the same real frames for every measured system.

The repository holds the agent's actions (`breakout_actions.npz`, of a run of preset `breakout` that scores 33), from
which the emulator makes the frames once on each machine. Reading the frames needs only NumPy, so that it works in the
environments of peers.
"""

from __future__ import annotations

import functools
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

STREAMS = 16
STACK = 4
N = 3
GAMMA = 0.99
"""An observation is a stack of 4 frames, a transition spans 3 steps."""

FOLDER = Path(__file__).parent.parent / "target" / "benchmarks"
ACTIONS = Path(__file__).parent / "breakout_actions.npz"
COLUMNS = ("frame", "action", "reward", "terminated", "truncated", "first", "final", "q")

Row = dict[str, Any]
"""One step of every stream: arrays [STREAMS, ...], named as the arguments of `innet.Writer.append`."""


def record() -> None:
    """Plays the recorded actions, unless this machine has their frames already. Needs ale-py."""
    done = FOLDER / "frame.npy"
    if done.exists() and done.stat().st_mtime > ACTIONS.stat().st_mtime:
        return
    rows = _play(np.load(ACTIONS)["actions"])
    # The last row ends every game, so that the recording can repeat.
    rows[-1] |= {"terminated": ~rows[-1]["final"], "truncated": np.zeros(STREAMS, bool)}
    rows.append({**rows[-1], "first": rows[-1]["final"], "final": ~rows[-1]["final"]})
    rows[-1]["terminated"] = np.zeros(STREAMS, bool)
    FOLDER.mkdir(parents=True, exist_ok=True)
    for column in reversed(COLUMNS):
        np.save(FOLDER / f"{column}.npy", np.stack([row[column] for row in rows]))


def _play(actions: NDArray[np.uint8]) -> list[Row]:
    """Takes actions [steps, streams], and returns a row of each step."""
    from ale_py.vector_env import AtariVectorEnv

    environments = AtariVectorEnv("breakout", num_envs=STREAMS, reward_clipping=True)
    random = np.random.default_rng(0)
    observation, _ = environments.reset(seed=0)
    first, final = np.ones(STREAMS, np.bool_), np.zeros(STREAMS, np.bool_)
    rows = []
    for action in actions:
        frame = observation[:, -1].copy()
        observation, reward, terminated, truncated, _ = environments.step(action.astype(np.int64))
        rows.append(
            {
                "frame": frame,
                "action": action,
                "reward": reward.astype(np.float32),
                "terminated": terminated & ~final,
                "truncated": truncated & ~final,
                "first": first,
                "final": final,
                "q": random.random((STREAMS, 4), np.float32),
            }
        )
        # In NEXT_STEP mode the row after an end is final, and the one after that first.
        first, final = final, terminated | truncated
    environments.close()
    return rows


@functools.cache
def load() -> Recording:
    """The recording that `record` made."""
    return Recording({column: np.load(FOLDER / f"{column}.npy") for column in COLUMNS})


class Recording:
    """Rows of streams, and their transitions.

    Args:
        columns: Arrays [rows, streams, ...] by the names of `COLUMNS`.
    """

    def __init__(self, columns: dict[str, NDArray[Any]]) -> None:
        self.columns = columns
        rows, streams = columns["first"].shape
        self.rows: list[Row] = [{name: column[row] for name, column in columns.items()} for row in range(rows)]

        begin = np.zeros((rows, streams), np.int64)
        for row in range(rows):
            begin[row] = np.where(columns["first"][row], row, begin[row - 1] if row else 0)
        behind = np.arange(rows)[:, None, None] - np.arange(STACK - 1, -1, -1)
        # Frames before the episode's first are zero, as AtariVectorEnv stacks them.
        self._stacked = np.where(behind >= begin[:, :, None], behind, -1)

        ends = columns["terminated"] | columns["truncated"] | columns["final"]
        whole = np.ones((rows - N, streams), bool)
        for ahead in range(N):
            whole &= ~ends[ahead : rows - N + ahead]
        self.transitions: NDArray[np.int64] = np.argwhere(whole.T)[:, ::-1]
        """Row and stream of each transition with all `N` steps before an episode's end, [T, 2], stream by stream."""

    def observation(self, row: int, stream: int) -> NDArray[np.uint8]:
        """The stack [4, 84, 84] that the agent saw."""
        stack = np.zeros((STACK, 84, 84), np.uint8)
        for place, source in enumerate(self._stacked[row, stream]):
            if source >= 0:
                stack[place] = self.columns["frame"][source, stream]
        return stack

    def transition(self, row: int, stream: int) -> Row:
        """One transition for systems without windows: two stacks, action, return, discount."""
        rewards = self.columns["reward"][row : row + N, stream]
        return {
            "observation": self.observation(row, stream),
            "action": self.columns["action"][row, stream],
            "reward": np.float32(sum(GAMMA**k * r for k, r in enumerate(rewards))),
            "discount": np.float32(GAMMA**N),
            "next_observation": self.observation(row + N, stream),
        }

    @functools.cache  # noqa: B019 (one recording a process)
    def stacked(self, count: int) -> dict[str, NDArray[Any]]:
        """`count` transitions, spread over the recording: arrays of [count, ...]."""
        chosen = self.transitions[np.linspace(0, len(self.transitions) - 1, count).astype(int)]
        transitions = [self.transition(row, stream) for row, stream in chosen]
        return {name: np.stack([each[name] for each in transitions]) for name in transitions[0]}

    @functools.cached_property
    def _known(self) -> dict[int, set[tuple[int, float, float, int | None]]]:
        """Maps the checksum of an observation to its actions, returns, discounts and checksums of next observations.

        The return of a transition stops at the end of its episode.
        """
        columns = self.columns
        rows, streams = columns["first"].shape
        sums = [[checksum(self.observation(row, stream)) for stream in range(streams)] for row in range(rows)]
        known = defaultdict(set)
        for row, stream in np.argwhere(~columns["final"]):
            reward, discount = 0.0, 1.0
            for at in range(row, row + N):
                reward += discount * float(columns["reward"][at, stream])
                discount *= GAMMA
                ended = columns["terminated"][at, stream]
                if ended or columns["truncated"][at, stream] or at + 1 == rows:
                    break
            if at + 1 < rows:
                after = (0.0, None) if ended else (_rounded(discount), sums[at + 1][stream])
                known[sums[row][stream]].add((int(columns["action"][row, stream]), _rounded(reward), *after))
        return known

    def check(self, batch: dict[str, NDArray[Any]], count: int, distinct: float = 0.5) -> None:
        """Checks that a batch has `count` transitions of the recording, and enough different ones.

        Args:
            batch: `observation` and `next_observation` uint8 [count, 4, 84, 84], `action`, `reward` and `discount`
                [count].
            count: Expected number of transitions.
            distinct: Least share of distinct observations.

        Raises:
            AssertionError: Sampled items differ from pushed ones.
        """
        shapes = batch["observation"].shape, batch["next_observation"].shape
        assert shapes == ((count, STACK, 84, 84),) * 2, f"a batch of {count} has observations of shape {shapes}"
        whole = np.count_nonzero(np.isclose(batch["discount"], GAMMA**N, atol=1e-4))
        assert whole > 0.8 * count, f"of {count} transitions {whole} span {N} steps"
        seen = [checksum(each) for each in batch["observation"]]
        for index, observation in enumerate(seen):
            reward, discount = (_rounded(batch[name][index]) for name in ("reward", "discount"))
            after = checksum(batch["next_observation"][index]) if discount else None
            transition = (int(batch["action"][index]), reward, discount, after)
            assert transition in self._known.get(observation, ()), f"transition {index} of a batch was never pushed"
        different = len(set(seen))
        assert different > distinct * count, f"a batch of {count} has {different} different observations"


def checksum(array: NDArray[Any]) -> int:
    """CRC-32 of an array's bytes."""
    return zlib.crc32(np.ascontiguousarray(array).data)


def _rounded(value: float) -> float:
    """Rounds for comparison: returns of rewards -1, 0 and 1 differ within four decimals."""
    return round(float(value), 4)
