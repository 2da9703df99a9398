"""Environments, networks and losses as a user would write them: found by import path, also in actor processes."""

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
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from numpy.typing import NDArray
from torch import Tensor, nn

from innet_drl.batches import TorchBatch
from innet_drl.train.config import Config
from innet_drl.train.losses import Loss, TransitionLoss, of_actions

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


class Linear(nn.Module):
    """Q-values of a flat observation, or outputs for each action."""

    outputs = 0

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__()
        self.shape = (actions, self.outputs) if self.outputs else (actions,)
        self.layer = nn.Linear(int(np.prod(observation_space.shape)), int(np.prod(self.shape)))

    def forward(self, observation: Tensor) -> Tensor:
        assert observation.dtype == torch.float32
        q: Tensor = self.layer(observation.flatten(1)).unflatten(1, self.shape)
        return q


class LinearAtoms(Linear):
    """51 outputs for each action."""

    outputs = 51


class LinearDict(nn.Module):
    """Q-values of a dictionary."""

    def __init__(self, observation_space: spaces.Dict, actions: int, config: Config) -> None:
        super().__init__()
        sizes = [int(np.prod(part.shape)) for part in observation_space.values() if part.shape is not None]
        self.layer = nn.Linear(sum(sizes), actions)

    def forward(self, observation: dict[str, Tensor]) -> Tensor:
        q: Tensor = self.layer(torch.cat([part.flatten(1) for part in observation.values()], 1))
        return q


class PartlyTrained(Linear):
    """One layer is frozen, and one is never used."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions, config)
        self.frozen = nn.Linear(actions, actions).requires_grad_(False)
        self.unused = nn.Linear(actions, actions)

    def forward(self, observation: Tensor) -> Tensor:
        q: Tensor = self.frozen(super().forward(observation))
        return q


class OneTooMany(Linear):
    """Returns a Q-value of an action that there is not."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions + 1, config)


def network_raises(*_: Any) -> nn.Module:
    raise RuntimeError("too small")


def squared(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error of Q-learning with the target network's own maximum."""
    with torch.no_grad():
        goal = batch.reward + batch.discount * target(batch.next_observation).max(1).values
    q = online(batch.observation)
    error = goal - q.gather(1, batch.action.long().unsqueeze(1)).squeeze(1)
    return error.square(), error.abs(), q


def squared_nan(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss * torch.nan, priority, q


def squared_mean(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss.mean(), priority, q


def squared_constant(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    loss, priority, q = squared(online, target, batch)
    return loss.detach(), priority, q


class LossWithoutCall(Loss):
    """A loss that computes nothing."""


class LossThatRaises(LossWithoutCall):
    """A loss that cannot be made."""

    def __init__(self, config: Config) -> None:
        raise RuntimeError("no licence")

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        raise AssertionError("a loss that was not made is not called")


class Halved(Loss):
    """Half of the squared error of Q-learning, with targets by a name of its own."""

    computed = 0

    def targets(self, batch: TorchBatch, online: Any, target: Any) -> dict[str, Tensor]:
        Halved.computed += 1
        return {"goal": batch.reward + batch.discount * target(batch.next_observation).max(1).values}

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        q = online(batch.observation)
        error = batch.goal - of_actions(q, batch.action)
        return TransitionLoss(0.5 * error.square(), error.detach().abs(), q.detach())


class LossOfTargets(Halved):
    """Reads a target that it does not compute."""

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> TransitionLoss:
        return TransitionLoss(batch.missing, batch.missing, batch.missing)


class LaterNan:
    """A loss that is NaN from its third batch on."""

    def __init__(self) -> None:
        self.batches = 0

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
        self.batches += 1
        return (squared if self.batches < 3 else squared_nan)(online, target, batch)


later_nan = LaterNan()


class Standing(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Stands still in eight of twelve steps, as a game that waits for a key."""

    steps = 0
    before: Any = None

    def step(self, action: Any) -> Any:
        self.steps += 1
        if self.before is None or self.steps % 12 >= 8:
            self.before = self.env.step(action)
        return self.before

    def reset(self, **arguments: Any) -> Any:
        self.before = None
        return self.env.reset(**arguments)


class Dead(Linear):
    """A layer of which nearly all units are 0 for every observation."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions, config)
        self.dead = nn.Linear(actions, actions)
        nn.init.constant_(self.dead.bias, -100.0)

    def forward(self, observation: Tensor) -> Tensor:
        q = super().forward(observation)
        return q + torch.relu(self.dead(q))


class Forgetful(Linear):
    """Has dropout."""

    def forward(self, observation: Tensor) -> Tensor:
        return torch.dropout(super().forward(observation), 0.5, self.training)


class Silent(Linear):
    """Normalises a signal that is smaller than the normaliser's epsilon."""

    def __init__(self, observation_space: spaces.Box, actions: int, config: Config) -> None:
        super().__init__(observation_space, actions, config)
        self.norm = nn.LayerNorm(actions)

    def forward(self, observation: Tensor) -> Tensor:
        q: Tensor = self.norm(1e-4 * super().forward(observation))
        return q


def uneven(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Priorities of all orders of magnitude."""
    loss, priority, q = squared(online, target, batch)
    return loss, torch.rand_like(priority) ** 6, q


def optimistic(online: Any, target: Any, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
    """Squared error to a goal that is too high."""
    q = online(batch.observation)
    error = 50.0 - q.gather(1, batch.action.long().unsqueeze(1)).squeeze(1)
    return error.square(), error.abs(), q
