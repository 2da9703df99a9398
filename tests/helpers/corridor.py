"""An environment whose games have a fixed length, with an `info` of all kinds. Processes of a run import it."""

from __future__ import annotations

import math
from typing import Any

import gymnasium
import numpy as np


class Corridor(gymnasium.Env[Any, Any]):
    """Ends after `length` steps, and tells so."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 5, reward: float = 1.0, size: int = 2) -> None:
        self.length, self.reward = length, reward
        self.observation_space = gymnasium.spaces.Box(-1, 1, (size,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.at = 0
        return self.observation_space.sample(), {"started": True}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.at += 1
        over = self.at == self.length
        info: dict[str, Any] = {"at": self.at, "success": bool(over), "who": "robot", "nan": math.nan}
        info["deep"] = {"half": self.at / 2}
        info["picture"] = np.zeros((3, 3))
        return self.observation_space.sample(), self.reward, over, False, info


class Four(Corridor):
    """A corridor with CartPole's spaces."""

    def __init__(self) -> None:
        super().__init__(size=4)
