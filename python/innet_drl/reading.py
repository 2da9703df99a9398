"""Reading of values that callers give to the fields of definitions: each is checked, and becomes what JSON can say."""

from __future__ import annotations

import json
import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, SupportsFloat, TypeAlias

import numpy as np

from innet_drl.errors import ConfigError

Codec: TypeAlias = Literal["lz4", "zstd", "none"]
Padding: TypeAlias = Literal["zero", "repeat"]
Sampler: TypeAlias = Literal["prioritized", "uniform", "fifo", "lifo", "max_heap", "min_heap", "rank_based"]

_RANGES = {
    "after": (0, 16_384),
    "before": (0, 16_384),
    "burn_in": (0, 16_384),
    "capacity": (1, 1 << 24),
    "capacity_bytes": (0, (1 << 64) - 1),
    "length": (1, 16_384),
    "max_length": (0, (1 << 32) - 1),
    "max_sample_lag": (0, (1 << 32) - 1),
    "max_steps": (1, 65_534),
    "max_times_sampled": (0, (1 << 32) - 1),
    "max_version_lag": (0, (1 << 32) - 1),
    "min_size": (1, 1 << 24),
    "n": (1, 1024),
    "period": (1, 65_535),
    "priority_unit_log2": (-30, 0),
    "queue_size": (0, 1 << 24),
    "stack": (1, 1024),
}
"""Integers by their names, for errors: the core checks them, but reads none beyond its integer types."""


def typed(types: Any, what: str, name: str, value: Any) -> Any:
    """The value, if it is of one of these types."""
    if not isinstance(value, types):
        # Not the value: an array has a long `repr`.
        raise TypeError(f"{name} is {what}, got a {type(value).__name__}")
    return value


def text(name: str, value: Any) -> str:
    """A text of Unicode."""
    read = str.__str__(typed(str, "a text", name, value))
    try:
        read.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name} is a text of Unicode, got {value!r}") from None
    return read


def integer(name: str, value: Any) -> int:
    """An integer that the core can read, of the range of its name."""
    least, most = _RANGES[name]
    try:
        read = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is an integer, got a {type(value).__name__}") from None
    # The core reads 16, 32 or 64 bits.
    largest = next(largest for bits in (16, 32, 64) if most <= (largest := (1 << bits) - 1))
    if not (0 if least >= 0 else -(1 << 31)) <= read <= largest:
        raise ConfigError(f"{name} is an integer from {least} to {most}, got {value}")
    return read


def number(name: str, value: Any) -> float:
    """A finite number."""
    try:
        read = float(typed(SupportsFloat, "a number", name, value))
    except OverflowError:
        read = np.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a number, got a {type(value).__name__}") from None
    if not np.isfinite(read):
        raise ConfigError(f"{name} is a finite number, got {value}")
    return read


def choice(choices: tuple[str, ...], name: str, value: Any) -> Any:
    """One of a few texts."""
    if not isinstance(value, str) or value not in choices:
        raise ConfigError(f"{name} is {' or '.join(map(json.dumps, choices))}, got {value!r}")
    return str.__str__(value)


def numpy_dtype(value: Any) -> np.dtype[Any]:
    """A dtype of NumPy; `object` for what is none."""
    try:
        dtype: np.dtype[Any] = np.dtype(value)
        return dtype
    except (TypeError, ValueError, SyntaxError):
        return np.dtype(object)


def column_dtype(_name: str, value: Any) -> np.dtype[Any]:
    """The dtype of a column."""
    dtype = numpy_dtype(value)
    if dtype.kind not in "biuf" or dtype.itemsize > 8 or not dtype.isnative:
        raise ConfigError(f"a column's dtype is bool, an integer or a float of this machine's byte order; got {value}")
    return dtype


def column_shape(_name: str, value: Any) -> tuple[int | None, ...]:
    """The shape of a value, whose first dimension may be `None`."""
    try:
        many = isinstance(value, Sequence) or np.ndim(value) == 1
        given = list(value) if many else [value]
        free: list[None] = [None] if given[:1] == [None] else []
        shape = tuple(map(operator.index, given[len(free) :]))
    except TypeError:
        free, shape = [], (-1,)
    if not all((not free and not index) <= size < 1 << 32 for index, size in enumerate(shape)):
        raise ConfigError(
            f"a shape is a tuple of positive integers, the first of which may be None, for any length; got {value}"
        )
    return (*free, *shape)


def stack_sizes(name: str, value: Any) -> int | dict[str, int]:
    """A number of stacked frames, or one for each part of an observation."""
    if not isinstance(value, Mapping):
        return integer(name, value)
    # Parts of a tuple have numbers.
    return dict(sorted((str(part), integer(name, stack)) for part, stack in value.items()))


def column_names(name: str, value: Any) -> tuple[str, ...]:
    """Names of columns."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(f'{name} is a sequence of names of columns, as ["hidden"], got {value}')
    return tuple(text("a name of a column", column) for column in value)


def shares(name: str, value: Any) -> dict[str, float]:
    """Names of tables to their shares."""
    what = 'a mapping with a share for each table, as {"online": 0.5, "demonstrations": 0.5}'
    given = typed(Mapping, what, name, value).items()
    return {text("a name of a table", table): number("a share", share) for table, share in given}
