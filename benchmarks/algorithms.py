"""Stable-Baselines3's algorithms with this memory and with its own buffers: updates to a solution, return over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3 import DQN, SAC
from stable_baselines3.common.buffers import ReplayBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.evaluation import evaluate_policy

from benchmarks import report
from innet_drl.sb3 import InnetReplayBuffer, PrioritizedDQN, PrioritizedSAC

LENGTH = 12
"""States of the cliffwalk: a random walk in 2^12 ends well."""
CARTPOLE: dict[str, Any] = {
    # As tuned by RL Baselines3 Zoo for CartPole.
    "learning_rate": 2.3e-3,
    "batch_size": 64,
    "buffer_size": 100_000,
    "learning_starts": 1_000,
    "target_update_interval": 10,
    "train_freq": 256,
    "gradient_steps": 128,
    "exploration_fraction": 0.16,
    "exploration_final_eps": 0.04,
    "policy_kwargs": {"net_arch": [256, 256]},
}
SAC_GAMES: dict[str, tuple[str, dict[str, Any], int]] = {
    "pendulum": ("Pendulum-v1", {}, 6_000),
    # Needs Box2D: pip install 'gymnasium[box2d]'.
    "lunarlander": ("LunarLander-v3", {"continuous": True}, 30_000),
    # These need MuJoCo: pip install 'gymnasium[mujoco]'.
    "invertedpendulum": ("InvertedPendulum-v5", {}, 5_000),
    "halfcheetah": ("HalfCheetah-v5", {}, 20_000),
}
"""Environment of a game of SAC, its arguments, and steps."""
SAC_SYSTEMS: tuple[tuple[str, type[SAC], type[ReplayBuffer]], ...] = (
    ("SAC on ReplayBuffer", SAC, ReplayBuffer),
    ("SAC on InnetReplayBuffer", SAC, InnetReplayBuffer),
    ("PrioritizedSAC", PrioritizedSAC, InnetReplayBuffer),
)
"""Name, algorithm and buffer."""
Game = Literal["cliffwalk", "cartpole", "pendulum", "lunarlander", "invertedpendulum", "halfcheetah"]


def algorithms(games: tuple[Game, ...] = ("cliffwalk", "cartpole", "pendulum"), seeds: int = 5) -> None:
    """Prints updates until a game is solved, and of SAC the return, the seconds and the share of its buffer.

    Args:
        games: `cliffwalk` and `cartpole` compare `PrioritizedDQN` with DQN, the others SAC on both buffers.
        seeds: Runs of each algorithm.
    """
    torch.set_num_threads(1)
    for game in games:
        for seed in range(seeds):
            for system, found in RUNS[game](seed) if game in RUNS else _sac(game, seed):
                report.closing(game, system, seed=seed, **found)


class Cliffwalk(gymnasium.Env[Any, Any]):
    """The blind cliffwalk of Schaul et al. (2016, section 3.1): only the last of `LENGTH` right actions is rewarded."""

    def __init__(self, seed: int) -> None:
        self.observation_space = spaces.Box(0, 1, (LENGTH,), np.float32)
        self.action_space = spaces.Discrete(2)
        self.right = np.random.default_rng(seed).integers(0, 2, LENGTH)
        self._state = 0

    def reset(self, **_: Any) -> tuple[Any, dict[str, Any]]:
        """Begins a walk."""
        self._state = 0
        return np.eye(LENGTH, dtype=np.float32)[0], {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Goes on after the right action, and falls after the wrong one."""
        right = int(action) == self.right[self._state]
        self._state += int(right)
        ended = not right or self._state == LENGTH
        observation = np.eye(LENGTH, dtype=np.float32)[min(self._state, LENGTH - 1)]
        return observation, float(self._state == LENGTH), ended, False, {}


class _Until(BaseCallback):
    """Ends training when a condition holds, which is looked at every `period` steps."""

    def __init__(self, solved: Callable[[Any], bool], period: int) -> None:
        super().__init__()
        self._solved, self._period = solved, period
        self.steps: int | None = None

    def _on_step(self) -> bool:
        if self.num_timesteps % self._period == 0 and self._solved(self.model):
            self.steps = self.num_timesteps
            return False
        return True


def _updates(model: Any, solved: Callable[[Any], bool], period: int, steps: int) -> dict[str, Any]:
    until, began = _Until(solved, period), time.process_time()
    model.learn(steps, until)
    return {
        "solved": until.steps is not None,
        "updates": model._n_updates,
        "steps": model.num_timesteps,
        "seconds": round(time.process_time() - began, 1),
    }


def _cliffwalk(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Random play fills the buffer first; then an update follows each step of it."""
    states, gamma = torch.eye(LENGTH), 1.0 - 1.0 / LENGTH
    truth = gamma ** torch.arange(LENGTH - 1, -1, -1).float()

    def solved(model: Any) -> bool:
        with torch.no_grad():
            q = model.q_net(states)[torch.arange(LENGTH), torch.from_numpy(environment.right)]
        return bool((q - truth).abs().max() < 0.1)

    for name, kind in (("DQN", DQN), ("PrioritizedDQN", PrioritizedDQN)):
        environment = Cliffwalk(seed)
        model = kind(
            "MlpPolicy",
            environment,
            gamma=gamma,
            learning_starts=30_000,
            buffer_size=100_000,
            train_freq=1,
            target_update_interval=100,
            exploration_fraction=1.0,
            exploration_initial_eps=1.0,
            exploration_final_eps=1.0,
            seed=seed,
        )
        yield name, _updates(model, solved, 100, 80_000)


def _cartpole(seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    evaluated = gymnasium.make("CartPole-v1")

    def solved(model: Any) -> bool:
        mean, _ = evaluate_policy(model, evaluated, 10, warn=False)
        return bool(np.mean(mean) >= 475.0)

    for name, kind in (("DQN", DQN), ("PrioritizedDQN", PrioritizedDQN)):
        model = kind("MlpPolicy", "CartPole-v1", seed=seed, **CARTPOLE)
        yield name, _updates(model, solved, 2_048, 60_000)


def _sac(game: str, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    environment, arguments, steps = SAC_GAMES[game]
    for name, algorithm, buffer in SAC_SYSTEMS:
        timed = _Timed()
        kind: Any = type(buffer.__name__, (buffer,), {"add": timed(buffer.add), "sample": timed(buffer.sample)})
        made = gymnasium.make(environment, **arguments)
        model = algorithm("MlpPolicy", made, replay_buffer_class=kind, seed=seed)
        began = time.process_time()
        model.learn(steps)
        seconds = time.process_time() - began
        mean, _ = evaluate_policy(model, gymnasium.make(environment, **arguments), 20, warn=False)
        yield (
            name,
            {
                "return": round(float(np.mean(mean)), 1),
                "steps": steps,
                "seconds": round(seconds, 1),
                "buffer_share": round(timed.seconds / seconds, 4),
            },
        )


RUNS = {"cliffwalk": _cliffwalk, "cartpole": _cartpole}


class _Timed:
    """Seconds in methods."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **keywords: Any) -> Any:
            began = time.process_time()
            try:
                return method(*arguments, **keywords)
            finally:
                self.seconds += time.process_time() - began

        return timed
