"""Environments as a user would write them: found by import path, also in actor processes."""

from __future__ import annotations

import ctypes
import functools
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray

BOX = spaces.Box(-1.0, 1.0, (3,))
IMAGE = spaces.Box(0, 255, (12, 10, 3), np.uint8)
NESTED = spaces.Dict(
    camera=IMAGE, arm=spaces.Dict(position=spaces.Box(-1, 1, (2,), np.float64), mode=spaces.Discrete(3, start=1))
)

OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "vector of float64": spaces.Box(-1, 1, (5,), np.float64),
    "vector of integers": spaces.Box(-3, 3, (4,), np.int64),
    "vector of uint8": spaces.Box(0, 255, (128,), np.uint8),
    "matrix of floats": spaces.Box(-1, 1, (4, 6)),
    "number": spaces.Box(-1, 1, ()),
    "image without channels": spaces.Box(0, 255, (40, 44), np.uint8),
    "image, channels last": IMAGE,
    "image, channels first": spaces.Box(0, 255, (3, 20, 24), np.uint8),
    "image of booleans": spaces.Box(0, 1, (10, 10, 4), np.bool_),
    "image of floats": spaces.Box(0, 1, (9, 9, 2)),
    "stack of images": spaces.Box(0, 255, (4, 16, 16, 3), np.uint8),
    "discrete": spaces.Discrete(6, start=2),
    "several discrete": spaces.MultiDiscrete([3, 4], start=[1, 0]),
    "bits": spaces.MultiBinary([2, 3]),
    "dictionary": NESTED,
    "tuple": spaces.Tuple((spaces.Discrete(3), BOX)),
}
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete with a start": spaces.Discrete(3, start=-1),
    "several discrete": spaces.MultiDiscrete([3, 2], start=[1, 0]),
    "bits": spaces.MultiBinary(3),
}


class Sampler(gymnasium.Env[Any, Any]):
    """Returns samples of an observation space; games of `length` steps, of which every other is truncated."""

    def __init__(self, observation: str = "vector of float64", action: str = "discrete", length: int = 7) -> None:
        self.observation_space = OBSERVATIONS[observation]
        self.action_space = ACTIONS[action]
        self.length, self.steps, self.games = length, 0, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        self.games += 1
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.steps += 1
        ended = self.steps == self.length
        cut = ended and self.games % 2 == 0
        return self.observation_space.sample(), float(np.sum(action)), ended and not cut, cut, {}


class Long(Sampler):
    """Observes long vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_space = spaces.Box(-1, 1, (5000,))


class Counter(gymnasium.Env[Any, Any]):
    """Observes how many steps it has taken, as an image or a vector; games of 5 steps are truncated."""

    def __init__(self, images: bool = False) -> None:
        shape, dtype = ((4, 4), np.uint8) if images else ((1,), np.float32)
        self.observation_space = spaces.Box(0, 255, shape, dtype)
        self.action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 1
        return self._observation(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        return self._observation(), 1.0, False, self.steps == 6, {}

    def _observation(self) -> NDArray[Any]:
        space: Any = self.observation_space
        return np.full(space.shape, self.steps, space.dtype)


class Printing(Counter):
    """Prints once in each process."""

    printed = False

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not Printing.printed:
            Printing.printed = True
            print("the motor starts", flush=True)
        return super().step(action)


class Gym(Counter):
    """Its `step` or `reset` returns what the interface before Gymnasium did."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self._returns = returns

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        observation, info = super().reset(seed=seed)
        return observation if self._returns == "reset" else (observation, info)

    def step(self, action: Any) -> Any:
        observation, reward, terminated, truncated, info = super().step(action)
        old = observation, reward, terminated or truncated, info
        return old if self._returns == "step" else (observation, reward, terminated, truncated, info)


class Failing(Counter):
    """Raises at its 40th step, with another number each time."""

    steps_left = 40

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps_left -= 1
        if self.steps_left == 0:
            raise ValueError(f"the motor {id(self)} is stuck")
        return super().step(action)


class Hanging(Counter):
    """Hangs at its 60th step, the first of all that do, whose process is in the file `hung`."""

    steps_left = 60

    def __init__(self, hung: str, *, holding_the_lock: bool = False) -> None:
        super().__init__()
        self.hung, self.holding_the_lock = hung, holding_the_lock

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps_left -= 1
        if self.steps_left == 0:
            with suppress(FileExistsError):
                with open(self.hung, "x") as hung:
                    hung.write(str(os.getpid()))
                hang(holding_the_lock=self.holding_the_lock)
        return super().step(action)


def hang(*, holding_the_lock: bool) -> None:
    """Sleeps for ever, also in C that keeps Python's lock, as an extension may."""
    library = ctypes.PyDLL(None) if holding_the_lock else ctypes.CDLL(None)
    while True:
        library.sleep(1000)


class Lives(Counter):
    """Loses a life at each step; games begin with 3 lives, and every other is truncated when one is left."""

    games = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.games += 1
        self.lives = 3 if self.games % 2 else 2
        return super().reset(seed=seed)[0], {"lives": self.lives}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.lives -= 1
        self.steps += 1
        cut = self.games % 2 == 1 and self.lives == 1
        return self._observation(), 1.0, self.lives == 0, cut, {"lives": self.lives}


class Doubled(gymnasium.RewardWrapper[Any, Any]):
    """Rewards twice."""

    def reward(self, reward: Any) -> float:
        return 2.0 * float(reward)


class Shifted(gymnasium.RewardWrapper[Any, Any]):
    """Rewards one more."""

    def reward(self, reward: Any) -> float:
        return float(reward) + 1.0


class Drawn(Counter):
    """It can be drawn."""

    def __init__(self, render_mode: str | None = None) -> None:
        super().__init__()
        self.render_mode = render_mode

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


class Stacked(gymnasium.wrappers.FrameStackObservation):
    """The last two observations."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        super().__init__(env, 2)


class Changing(Counter):
    """Its third observation has another shape."""

    def _observation(self) -> NDArray[Any]:
        return np.zeros((2,) if self.steps == 3 else (1,), np.float32)


def make_vector(
    num_envs: int,
    mode: str = "SAME_STEP",
    observation: str = "",
    images: bool = False,
    lives: bool = False,
    copy: bool = True,
) -> SyncVectorEnv:
    def make() -> gymnasium.Env[Any, Any]:
        if lives:
            return Lives()
        return Sampler(observation) if observation else Counter(images)

    return SyncVectorEnv([make] * num_envs, copy=copy, autoreset_mode=AutoresetMode[mode])


class NotFinite(Sampler):
    """Returns `value` at the `step`-th step: as reward, or as the second number of the vector that it observes."""

    def __init__(
        self,
        returns: str = "observation",
        value: float = np.nan,
        step: int = 5,
        observation: str = "vector of float64",
    ) -> None:
        super().__init__(observation)
        self.returns, self.value, self.left = returns, value, step

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, *rest = super().step(action)
        self.left -= 1
        if self.left == 0 and self.returns == "reward":
            reward = self.value
        elif self.left == 0:
            vector = observation["arm"]["position"] if isinstance(observation, dict) else observation
            vector[1] = self.value
        return observation, reward, *rest


def make_not_finite(num_envs: int, mode: str = "NEXT_STEP", **arguments: Any) -> SyncVectorEnv:
    """The last environment is `NotFinite`."""
    observation = arguments.get("observation", "vector of float64")
    makers: list[Any] = [functools.partial(Sampler, observation)] * (num_envs - 1)
    makers.append(functools.partial(NotFinite, **arguments))
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode[mode])


def make_async(num_envs: int) -> AsyncVectorEnv:
    """Environments in processes, in the ways of Gymnasium: forks of the process that plays."""
    return AsyncVectorEnv([Counter] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


class Noted(Counter):
    """Leaves a file while it is open."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._file = Path(tempfile.mkstemp(prefix="open-", dir=folder)[1])

    def close(self) -> None:
        self._file.rename(self._file.with_name(self._file.name.replace("open", "closed")))


class Endless(Noted):
    """Its games have no end; the first step writes to the pipe `steps` of the folder."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self._pipe = Path(folder) / "steps"

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.steps == 1:
            self._pipe.write_text("stepped")
        self.steps = 2
        return self._observation(), 1.0, False, False, {}


class Hung(Counter):
    """A game whose first step never ends; writes its process to the named pipe `steps` of a folder."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._pipe = Path(folder) / "steps"

    def step(self, action: Any) -> Any:
        self._pipe.write_text(str(os.getpid()))
        threading.Event().wait()


def make_wrong_count(num_envs: int) -> SyncVectorEnv:
    return make_vector(num_envs + 1)


def make_raises(**_: Any) -> Any:
    raise RuntimeError("no licence")


def make_number() -> int:
    return 3
