"""Rows of a data set between files and tables: their flags and episodes, and whether they fit a table's columns."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl import errors, structures

Block = dict[str, Any]
"""Consecutive rows by column: each array, or `Ragged`, has an element for each row."""

FLAGS = ("terminated", "truncated", "final")
UNREAD: NDArray[Any] = np.empty(0)
"""Placeholder of a column that was not read, so that errors can name all columns of a file."""
_DAMAGES = (OSError, ValueError, TypeError, LookupError, RuntimeError)
"""Exceptions that a damaged file raises in pyarrow and h5py."""


def of_episode(target: str, number: int, episode: Mapping[str, Any]) -> Block:
    """The rows of an episode, with all flags and its number.

    Raises:
        SchemaError: No flags, or arrays of unequal lengths.
    """
    # Batches are mappings without being registered as such.
    block = {
        name: array._map(_native) if isinstance(array, innet.Ragged) else _native(np.asarray(array))
        for name, array in structures.flatten(dict(episode.items())).items()
        if name not in ("first", "episode")
    }
    for flag in ("terminated", "truncated"):
        if flag not in block:
            raise errors.SchemaError(f"{target}: episode {number} has no {flag!r}; it has {', '.join(block)}")
    for name, array in block.items():
        dtype, _ = kind_of(array)
        if not (dtype.kind in "biuf" and dtype.itemsize <= 8):
            raise errors.SchemaError(
                f"{target}: column {name!r} is {dtype}; a column has bool, or numbers of up to 64 bits"
            )
    count = len(block["terminated"])
    block.setdefault("final", np.zeros(count, bool))
    lengths = {name: len(array) for name, array in block.items()}
    if len(set(lengths.values())) > 1 or count == 0:
        raise errors.SchemaError(
            f"{target}: the arrays of an episode have one element for each of its rows, at least one; episode {number} "
            f"has {lengths}"
        )
    for flag in FLAGS:
        values = np.asarray(block[flag])
        if values.dtype != bool or values.ndim != 1:
            block[flag] = _numbers(f"{target}, episode {number}", flag, values, count, 0)
    block["episode"] = np.full(count, number, np.int64)
    return block


def kind_of(array: Any) -> tuple[np.dtype[Any], tuple[int | None, ...]]:
    """Dtype of an array of rows, and the shape of one: `(None, ...)` of a `Ragged`."""
    if not isinstance(array, innet.Ragged):
        return array.dtype, array.shape[1:]
    dtype, shape = kind_of(array.values)
    return dtype, (None, *shape)


def joined(arrays: list[Any]) -> Any:
    """The rows of several arrays, one after the other."""
    if not any(isinstance(array, innet.Ragged) for array in arrays):
        return np.concatenate(arrays)
    several = [array if isinstance(array, innet.Ragged) else ragged_of(array) for array in arrays]
    lengths = np.concatenate([array.lengths for array in several])
    return innet.Ragged(joined([array.values for array in several]), np.concatenate([[0], np.cumsum(lengths)]))


def ragged_of(array: NDArray[Any]) -> innet.Ragged:
    """Rows of equal lengths as a `Ragged`."""
    count, length = array.shape[:2]
    return innet.Ragged(array.reshape(count * length, *array.shape[2:]), np.arange(count + 1) * length)


def _native(array: NDArray[Any]) -> NDArray[Any]:
    """The array in the byte order of this machine."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def of_same_columns(target: str, blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks, if all have the columns of the first one.

    Raises:
        ConfigError: There is no block.
        SchemaError: A block of other columns.
    """
    first: dict[str, tuple[Any, ...]] | None = None
    for block in blocks:
        columns = {name: kind_of(array) for name, array in block.items()}
        if first is None:
            first = columns
        elif columns != first:
            raise errors.SchemaError(f"{target}: {_difference(columns, first)} in the first episode")
        yield {name: block[name] for name in first}
    if first is None:
        raise errors.ConfigError(f"{target}: there is no episode to write")


def _difference(columns: Mapping[str, tuple[Any, ...]], first: Mapping[str, tuple[Any, ...]]) -> str:
    name = next(name for name in [*columns, *first] if columns.get(name) != first.get(name))
    here, there = (" ".join(map(str, known.get(name, ("missing",)))) for known in (columns, first))
    return f"column {name!r} is {here}, and {there}"


def with_first(source: str, blocks: Iterable[Block]) -> Iterator[Block]:
    """The blocks with `final` and `first`: where `episode` changes, or as in the file, or after each end.

    Raises:
        SchemaError: A block without `terminated` or `truncated`, several flags in a row, or a final row that follows no
            end.
    """
    last: Block | None = None
    begin = 0
    for block in blocks:
        missing = [flag for flag in FLAGS[:2] if flag not in block]
        if missing:
            raise no_column(source, missing[0], block)
        count = len(block["terminated"])
        if count == 0:
            continue
        block = dict(block)
        block.setdefault("final", np.zeros(count, bool))
        for name in (*FLAGS, "first", "episode"):
            if name in block:
                block[name] = _numbers(source, name, block[name], count, begin)
        ended = block["terminated"] | block["truncated"]
        if "episode" in block:
            first = block["episode"] != _before(block, last, "episode")
            first[0] |= last is None
        elif "first" in block:
            first = block["first"]
        else:
            # A final row belongs to the episode that it ends.
            ended_before = _before({"ended": ended}, last, "ended", True)
            final_before = _before(block, last, "final", False)
            first = (ended_before & ~block["final"]) | final_before
        block["first"], block["ended"] = first, ended
        after_no_end = block["final"] & (first | ~_before(block, last, "ended", False))
        if after_no_end.any():
            raise errors.SchemaError(f"{source}: a final row follows no terminated or truncated one")
        last = {name: block[name][-1:] for name in ("ended", "final", "episode") if name in block}
        del block["ended"]
        begin += count
        yield block


def _numbers(source: str, name: str, values: NDArray[Any], count: int, begin: int) -> NDArray[Any]:
    """A flag as bool, or the numbers of the episodes, of the rows from `begin` on."""
    if values.size != count:
        raise errors.SchemaError(f"{source}: column {name!r} has the shape {values.shape[1:]}, and is a number a row")
    values = values.reshape(count)
    # NaN is unequal to itself.
    valid = values == values if name == "episode" else (values == 0) | (values == 1)
    if not np.all(valid):
        row = int(np.argmin(np.broadcast_to(valid, count)))
        raise errors.SchemaError(
            f"{source}: column {name!r} has {values[row]!s} in row {begin + row}, and "
            + ("numbers the episodes" if name == "episode" else "is a flag, 0 or 1")
        )
    return values if name == "episode" else values.astype(bool)


def _before(block: Block, last: Block | None, name: str, at_start: Any = None) -> NDArray[Any]:
    """The value of the row before each row."""
    values = block[name]
    start = values[:1] if at_start is None else np.asarray([at_start], values.dtype)
    return np.concatenate([start if last is None else last[name], values[:-1]])


def regroup(blocks: Iterable[Block]) -> Iterator[Block]:
    """One block for each episode."""
    held: list[Block] = []

    def episode() -> Block:
        return {name: joined([piece[name] for piece in held]) for name in held[0]}

    for block in blocks:
        for piece in pieces(block, len(block["first"]), by_episode=True):
            if held and piece["first"][0]:
                yield episode()
                held = []
            held.append(piece)
    if held:
        yield episode()


def pieces(block: Block, size: int, *, by_episode: bool = False) -> Iterator[Block]:
    """The block in parts of at most `size` rows, and `by_episode` each of one episode."""
    count = len(next(iter(block.values())))
    if count <= size and not by_episode:
        yield block
        return
    cuts = sorted({0, *np.flatnonzero(block["first"]).tolist(), count}) if by_episode else [0, count]
    for first, end in itertools.pairwise(cuts):
        for begin in range(first, end, size):
            yield _rows(block, begin, min(begin + size, end))


def _rows(block: Block, begin: int, end: int) -> Block:
    return {name: array[begin:end] for name, array in block.items()}


def fit(source: str, block: Block, table: innet.Table, names: Mapping[str, str]) -> Block:
    """The columns of the table, with its dtypes and shapes, and the flags.

    `names` has columns of the table to columns of the data set, where they differ.

    Raises:
        SchemaError: A column is missing, has another shape, or values that its dtype does not hold.
    """
    fitting = {name: block[name] for name in (*FLAGS, "first")}
    count = len(fitting["first"])
    for name, column in table.columns.items():
        theirs = names.get(name, name)
        if theirs not in block:
            raise no_column(source, theirs, block, f" for table {table.name!r}")
        array = block[theirs]
        if kind_of(array)[0].kind in "OU":
            # Texts, which a writer makes bytes of.
            fitting[name] = array
            continue
        ragged = None
        if column.is_ragged and kind_of(array)[1][1:] == column.shape[1:]:
            ragged = array if isinstance(array, innet.Ragged) else ragged_of(array)
            array = ragged.values
        elif column.is_ragged or isinstance(array, innet.Ragged) or not _same_order(array.shape[1:], column.shape):
            raise errors.SchemaError(
                f"{source}: column {theirs!r} has the shape {kind_of(array)[1]}, and {column.shape} in table "
                f"{table.name!r}"
            )
        integers = array.dtype.kind in "iu" and column.dtype.kind in "iu"
        if not (integers or np.can_cast(array.dtype, column.dtype, "same_kind")):
            raise errors.SchemaError(
                f"{source}: column {theirs!r} is {array.dtype}, and {column.dtype} in table {table.name!r}: "
                "convert the file, or give the table this dtype"
            )
        with np.errstate(over="ignore"):
            shape = array.shape if ragged is not None else (count, *column.shape)
            cast = array.reshape(shape).astype(column.dtype, copy=False)
        if cast.dtype == array.dtype:
            held = True
        elif array.dtype.kind in "iu":
            held = np.array_equal(cast.ravel(), array.ravel())
        else:
            # Rounded, but finite where they were.
            held = np.array_equal(np.isfinite(cast).ravel(), np.isfinite(array).ravel())
        if not held:
            raise errors.SchemaError(
                f"{source}: column {theirs!r} has values that {column.dtype} of table {table.name!r} does not hold"
            )
        fitting[name] = cast if ragged is None else innet.Ragged(cast, ragged.offsets)
    return fitting


def no_column(place: str, name: str, known: Iterable[str], use: str = "") -> errors.SchemaError:
    """The error of a column that a data set or table does not have."""
    names = list(known)
    close = errors.closest(name, names)
    hint = f"{close} It has" if close else "; it has"
    return errors.SchemaError(f"{place} has no column {name!r}{use}{hint} {', '.join(names)}")


def _same_order(theirs: tuple[int, ...], ours: tuple[int | None, ...]) -> bool:
    """Whether values of the two shapes have the same order: equal but for dimensions of 1, or one of them is flat."""
    if math.prod(theirs) != math.prod(size or 0 for size in ours):
        return False
    long = [[size for size in shape if size != 1] for shape in (theirs, ours)]
    return long[0] == long[1] or min(map(len, long)) <= 1


@contextlib.contextmanager
def read_errors(source: str) -> Iterator[None]:
    """Turns errors of a damaged file into one that names it.

    Raises:
        CorruptError: Instead of them.
        StorageError: Instead of a missing permission.
    """
    try:
        yield
    except errors.ReplayError:
        raise
    except PermissionError as error:
        raise errors.StorageError(f"{source} cannot be read: {error.strerror}") from error
    except _DAMAGES as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise errors.CorruptError(
            f"{source} cannot be read: {reason}; it is damaged, cut off, or of another format"
        ) from error


@contextlib.contextmanager
def storage_errors(target: str, but: Container[OSError] = ()) -> Iterator[None]:
    """Turns errors of the operating system into one that names the file.

    Errors in `but` pass: the caller's own episodes raised them.

    Raises:
        StorageError: Instead of them.
    """
    try:
        yield
    except errors.ReplayError:
        raise
    except OSError as error:
        if error in but:
            raise
        raise errors.StorageError(f"{target} cannot be written: {error.strerror or error}") from error
