"""Random episodes as environments hand them over: both autoreset modes, terminations, truncations, lives."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from oracle import Row, Stream

Autoreset = Literal["next_step", "same_step"]

FRAME_SHAPE = (5, 3)


@dataclass
class Simulation:
    """`streams` environments with random episodes; `step` makes the arguments of one `Writer.append`.

    What was appended is also kept, row by row, in `recorded` for the oracle.
    """

    streams: int
    seed: int
    autoreset: Autoreset
    end_probability: float = 0.15
    life_loss_probability: float = 0.08
    unseen_probability: float = 0.2
    """Of ends whose last observation nobody keeps: with same_step."""
    recorded: list[Stream] = field(init=False)

    def __post_init__(self) -> None:
        """Starts an episode in every stream."""
        self._rng = np.random.default_rng(self.seed)
        self.recorded = [Stream() for _ in range(self.streams)]
        self._first = np.ones(self.streams, bool)
        self._show_final = np.zeros(self.streams, bool)
        self._frame = self._frames()

    def _frames(self) -> NDArray[np.uint8]:
        return self._rng.integers(1, 256, (self.streams, *FRAME_SHAPE), dtype=np.uint8)

    def step(self) -> dict[str, Any]:
        """One step of every environment."""
        rng, streams = self._rng, self.streams
        final = self._show_final.copy()
        playing = ~final
        action = rng.integers(0, 6, streams)
        reward = rng.normal(size=streams).astype(np.float32)
        end = playing & (rng.random(streams) < self.end_probability)
        truncated = end & (rng.random(streams) < 0.5)
        life_lost = playing & ~end & (rng.random(streams) < self.life_loss_probability)
        terminated = (end & ~truncated) | life_lost
        following = self._frames()
        row: dict[str, Any] = {
            "frame": self._frame,
            "action": action,
            "reward": reward,
            "terminated": terminated,
            "truncated": truncated,
            "first": self._first.copy(),
        }
        for i in range(streams):
            self.recorded[i].rows.append(
                Row(self._frame[i], final=True)
                if final[i]
                else Row(
                    self._frame[i],
                    int(action[i]),
                    float(reward[i]),
                    bool(terminated[i]),
                    bool(truncated[i]),
                    bool(self._first[i]),
                )
            )
        if self.autoreset == "next_step":
            # The environment shows the last observation, ignores one action and resets.
            row["final"] = final
            self._first = final
            self._show_final = end
        else:
            row["final"] = end & (rng.random(streams) >= self.unseen_probability)
            row["final_frame"] = self._frames()
            for ended in np.flatnonzero(row["final"]):
                self.recorded[ended].rows.append(Row(row["final_frame"][ended], final=True))
            self._first = end
        self._frame = following
        return row
