"""Vector environments of actors, evaluations and videos.

One class wraps a Gymnasium vector environment in NEXT_STEP mode: after a game has ended, the next `step`
ignores that environment's action, resets it, and returns its first observation. Rewards are not clipped here, so
that scores are true; the actor clips the rewards that it stores.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Any, Literal

import ale_py
import gymnasium
import numpy as np
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

from innet_drl.train.config import Config
from innet_drl.train.errors import UnavailableEnvironmentError

ATARI_FRAME_SKIP = 4
"""Emulator frames of one agent step."""
ATARI_NO_OPS = 30
"""Largest number of no-ops at the start of a game (Mnih et al., 2015)."""


@dataclass(frozen=True)
class EnvironmentSpec:
    """Shapes and dtypes of an environment, for networks and tables."""

    actions: int
    """Number of actions."""
    stack: int
    """Frames in an observation; with 1 there is no stack dimension."""
    frame_shape: tuple[int, ...]
    """Shape of one frame, or of a vector observation."""
    frame_dtype: str
    """uint8 for images, float32 for vectors."""
    frames_per_step: int
    """Emulator frames of one agent step; 1 outside Atari."""
    first_action: int = 0
    """The environment's number of action 0 (`Discrete(n, start=...)`)."""

    @property
    def action_dtype(self) -> Literal["uint8", "int32"]:
        """The smallest integer type for these actions that torch and the memory support."""
        return "uint8" if self.actions <= 256 else "int32"

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation, including the stack."""
        return self.frame_shape if self.stack == 1 else (self.stack, *self.frame_shape)


@dataclass(frozen=True)
class Step:
    """Results of one step of N environments."""

    observation: NDArray[Any]
    """[N, *observation_shape]"""
    reward: NDArray[np.float32]
    """[N], unclipped; 0 if the step was a reset."""
    terminated: NDArray[np.bool_]
    """[N], the game is over."""
    truncated: NDArray[np.bool_]
    """[N], the game was truncated."""
    life_lost: NDArray[np.bool_]
    """[N], a life was lost and the game continues."""


class Environments:
    """N environments stepped together, in Gymnasium's NEXT_STEP mode.

    Args:
        vector: The Gymnasium vector environment.
        spec: Spec of one of its environments.

    Raises:
        UnavailableEnvironmentError: The vector environment resets in another mode, or does not declare its mode.
    """

    def __init__(self, vector: Any, spec: EnvironmentSpec) -> None:
        mode = vector.metadata.get("autoreset_mode")
        if mode != AutoresetMode.NEXT_STEP:
            raise UnavailableEnvironmentError(
                f"{type(vector).__name__} resets in the mode {mode!r}, and supported is "
                f"{AutoresetMode.NEXT_STEP!r}: make it in this mode, or declare it in the metadata"
            )
        self.vector = vector
        self.spec = spec
        self.count: int = vector.num_envs
        self._lives = np.zeros(self.count, np.int32)
        self._ended = np.zeros(self.count, np.bool_)

    def reset(self, seed: int) -> NDArray[Any]:
        """Restarts all games; environment i gets the seed `seed + i`, if it has a seed of its own."""
        observation, info = self.vector.reset(seed=seed)
        self._ended[:] = False
        self._lives = np.array(info.get("lives", self._lives))
        return self._observation(observation)

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Takes one action in each environment, int64 [N], or resets it if its game ended at the last step."""
        observation, reward, terminated, truncated, info = self.vector.step(actions + self.spec.first_action)
        lives = info.get("lives", self._lives)
        # Lives also fall at the end of a game, which is not the loss of a life alone.
        life_lost = (lives < self._lives) & ~terminated & ~self._ended
        self._lives = np.array(lives)
        self._ended = terminated | truncated
        return Step(self._observation(observation), np.asarray(reward, np.float32), terminated, truncated, life_lost)

    def _observation(self, observation: NDArray[Any]) -> NDArray[Any]:
        # Always the same memory layout: sums over another layout round differently.
        return np.ascontiguousarray(observation, self.spec.frame_dtype)

    @property
    def restorable(self) -> bool:
        """Whether `state` and `restore` work."""
        return isinstance(self.vector.unwrapped, CartPoleVectorEnv)

    def state(self) -> dict[str, Any]:
        """Returns all state of the next steps, as plain JSON values."""
        cartpole = self.vector.unwrapped
        return {
            "state": cartpole.state.tolist(),
            "steps": cartpole.steps.tolist(),
            "ended": cartpole.prev_done.tolist(),
            "random": cartpole.np_random.bit_generator.state,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restores what `state` returned; call `reset` first."""
        cartpole = self.vector.unwrapped
        cartpole.state = np.array(state["state"], np.float64)
        cartpole.steps = np.array(state["steps"], np.int32)
        cartpole.prev_done = np.array(state["ended"], np.bool_)
        cartpole.np_random.bit_generator.state = state["random"]
        self._ended = cartpole.prev_done.copy()

    def close(self) -> None:
        """Frees the environments."""
        self.vector.close()


def make(config: Config, count: int, *, episode_frames: int | None = None, threads: int = 1) -> Environments:
    """Makes `count` environments of the configured kind.

    Args:
        config: Settings of the environment.
        count: Number of environments.
        episode_frames: Emulator frames after which a game is truncated; `None` uses the configured number.
        threads: Threads that step Atari environments.

    Raises:
        UnavailableEnvironmentError: No such environment, or its ROM is missing.
    """
    if config.is_atari:
        return _make_atari(config, count, episode_frames or config.episode_frames, threads)
    return _make_gymnasium(config.environment, count)


def make_colour(config: Config, *, episode_frames: int) -> AtariVectorEnv:
    """Makes one Atari environment in colour, for videos: uint8 [1, 1, 210, 160, 3].

    With the same seed and actions it plays the same game as the environment of `make`.
    """
    return AtariVectorEnv(
        rom_name(config.environment),
        1,
        grayscale=False,
        stack_num=1,
        img_height=210,
        img_width=160,
        reward_clipping=False,
        repeat_action_probability=config.sticky_actions,
        max_num_frames_per_episode=episode_frames,
        noop_max=ATARI_NO_OPS,
        num_threads=1,
    )


def rom_name(environment: str) -> str:
    """Returns the ROM's name of an environment `atari/<game>`.

    Raises:
        UnavailableEnvironmentError: ale-py has no such game, or its ROM is missing or damaged.
    """
    game = environment.removeprefix("atari/")
    games = roms.get_all_rom_ids()
    if game not in games:
        close = difflib.get_close_matches(_snake_case(game), games, n=3)
        hint = f"did you mean {' or '.join(close)}?" if close else "names are as in ale_py.roms.get_all_rom_ids()"
        raise UnavailableEnvironmentError(f"there is no Atari game {game!r}: {hint}")
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise UnavailableEnvironmentError(
            f"the ROM of {game!r} cannot be used ({error}): reinstall ale-py, which brings the ROMs, or "
            "point ALE_ROMS_DIR to a folder that holds it"
        ) from error
    return game


def _make_atari(config: Config, count: int, episode_frames: int, threads: int) -> Environments:
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # `episodic_life` stays off: it would reset the game at each lost life. Life loss is read from `lives`.
    vector = AtariVectorEnv(
        rom_name(config.environment),
        count,
        num_threads=min(threads, count),
        stack_num=config.stack,
        frameskip=ATARI_FRAME_SKIP,
        max_num_frames_per_episode=episode_frames,
        repeat_action_probability=config.sticky_actions,
        reward_clipping=False,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        noop_max=ATARI_NO_OPS,
    )
    spec = EnvironmentSpec(len(vector.ale.get_action_set()), config.stack, (84, 84), "uint8", ATARI_FRAME_SKIP)
    return Environments(vector, spec)


def _make_gymnasium(name: str, count: int) -> Environments:
    try:
        vector = gymnasium.make_vec(name, count)
    except gymnasium.error.Error as error:
        hint = atari_hint(name) or "; Atari games are named atari/<game>"
        raise UnavailableEnvironmentError(f"Gymnasium cannot make {name!r} ({error}){hint}") from error
    except Exception as error:
        raise UnavailableEnvironmentError(
            f"{name!r} cannot be made: it raises {type(error).__name__}: {error}{atari_hint(name)}"
        ) from error
    observation, action = vector.single_observation_space, vector.single_action_space
    if not isinstance(action, gymnasium.spaces.Discrete):
        raise UnavailableEnvironmentError(f"{name!r} has the actions {action}: Q-learning needs a few discrete ones")
    if not isinstance(observation, gymnasium.spaces.Box) or len(observation.shape) != 1:
        raise UnavailableEnvironmentError(
            f"{name!r} has the observations {observation}: supported are flat vectors{atari_hint(name)}"
        )
    spec = EnvironmentSpec(int(action.n), 1, observation.shape, "float32", 1, int(action.start))
    return Environments(vector, spec)


def atari_hint(name: str) -> str:
    """The end of a message about an environment of another name for an Atari game, and otherwise nothing."""
    game = _snake_case(name.removeprefix("ALE/").partition("-v")[0])
    return f"; did you mean atari/{game}?" if game in roms.get_all_rom_ids() else ""


def _snake_case(name: str) -> str:
    """`SpaceInvaders` and `Space Invaders` are the game `space_invaders`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ -]+", "_", name).lower()
