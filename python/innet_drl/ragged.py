"""Arrays of parts of any length: the values one after the other, and the offsets between the parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from innet_drl.errors import ConfigError, naming_extras

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike, DTypeLike, NDArray

__all__ = ["Ragged"]

Side: TypeAlias = Literal["right", "left"]


class Ragged:
    """Parts of any length, such as the tokens of each item of a batch: `ragged[i]` is a part, a view of the values.

    A slice, an array of indices or a mask gives the `Ragged` of these parts, and iteration each part. Parts that have
    parts of any length themselves, such as the steps of a sequence, have a `Ragged` as their `values`.

    Batches have NumPy arrays, or tensors where they are asked for by `device=`.

    Args:
        values: The values of all parts, `[total, ...]`, one part after the other; or a `Ragged`, whose parts are
            counted.
        offsets: int64 `[n + 1]`: where each part begins, and the end; from 0 to `len(values)`.

    Raises:
        ConfigError: Offsets that are no integers, do not begin at 0, fall, or do not end at the values.
    """

    __slots__ = ("_offsets", "_values")

    def __init__(self, values: Any, offsets: Any) -> None:
        if not isinstance(values, Ragged) and not _is_tensor(values):
            values = np.atleast_1d(values)
        ends = _numpy(offsets)
        if ends.ndim != 1 or not ends.size or ends.dtype.kind not in "iu":
            raise ConfigError(f"offsets of a Ragged are int64[n + 1], got {ends.dtype}{list(ends.shape)}")
        if ends[0] != 0 or ends[-1] != len(values):
            raise ConfigError(f"offsets of a Ragged go from 0 to its {len(values)} values, got {ends[0]} to {ends[-1]}")
        if (fall := np.flatnonzero(ends[1:] < ends[:-1])).size:
            row = int(fall[0])
            raise ConfigError(f"offsets of a Ragged do not fall: row {row} has {ends[row]} and then {ends[row + 1]}")
        self._values = values
        self._offsets = offsets if _is_tensor(offsets) else ends.astype(np.int64, copy=False)

    @classmethod
    def _over(cls, values: Any, offsets: Any) -> Self:
        """A `Ragged` over arrays that fit."""
        ragged = cls.__new__(cls)
        ragged._values, ragged._offsets = values, offsets
        return ragged

    @classmethod
    def of(cls, parts: Sequence[ArrayLike], dtype: DTypeLike | None = None) -> Self:
        """The `Ragged` of some arrays or lists, which are copied.

        Args:
            parts: Arrays `[length, ...]` of one dtype and the same shape after the first dimension.
            dtype: Their dtype; by default that of the first one.

        Raises:
            ConfigError: Parts of several dtypes or shapes, or none without a `dtype`.
        """
        arrays = [np.asarray(part) for part in parts]
        known = [array for array in arrays if array.size] or arrays
        if not known and dtype is None:
            raise ConfigError("a Ragged without parts needs a dtype")
        inner = known[0].shape[1:] if known else ()
        try:
            joined = _joined(arrays, np.dtype(known[0].dtype if dtype is None else dtype), inner, "row {}".format)
        except ValueError as error:
            raise ConfigError(f"parts of a Ragged: {error}") from None
        return cls._over(*joined)

    @property
    def values(self) -> Any:
        """The values of all parts: an array `[total, ...]`, or a `Ragged`."""
        return self._values

    @property
    def offsets(self) -> Any:
        """int64 `[n + 1]`: where each part begins in the values, and the end."""
        return self._offsets

    @property
    def lengths(self) -> Any:
        """int64 `[n]`: the length of each part."""
        return self._offsets[1:] - self._offsets[:-1]

    def __len__(self) -> int:
        """Number of parts."""
        return len(self._offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        # Python's integers: NumPy's take several times as long.
        values, ends = self._values, self._offsets.tolist()
        return (values[begin:end] for begin, end in itertools.pairwise(ends))

    def __getitem__(self, key: Any) -> Any:
        """A part by its number, or the `Ragged` of some by a slice, a mask or an array of their numbers."""
        parts = range(len(self))
        if not isinstance(key, slice) and np.ndim(key) == 0:
            index = parts[key]
            return self._values[int(self._offsets[index]) : int(self._offsets[index + 1])]
        if isinstance(key, slice) and (chosen := parts[key]).step == 1:
            offsets = self._offsets[chosen.start : max(chosen.start, chosen.stop) + 1]
            return self._over(self._values[int(offsets[0]) : int(offsets[-1])], offsets - offsets[0])
        numbers = np.arange(len(self))
        numbers = numbers[key] if isinstance(key, slice) else numbers[_numpy(key) if len(key) else []]
        starts, lengths = _numpy(self._offsets)[numbers], _numpy(self.lengths)[numbers]
        offsets = _offsets_of(lengths)
        indexes = np.repeat(starts - offsets[:-1], lengths) + np.arange(offsets[-1])
        return self._over(self._values[indexes], _like(self._offsets, offsets))

    def padded(self, value: Any = 0, length: int | tuple[int, ...] | None = None, side: Side = "right") -> Any:
        """The parts as one array of equal lengths `[n, length, ...]`; a copy. Parts that are `Ragged` are padded, too.

        Args:
            value: What fills the places without an element.
            length: Elements of each part; by default those of the longest one. For a `Ragged` of `Ragged` the length of
                each level, the outermost first.
            side: The side of the padding, `"right"` or `"left"` of the elements.

        Raises:
            ConfigError: A `length` shorter than a part.
        """
        return self._spread(value, length, side, masked=False)

    def mask(self, length: int | tuple[int, ...] | None = None, side: Side = "right") -> Any:
        """The places, bool `[n, length]`, where the array of `padded` with the same arguments has elements.

        Of a `Ragged` of `Ragged` it is `[n, length, inner length]`.

        Raises:
            ConfigError: As `padded`.
        """
        return self._spread(False, length, side, masked=True)

    def _spread(self, fill: Any, length: int | tuple[int, ...] | None, side: Side, *, masked: bool) -> Any:
        """The values, or a mask of them, in places of equal lengths."""
        if side not in ("right", "left"):
            raise ConfigError(f'side is "right" or "left", got {side!r}')
        outer, inner = (length[0], length[1:] or None) if isinstance(length, tuple) else (length, None)
        lengths = self.lengths[:, None]
        longest = int(lengths.max()) if len(self) else 0
        outer = longest if outer is None else outer
        if outer < longest:
            row = int(lengths.argmax())
            raise ConfigError(f"length is {outer}, and row {row} has {longest} elements: cut it, or give a larger one")
        columns = _like(lengths, np.arange(outer))
        places = columns < lengths if side == "right" else columns >= outer - lengths
        values = self._values
        if isinstance(values, Ragged):
            values = values._spread(fill, inner, side, masked=masked)
        elif masked:
            return places
        shape = (*places.shape, *values.shape[1:])
        spread = values.new_full(shape, fill) if _is_tensor(values) else np.full(shape, fill, values.dtype)
        spread[places] = values
        return spread

    def torch(self) -> torch.Tensor:
        """The parts as a jagged nested tensor (`torch.nested`), which shares the memory of values and offsets.

        Raises:
            ConfigError: A `Ragged` of `Ragged`: take that of its `values`.
            MissingExtraError: torch is not installed.
        """
        if isinstance(self._values, Ragged):
            raise ConfigError("a jagged nested tensor has one level of offsets: use ragged.values.torch()")
        with naming_extras():
            import torch
        tensors: Any = self._map(torch.as_tensor)
        nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(tensors._values, tensors._offsets)
        return nested

    def _map(self, function: Callable[[Any], Any]) -> Self:
        """A `Ragged` of the function's results for each array."""
        values = self._values._map(function) if isinstance(self._values, Ragged) else function(self._values)
        return self._over(values, function(self._offsets))

    def __eq__(self, other: object) -> bool:
        """Whether the other has the same parts, of the same dtype."""
        if not isinstance(other, Ragged) or isinstance(self._values, Ragged) != isinstance(other._values, Ragged):
            return False
        pairs = [(self._offsets, other._offsets)]
        if isinstance(self._values, Ragged):
            offsets, others = map(_numpy, pairs[0])
            return np.array_equal(offsets, others) and bool(self._values == other._values)
        pairs.append((self._values, other._values))
        return all(one.dtype == other.dtype and np.array_equal(_numpy(one), _numpy(other)) for one, other in pairs)

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, *_: object, **__: object) -> NDArray[Any]:
        raise ConfigError("a Ragged is no array: take ragged.values or ragged.padded()")

    def __repr__(self) -> str:
        of = f"{int(self.lengths.min())} to {int(self.lengths.max())}" if len(self) else "no"
        values, shape = self._values, [str(len(self)), "None"]
        while isinstance(values, Ragged):
            values = values._values
            shape.append("None")
        shape += map(str, values.shape[1:])
        return f"<Ragged of {len(self)} parts with {of} elements: {values.dtype} ({', '.join(shape)})>"


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch"


def _numpy(array: Any) -> NDArray[Any]:
    return array.detach().cpu().numpy() if _is_tensor(array) else np.asarray(array)


def _like(array: Any, values: NDArray[Any]) -> Any:
    """The values as a tensor beside a tensor."""
    return array.new_tensor(values) if _is_tensor(array) else values


def _offsets_of(lengths: Any) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _of_memory(values: Any, levels: list[Any], step: int | None) -> Ragged:
    """The array of a batch, from its values and the offsets of each level, the outermost first.

    In a slice of a batch every `step`-th of the outermost offsets begins a part.
    """
    for offsets in reversed(levels):
        values = Ragged._over(values, offsets)
    ragged: Ragged = values if step is None else values[::step]
    return ragged


def _read_rows(
    value: Any, dtype: np.dtype[Any], inner: tuple[int, ...], steps: int | None, streams: int
) -> tuple[Any, Any]:
    """The values and offsets of an argument of `append` or `extend`: one row of each stream, in each of the steps.

    Raises:
        ValueError: A value that is no `Ragged`, list, or array of rows; the message has the row.
    """
    leading = (streams,) if steps is None else (steps, streams)
    rows = streams * (steps or 1) if steps != 0 else 0
    expected = f"has to have {rows} rows" if steps is None else f"has to have {steps} steps of {streams} rows"

    def position(row: int) -> str:
        return f"stream {row % streams}" + ("" if steps is None else f" at step {row // streams}")

    if isinstance(value, Ragged):
        flat = value
        if steps is not None and isinstance(value._values, Ragged):
            flat = value._values if _numpy(value.lengths).tolist() == [streams] * steps else value
        if isinstance(flat._values, Ragged) or len(flat) != rows:
            raise ValueError(f"{expected}, got {value!r}")
        return _numpy(flat._values), _numpy(flat._offsets)
    if _is_tensor(value) or isinstance(value, np.ndarray):
        array = _numpy(value)
        if array.dtype.kind not in "OU":
            if array.shape[: len(leading)] != leading or array.ndim != len(leading) + 1 + len(inner):
                rows_of = "environment" if steps is None else "environment at each step"
                got = f"{array.dtype}{list(array.shape)}"
                raise ValueError(f"{expected}, got {got}: give a list with an array for each {rows_of}")
            length = array.shape[len(leading)]
            flat_shape = (rows * length, *array.shape[len(leading) + 1 :])
            return array.reshape(flat_shape), np.arange(rows + 1) * length
        if not all(isinstance(row, str) for row in array.flat):
            raise ValueError("is an object array: give a list with an array for each row")
        value = array.tolist()
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, Sequence):
        raise ValueError(f"has to be a Ragged or a list with an array for each row, got a {type(value).__name__}")
    if steps is not None:
        counts = [len(part) if isinstance(part, (Sequence, np.ndarray)) else 1 for part in parts]
        odd = next((step for step, count in enumerate(counts) if count != streams), None)
        if len(parts) != steps or odd is not None:
            got = f"{len(parts)} steps" if odd is None else f"{counts[odd]} at step {odd}"
            raise ValueError(f"{expected}, got {got}")
        parts = [row for part in parts for row in part]
    if len(parts) != rows:
        raise ValueError(f"{expected}, got {len(parts)}")
    return _joined([_part(part, dtype, inner, row, position) for row, part in enumerate(parts)], dtype, inner, position)


def _part(part: Any, dtype: np.dtype[Any], inner: tuple[int, ...], row: int, position: Callable[[int], str]) -> Any:
    """One row as an array: a text as its bytes, and numbers of Python converted unless one would change."""
    if isinstance(part, str) and dtype == np.uint8 and not inner:
        return np.frombuffer(part.encode(), np.uint8)
    try:
        array = _numpy(part)
    except ValueError as error:
        raise ValueError(f"of {position(row)} is no array: {error}") from None
    held = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}.get(array.dtype.kind, "")
    if array.dtype == dtype or hasattr(part, "__array__") or dtype.kind not in held:
        return array
    with np.errstate(over="ignore"):
        converted = array.astype(dtype)
    changed = np.isinf(converted) != np.isinf(array) if array.dtype.kind == "f" else converted != array
    if changed.any():
        raise ValueError(f"of {position(row)} has the number {array[changed].flat[0]}, which {dtype} does not hold")
    return converted


def _joined(
    parts: list[Any], dtype: np.dtype[Any], inner: tuple[int, ...], position: Callable[[int], str]
) -> tuple[Any, NDArray[np.int64]]:
    """One array of all parts, which have the dtype and the inner shape, and their offsets."""
    empty = np.empty((0, *inner), dtype)
    for row, part in enumerate(parts):
        if part.shape == (0,):
            # An empty list has no dtype, and no inner shape.
            parts[row] = empty
        elif part.dtype != dtype or not part.ndim or part.shape[1:] != inner:
            shape = f"({', '.join(['None', *map(str, inner)])}{',' * (not inner)})"
            remedy = f': convert it by .astype("{dtype}")' if part.dtype.kind in "biuf" and part.dtype != dtype else ""
            raise ValueError(
                f"of {position(row)} has to be {dtype} of the shape {shape}, got {part.dtype}{list(part.shape)}{remedy}"
            )
    return np.concatenate([empty, *parts]), _offsets_of([len(part) for part in parts])
