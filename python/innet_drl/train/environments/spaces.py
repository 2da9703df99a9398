"""Observations of any space as arrays, actions as numbers, and their shapes and dtypes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from innet_drl.train.errors import UnavailableEnvironmentError

Arrays = Any
"""Observations: one array [N, ...], or a tuple with the array of each of `EnvironmentSpec.parts`."""


@dataclass(frozen=True)
class Part:
    """One array of an observation: the whole observation, or one key of a dictionary."""

    name: str
    """Key in the dictionary; keys of nested dictionaries are joined by dots. Empty for the whole observation."""
    shape: tuple[int, ...]
    """`(height, width)` or `(channels, height, width)` of an image, `(n,)` of a vector."""
    dtype: Literal["uint8", "float32"]
    scale: float
    """Divisor in networks: the largest value of a uint8 space, otherwise 1."""

    @property
    def nbytes(self) -> int:
        """Bytes of one array."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def observed(self, stack: int) -> tuple[int, ...]:
        """Shape in an observation: `(stack, *shape)`, or `shape` without a stack."""
        return self.shape if stack == 1 else (stack, *self.shape)

    @property
    def is_image(self) -> bool:
        """Whether it is an image; otherwise it is a vector."""
        return len(self.shape) > 1

    def stacked(self, stack: int) -> tuple[int, ...]:
        """Shape as networks see it: `(stack * channels, height, width)`, or `(stack * n,)`."""
        if not self.is_image:
            return (stack * self.shape[0],)
        return (stack * math.prod(self.shape[:-2]), *self.shape[-2:])

    def space(self, stack: int) -> gymnasium.spaces.Box:
        """The space of the array as networks see it."""
        low, high = (0.0, self.scale) if self.scale != 1.0 or self.dtype == "uint8" else (-np.inf, np.inf)
        return gymnasium.spaces.Box(low, high, self.stacked(stack), np.dtype(self.dtype).type)


@dataclass(frozen=True)
class EnvironmentSpec:
    """Shapes and dtypes of an environment, for networks and tables."""

    actions: int
    """Number of actions."""
    stack: int
    """Frames in an observation; with 1 there is no stack dimension."""
    frame_shape: tuple[int, ...]
    """Shape of a frame or vector observation; empty for a dictionary."""
    frame_dtype: Literal["uint8", "float32"]
    """Its dtype; of no use for dictionaries."""
    frames_per_step: int
    """Emulator frames of one agent step; 1 outside Atari."""
    scale: float = field(default=0.0)
    """See `Part.scale`; by default 255 for uint8."""
    parts: tuple[Part, ...] = ()
    """Arrays of a dictionary or tuple; empty if the observation is one array."""
    left_out: tuple[str, ...] = field(default=(), compare=False)
    """Parts of the observation that are text, which networks do not get."""

    def __post_init__(self) -> None:
        if not self.scale:
            object.__setattr__(self, "scale", 255.0 if self.frame_dtype == "uint8" else 1.0)

    @property
    def action_dtype(self) -> Literal["uint8", "int32"]:
        """The smaller of two integer types that torch and the memory support and that holds all actions."""
        return "uint8" if self.actions <= 256 else "int32"

    @property
    def observation_shape(self) -> tuple[int, ...]:
        """Shape of one observation that is an array, including the stack."""
        return self.arrays[0].observed(self.stack)

    @property
    def is_image(self) -> bool:
        """Whether the observation is one image."""
        return len(self.frame_shape) > 1

    @property
    def arrays(self) -> tuple[Part, ...]:
        """The arrays of an observation: the parts of a dictionary, or the observation itself."""
        return self.parts or (Part("", self.frame_shape, self.frame_dtype, self.scale),)

    def make(self, array: Callable[[Part], Any]) -> Any:
        """Makes an observation, or a batch of them, of what `array` returns for each of its arrays."""
        made = tuple(array(part) for part in self.arrays)
        return made if self.parts else made[0]

    @property
    def observation_space(self) -> gymnasium.Space[object]:
        """The space of observations as networks see them.

        `Box(stack * channels, height, width)`, `Box(stack * n)`, or a `Dict` of these.
        """
        if self.parts:
            return gymnasium.spaces.Dict({part.name: part.space(self.stack) for part in self.parts})
        return self.arrays[0].space(self.stack)


MAX_ACTIONS = 4096
"""Largest number of actions of a product of discrete spaces."""
MAX_ONE_HOT = 4096
"""Largest length of a one-hot vector."""
CONTINUOUS_PAGE = "docs/how-to/environments.md#continuous-actions"

Encode = Callable[[Any], Arrays]
"""Converts a vector environment's observations to new arrays [N, ...], as the environment may reuse its own."""


@dataclass(frozen=True)
class Leaf:
    """One array of an observation, and its conversion to a frame."""

    part: Part
    dtype: str
    """Dtype of values that a data set may have for it."""
    shape: tuple[int, ...]
    """Shape in the space."""
    encode: Callable[[NDArray[Any]], NDArray[Any]]
    """Converts a batch of values [N, *shape] to frames [N, *part.shape]."""


@dataclass(frozen=True)
class Encoder:
    """Conversion of observations to frames."""

    leaves: tuple[Leaf, ...]
    """Arrays of an observation; a single one with an empty name is the whole observation."""
    encode: Encode
    """Converts a batch of observations to frames [N, *shape]."""
    left_out: tuple[str, ...] = ()
    """Parts of the observation that are text."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """The frames' shapes and dtypes."""
        return tuple(leaf.part for leaf in self.leaves)


def encoder(space: spaces.Space[Any], environment: str) -> Encoder:
    """Returns the encoder of a space."""
    if not isinstance(space, spaces.Dict | spaces.Tuple):
        leaf = _array(space, "", environment)
        return Encoder((leaf,), leaf.encode)
    left_out: list[str] = []
    found = _leaves(space, "", lambda batch: batch, environment, left_out)
    if not found:
        reason = f"no part of its observations {space} is made of numbers: wrap it (environment_wrappers)"
        raise unusable(environment, reason)
    leaves = tuple(leaf for leaf, _ in found)
    if len({leaf.part.name for leaf in leaves}) < len(leaves):
        raise unusable(environment, f"two parts of {space} have one name")
    return Encoder(leaves, lambda batch: tuple(leaf.encode(find(batch)) for leaf, find in found), tuple(left_out))


def _leaves(
    space: spaces.Space[Any], name: str, find: Callable[[Any], Any], environment: str, left_out: list[str]
) -> list[tuple[Leaf, Callable[[Any], Any]]]:
    """Arrays of a nested space, each with a function that finds it in a batch. Texts go to `left_out`."""
    if isinstance(space, spaces.Dict | spaces.Tuple):
        items: Any = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)

        def of_key(key: Any) -> Callable[[Any], Any]:
            return lambda batch: find(batch)[key]

        return [
            leaf
            for key, inner in items
            for leaf in _leaves(inner, f"{name}.{key}" if name else str(key), of_key(key), environment, left_out)
        ]
    # MiniGrid's missions are of a space of their own.
    if isinstance(space, spaces.Text) or (space.dtype is not None and space.dtype.kind == "U"):
        left_out.append(name)
        return []
    return [(_array(space, name, environment), find)]


def _array(space: spaces.Space[Any], name: str, environment: str) -> Leaf:
    """One array of an observation."""
    where = f" in {name!r}" if name else ""
    if isinstance(space, spaces.Box):
        part, encode = _box(space, name)
    elif isinstance(space, spaces.MultiBinary):
        part = Part(name, (math.prod(space.shape),), "float32", 1.0)
        encode = _flat
    elif isinstance(space, spaces.Discrete):
        part, encode = _one_hot(name, [int(space.n)], [int(space.start)], environment)
    elif isinstance(space, spaces.MultiDiscrete):
        starts = np.broadcast_to(space.start, space.nvec.shape)
        part, encode = _one_hot(name, space.nvec.flatten().tolist(), starts.flatten().tolist(), environment)
    else:
        reason = (
            f"its observations {space}{where} are no arrays of one shape: wrap it (environment_wrappers), so that it "
            "returns a Box or a Dict of boxes"
        )
        raise unusable(environment, reason)
    expected = space.shape

    def checked(batch: Any) -> NDArray[Any]:
        try:
            array = np.asarray(batch)
        except ValueError:
            array = np.empty((0,))
        if array.shape[1:] != expected or array.dtype == object:
            found = "arrays of several shapes" if array.dtype == object or not array.size else str(array.shape[1:])
            raise unusable(
                environment,
                f"it returned observations of the shape {found}{where}, and its observation space says {expected}: "
                "return arrays of the space's shape, or declare another space",
            )
        if part.dtype == "uint8" and array.dtype.kind == "f":
            raise unusable(
                environment,
                f"it returned observations of {array.dtype}{where}, and its observation space says {space.dtype}: "
                "return that, or declare another space",
            )
        return encode(array)

    dtype = "int64" if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) else part.dtype
    return Leaf(part, dtype, tuple(expected or ()), checked)


def _flat(array: NDArray[Any]) -> NDArray[Any]:
    return np.array(array, np.float32, order="C").reshape(len(array), -1)


def _box(space: spaces.Box, name: str) -> tuple[Part, Callable[[NDArray[Any]], NDArray[Any]]]:
    small = space.dtype == np.uint8 or space.dtype == np.bool_
    scale = max(1.0, float(np.max(space.high))) if space.dtype == np.uint8 else 1.0
    shape = space.shape
    if not (len(shape) in (3, 4) or (len(shape) == 2 and small)):
        return Part(name, (math.prod(shape),), "float32", scale), _flat
    dtype = np.uint8 if small else np.float32
    last = len(shape) > 2 and shape[-1] <= shape[-3]
    height, width, channels = shape[-3:] if last else (*shape[-2:], shape[-3] if len(shape) > 2 else 1)
    # A leading fourth dimension is a stack of frames, which is merged with the channels.
    stack = shape[0] if len(shape) == 4 else 1
    image = (height, width) if len(shape) == 2 else (stack * channels, height, width)

    def encode(array: NDArray[Any]) -> NDArray[Any]:
        if last:
            array = np.moveaxis(array, -1, -3)
        # A fixed memory layout: the rounding of sums depends on it.
        return np.array(array, dtype, order="C").reshape(len(array), *image)

    return Part(name, image, "uint8" if small else "float32", scale), encode


def _one_hot(
    name: str, sizes: list[int], starts: list[int], environment: str
) -> tuple[Part, Callable[[NDArray[Any]], NDArray[np.float32]]]:
    length = sum(sizes)
    if length > MAX_ONE_HOT:
        reason = (
            f"a one-hot vector of its observation has {length:,} numbers, more than {MAX_ONE_HOT:,}: return a smaller "
            "observation by a wrapper (environment_wrappers)"
        )
        raise unusable(environment, reason)
    offsets = np.cumsum([0, *sizes[:-1]]) - np.array(starts)

    def encode(array: NDArray[Any]) -> NDArray[np.float32]:
        vectors = np.zeros((len(array), length), np.float32)
        np.put_along_axis(vectors, array.reshape(len(array), -1).astype(np.int64) + offsets, 1.0, 1)
        return vectors

    return Part(name, (length,), "float32", 1.0), encode


@dataclass(frozen=True)
class Actions:
    """Actions of a discrete space, numbered from 0."""

    count: int
    shape: tuple[int, ...]
    """Shape of an action."""
    act: Callable[[NDArray[np.int64]], Any]
    """Converts numbers [N] to actions of N environments."""
    number: Callable[[NDArray[np.int64]], NDArray[np.int64]]
    """Converts actions [N, *shape] to numbers [N], -1 where the space has no such action."""


def actions(space: spaces.Space[Any], environment: str) -> Actions:
    """Returns the conversion of numbers from 0 to actions of a space."""
    if isinstance(space, spaces.Discrete):
        start = int(space.start)
        return numbered_from(int(space.n), start)
    if isinstance(space, spaces.MultiDiscrete | spaces.MultiBinary):
        sizes = space.nvec if isinstance(space, spaces.MultiDiscrete) else np.full(space.shape, 2)
        starts = space.start if isinstance(space, spaces.MultiDiscrete) else 0
        shape, flat = sizes.shape, sizes.flatten()
        count = math.prod(int(size) for size in flat)
        if count > MAX_ACTIONS:
            reason = (
                f"its actions {space} are {count:,} combinations, more than {MAX_ACTIONS:,}: offer fewer by a wrapper "
                "(environment_wrappers)"
            )
            raise unusable(environment, reason)
        table = np.stack(np.unravel_index(np.arange(count), flat), 1).reshape(count, *shape) + starts
        table = table.astype(space.dtype)

        def number(actions: NDArray[np.int64]) -> NDArray[np.int64]:
            digits = (actions - starts).reshape(len(actions), -1)
            possible = ((digits >= 0) & (digits < flat)).all(1)
            return np.where(possible, np.ravel_multi_index(tuple(digits.T), flat, mode="clip"), -1)

        return Actions(count, shape, lambda numbers: table[numbers], number)
    raise unusable(
        environment,
        f"its actions are {space}, and Q-learning needs discrete ones: {CONTINUOUS_PAGE} shows how to train continuous "
        "actions by the replay interface",
    )


def numbered_from(count: int, start: int = 0) -> Actions:
    """Returns the conversion of numbers from 0 to integers from `start`."""

    def number(actions: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.where((actions >= start) & (actions - start < count), actions - start, -1)

    return Actions(count, (), lambda numbers: numbers + start, number)


def is_gymnasium(file: str) -> bool:
    """Whether a file is Gymnasium's, and not of one of its environments."""
    package = os.path.dirname(gymnasium.__file__)
    return file.startswith(package + os.sep) and not file.startswith(os.path.join(package, "envs", ""))


def unusable(environment: str, reason: str) -> UnavailableEnvironmentError:
    """The error of an environment of this name."""
    return UnavailableEnvironmentError(f"environment {environment}: {reason}")
