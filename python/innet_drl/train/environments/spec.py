"""Shapes and dtypes of an environment, as tables and networks need them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import gymnasium
import numpy as np

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
