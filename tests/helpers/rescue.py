"""Two agents with PettingZoo's parallel interface: different spaces, an action mask, a state, an early death."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces


class Rescue:
    """A scout with a mask, which dies after three steps, and a carrier, whose episode is cut off after ten."""

    possible_agents: ClassVar = ["scout", "carrier"]
    state_space = spaces.Box(0, 100, (2,), np.float32)
    _spaces: ClassVar[dict[str, tuple[spaces.Space[Any], spaces.Space[Any]]]] = {
        "scout": (
            spaces.Dict(observation=spaces.Box(0, 255, (4, 4), np.uint8), action_mask=spaces.Box(0, 1, (3,), np.int8)),
            spaces.Discrete(3),
        ),
        "carrier": (spaces.Box(-1, 1, (5,), np.float32), spaces.Box(-1, 1, (2,), np.float32)),
    }

    def __init__(self) -> None:
        self.agents: list[str] = []
        self.t = 0

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[agent][0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return self._spaces[agent][1]

    def state(self) -> np.ndarray[Any, Any]:
        return np.array([self.t, len(self.agents)], np.float32)

    def _observations(self, agents: list[str]) -> dict[str, Any]:
        mask = np.array([1, 0, 1], np.int8)
        both = {
            "scout": {"observation": np.full((4, 4), self.t + 1, np.uint8), "action_mask": mask},
            "carrier": np.full(5, self.t / 10, np.float32),
        }
        return {agent: both[agent] for agent in agents}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        self.agents, self.t = list(self.possible_agents), 0
        return self._observations(self.agents), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        assert set(actions) == set(self.agents), "the dead do not act"
        self.t += 1
        acted = self.agents
        terminations = {agent: agent == "scout" and self.t == 3 for agent in acted}
        truncations = dict.fromkeys(acted, self.t == 10)
        observations = self._observations(acted)
        rewards = dict.fromkeys(acted, 1.0)
        self.agents = [agent for agent in acted if not terminations[agent] and not truncations[agent]]
        return observations, rewards, terminations, truncations, {agent: {} for agent in acted}
