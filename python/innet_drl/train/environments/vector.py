"""N environments stepped together, in either of Gymnasium's autoreset modes."""

from __future__ import annotations

import itertools
import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array
from numpy.typing import NDArray

from innet_drl.structures import at_index, map_leaves
from innet_drl.train.environments.spaces import (
    Actions,
    Arrays,
    Encoder,
    EnvironmentSpec,
    is_gymnasium,
    numbered_from,
    unusable,
)
from innet_drl.train.errors import UnavailableEnvironmentError

INFO_BYTES = 512
"""Largest size as JSON of the info of a game that a report has."""


@dataclass(frozen=True)
class Step:
    """Results of one step of N environments."""

    observation: Arrays
    """[N, *observation_shape], of each part of a dictionary"""
    reward: NDArray[np.float32]
    """[N], unclipped; 0 if the step was a reset."""
    terminated: NDArray[np.bool_]
    """[N], the game is over."""
    truncated: NDArray[np.bool_]
    """[N], the game was truncated."""
    life_lost: NDArray[np.bool_]
    """[N], a life was lost, and the game continues."""
    taken: NDArray[np.int64]
    """[N], the actions that were taken: the given ones, or FIRE."""
    final_observation: Arrays | None = None
    """As `observation`, last observations of ended games, and zeros for the others; `None` if no game ended, and
    in the mode NEXT_STEP, where `observation` has them."""
    infos: dict[int, dict[str, Any]] = field(default_factory=dict)
    """The `info` of environments whose game ended, by their number; see `Game.info`."""


class Environments:
    """N environments stepped together, in Gymnasium's NEXT_STEP or SAME_STEP mode.

    In NEXT_STEP the step after the end of a game ignores the action, resets that environment, and returns its first
    observation; in SAME_STEP the step that ends a game does.

    Args:
        vector: The Gymnasium vector environment.
        spec: Spec of one of its environments.
        encoder: Converts observations to frames; `None` if they are frames already, with the stack of the spec.
        actions: Converts numbers to actions; `None` if they are equal.
        name: The environment's name, for messages.
        fire: Number of the action that starts an Atari game again after a lost life; `None` if it has none.
    """

    def __init__(
        self,
        vector: Any,
        spec: EnvironmentSpec,
        encoder: Encoder | None = None,
        actions: Actions | None = None,
        name: str = "",
        fire: int | None = None,
    ) -> None:
        mode = vector.metadata.get("autoreset_mode")
        if mode not in (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP):
            raise UnavailableEnvironmentError(
                f"{type(vector).__name__} resets in the mode {mode!r}, and supported are "
                f"{AutoresetMode.NEXT_STEP!r} and {AutoresetMode.SAME_STEP!r}: make it in one of these modes, or "
                "declare it in the metadata"
            )
        self.vector = vector
        self.spec = spec
        self.resets_at_once = mode == AutoresetMode.SAME_STEP
        """Whether the mode is SAME_STEP."""
        self.encoder = encoder
        self.actions = numbered_from(spec.actions) if actions is None else actions
        self._fire = fire
        self._name = name
        self.owner = ""
        """Owner of the environments, for messages: ` of actor 0`."""
        self._steps = 0
        self._lives = np.zeros(self.count, np.int32)
        self._ended = np.zeros(self.count, np.bool_)
        self._life_lost = np.zeros(self.count, np.bool_)
        self._stacks: Arrays | None = None
        if encoder is not None and spec.stack > 1:
            self._stacks = self._zeros()

    @property
    def count(self) -> int:
        """Number of environments."""
        return int(self.vector.num_envs)

    def _zeros(self) -> Arrays:
        """Observations of zeros."""
        spec = self.spec
        zeros: Arrays = spec.make(lambda part: np.zeros((self.count, *part.observed(spec.stack)), part.dtype))
        return zeros

    def reset(self, seed: int) -> Arrays:
        """Restarts all games; environment i gets the seed `seed + i`, if it has a seed of its own."""
        try:
            observation, info = self.vector.reset(seed=seed)
        except Exception as error:
            raise self._explained(error, "reset") from error
        self._ended[:] = self._life_lost[:] = False
        self._steps = 0
        self._lives = np.array(info.get("lives", self._lives))
        return self._observation(observation, np.ones(self.count, np.bool_))

    def step(self, actions: NDArray[np.int64]) -> Step:
        """Takes one action in each environment, int64 [N], or resets it if its game ended at the last step.

        After a lost life an Atari game takes FIRE, as ale-py does at the start of a game: some games wait for it.
        """
        if self._fire is not None and self._life_lost.any():
            actions = np.where(self._life_lost, self._fire, actions)
        try:
            observation, reward, terminated, truncated, info = self.vector.step(self.numbered(actions))
        except Exception as error:
            explained = self._explained(error, "step")
            if explained is error:
                raise
            raise explained from error
        self._steps += 1
        reward = np.asarray(reward, np.float32)
        if not (finite := np.isfinite(reward)).all():
            (index, *_) = np.flatnonzero(~finite)
            raise self._not_finite(int(index), f"the reward {reward[index]}")
        lives = info.get("lives", self._lives)
        ended = terminated | truncated
        # A game's end also lowers `lives`, but is no mere loss of a life. After a reset in this step (in SAME_STEP at
        # the end of a game, in NEXT_STEP one step later) `lives` belongs to the next game.
        life_lost = (lives < self._lives) & ~(ended if self.resets_at_once else terminated | self._ended)
        self._lives = np.array(lives)
        self._life_lost = life_lost & ~ended
        final = None
        if self.resets_at_once:
            if ended.any():
                final = self._final(info, ended)
            fresh = ended
        else:
            fresh = self._ended
        self._ended = ended
        return Step(
            self._observation(observation, fresh),
            reward,
            terminated,
            truncated,
            life_lost,
            actions,
            final,
            {int(index): last_info(info, int(index)) for index in np.flatnonzero(ended)},
        )

    def _observation(self, observation: Any, fresh: NDArray[np.bool_]) -> Arrays:
        """Returns stacked observations; in `fresh` environments it is the first observation of a game."""
        if self.encoder is None:
            # Always the same memory layout: sums over another layout round differently.
            whole = np.ascontiguousarray(observation, self.spec.frame_dtype)
            self._check_finite(whole, range(self.count))
            return whole
        frames = self.encoder.encode(observation)
        self._check_finite(frames, range(self.count))
        if self._stacks is None:
            return frames

        def stacked(stack: NDArray[Any], newest: NDArray[Any]) -> NDArray[Any]:
            # A new array, because the actor keeps an observation during the next step.
            stack = np.concatenate((stack[:, 1:], newest[:, None]), 1)
            stack[fresh, :-1] = 0
            return stack

        self._stacks = map_leaves(stacked, self._stacks, frames)
        return self._stacks

    def _final(self, info: dict[str, Any], ended: NDArray[np.bool_]) -> Arrays:
        """Last observations of ended games in the mode SAME_STEP."""
        if "final_obs" not in info:
            raise unusable(
                self._name,
                "a game ended in the mode SAME_STEP without info['final_obs']: return the last observations there, or "
                "use the mode NEXT_STEP",
            )
        found, which = info["final_obs"], np.flatnonzero(ended)
        final: Any = self._zeros()
        if self.encoder is None:
            for index in which:
                final[index] = found[index]
            self._check_finite(final, range(self.count))
            return final
        space = self.vector.single_observation_space
        rows = [at_index(found, int(index)) for index in which]
        empty: Any = create_empty_array(space, len(which))
        frames = self.encoder.encode(concatenate(space, rows, empty))
        self._check_finite(frames, which)

        def replace(final: NDArray[Any], newest: NDArray[Any], stack: NDArray[Any] | None = None) -> None:
            last = newest if stack is None else np.concatenate((stack[which, 1:], newest[:, None]), 1)
            final[which] = last

        map_leaves(replace, final, frames, *([] if self._stacks is None else [self._stacks]))
        return final

    def _check_finite(self, frames: Arrays, numbers: Sequence[int] | NDArray[np.int64]) -> None:
        """Refuses NaN and infinities in frames of the environments of these numbers."""
        for part, values in zip(self.spec.arrays, frames if self.spec.parts else (frames,), strict=True):
            if part.dtype != "float32":
                continue
            finite = np.isfinite(values).reshape(len(values), -1)
            if not finite.all():
                row = int(np.flatnonzero(~finite.all(1))[0])
                found = "NaN" if np.isnan(values[row]).any() else "an infinite value"
                where = f" in {part.name!r}" if part.name else ""
                raise self._not_finite(int(numbers[row]), f"an observation with {found}{where}")

    def _not_finite(self, index: int, returned: str) -> UnavailableEnvironmentError:
        when = f"at step {self._steps:,}" if self._steps else "at its reset"
        return UnavailableEnvironmentError(
            f"environment {index}{self.owner} (environment {self._name}) returned {returned} {when}, from which "
            "nothing can be learned: correct the environment, or replace the value in a wrapper "
            "(environment_wrappers)"
        )

    def _explained(self, error: Exception, call: str) -> Exception:
        """Names the environment in an error. One that Gymnasium itself raised blames what the call took or returned."""
        if isinstance(error, UnavailableEnvironmentError):
            return error
        *_, last = frames = traceback.extract_tb(error.__traceback__)
        text = str(error)
        # Async environments raise the errors of their processes in this function.
        by_gymnasium = is_gymnasium(last.filename) and last.name != "_raise_if_errors"
        reason = None
        if by_gymnasium and isinstance(error, TypeError) and "argument" in text:
            takes = (
                "reset(seed=..., options=...)" if call == "reset" else "step(action), and reset(seed=..., options=...)"
            )
            reason = f"it has to take {takes}, as Gymnasium's environments do ({text})"
        elif by_gymnasium and isinstance(error, TypeError | ValueError) and "unpack" in text:
            returns = "observation, info" if call == "reset" else "observation, reward, terminated, truncated, info"
            reason = f"its {call} has to return ({returns}), as Gymnasium's environments do ({text})"
        elif (
            by_gymnasium and isinstance(error, TypeError | ValueError) and last.filename.endswith("sync_vector_env.py")
        ):
            reason = (
                f"its {call} has to return a number as reward, and True or False as terminated and truncated ({text})"
            )
        elif isinstance(error, ValueError) and last.name != "_raise_if_errors" and _concatenates(frames):
            space = self.vector.single_observation_space
            reason = (
                f"its observations changed their shape ({text}), and its observation space says {space}: return "
                "arrays of the space's shape, or declare another space"
            )
        elif call == "reset":
            reason = f"its reset raises {type(error).__name__}: {text}"
        if reason is None:
            error.add_note(f"the {call} of the environment {self._name} raised this")
            return error
        explained = unusable(self._name, reason)
        explained.shows_cause = True
        return explained

    def sample(self, count: int, seed: int) -> Arrays:
        """Returns random observations [count, *observation_shape] of the environment's space."""
        space = batch_space(self.vector.single_observation_space, count)
        space.seed(seed)
        frames = self.frames(space.sample())
        if self.stacks:
            frames = map_leaves(lambda array: np.repeat(array[:, None], self.spec.stack, 1), frames)
        return frames

    def frames(self, observations: Any) -> Arrays:
        """Converts the environments' observations [N, ...] to frames [N, *frame_shape], without stacks."""
        if self.encoder is None:
            return np.ascontiguousarray(observations, self.spec.frame_dtype)
        return self.encoder.encode(observations)

    def numbered(self, numbers: NDArray[np.int64]) -> Any:
        """Returns the actions [N] of the environment's space with these numbers."""
        return self.actions.act(numbers)

    @property
    def stacks(self) -> bool:
        """Whether frames are stacked here, and not by the environments themselves."""
        return self._stacks is not None

    def close(self) -> None:
        """Frees the environments."""
        self.vector.close()


def _concatenates(frames: Sequence[traceback.FrameSummary]) -> bool:
    """Whether the newest frames are of NumPy, below a function of Gymnasium's vector environments."""
    below = itertools.dropwhile(lambda frame: "/numpy/" in frame.filename, reversed(frames))
    newest = next(below).filename
    return is_gymnasium(newest) and "/vector/" in newest


def last_info(info: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Numbers, flags and short texts of the info of one environment, whose game has ended."""
    found: dict[str, Any] = {}
    _collect(info.get("final_info", info), index, "", found)
    size = 0
    for name, value in list(found.items()):
        added = len(json.dumps({name: value}))
        if size + added > INFO_BYTES:
            del found[name]
        else:
            size += added
    return found


def _collect(info: Mapping[str, Any], index: int, path: str, found: dict[str, Any]) -> None:
    for name, values in info.items():
        there = info.get(f"_{name}")
        if name.startswith("_") or name == "final_obs" or (there is not None and not there[index]):
            continue
        if isinstance(values, Mapping):
            _collect(values, index, f"{path}{name}/", found)
        elif isinstance(values, np.ndarray | list | tuple) and len(values) > index:
            value = values[index]
            value = value.item() if isinstance(value, np.generic) or getattr(value, "shape", None) == () else value
            # JSON has no NaN.
            if isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
                found[f"{path}{name}"] = value
