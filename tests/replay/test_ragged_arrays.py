"""`Ragged` against plain lists of arrays, with NumPy and torch."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from innet_drl import Ragged, errors


def random_parts(seed: int, inner: tuple[int, ...] = ()) -> list[NDArray[Any]]:
    random = np.random.default_rng(seed)
    lengths = random.integers(0, 6, random.integers(1, 9)) * (random.random(1) < 0.9)
    return [random.integers(0, 99, (length, *inner)).astype(np.int32) for length in lengths]


def as_numpy(value: Any) -> NDArray[Any]:
    return value.numpy() if isinstance(value, torch.Tensor) else np.asarray(value)


def to_torch(ragged: Ragged) -> Ragged:
    return ragged._map(torch.from_numpy)


def check(ragged: Ragged, parts: list[NDArray[Any]]) -> None:
    assert len(ragged) == len(parts)
    for found, expected in zip(ragged, parts, strict=True):
        np.testing.assert_array_equal(as_numpy(found), expected)
    assert as_numpy(ragged.lengths).tolist() == [len(part) for part in parts]
    assert as_numpy(ragged.offsets).tolist() == [0, *np.cumsum([len(part) for part in parts])]
    assert as_numpy(ragged.offsets).dtype == np.int64


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_parts_slices_and_indices(seed: int, library: str) -> None:
    parts = random_parts(seed, (2,) * (seed % 2))
    ragged = Ragged.of(parts)
    if library == "torch":
        ragged = to_torch(ragged)
    check(ragged, parts)
    for item in range(-len(parts), len(parts)):
        np.testing.assert_array_equal(as_numpy(ragged[item]), parts[item])
    with pytest.raises(IndexError):
        ragged[len(parts)]
    for key in (slice(1, 4), slice(None, None, 2), slice(None, None, -1), slice(3, 1), slice(-2, None)):
        check(ragged[key], parts[key])
    indices = np.random.default_rng(seed).integers(0, len(parts), 5)
    check(ragged[indices], [parts[index] for index in indices])
    check(ragged[indices.tolist()], [parts[index] for index in indices])
    mask = np.arange(len(parts)) % 2 == 0
    check(ragged[mask], parts[::2])
    again = pickle.loads(pickle.dumps(ragged))
    assert again == ragged
    assert ragged != Ragged.of([*parts, parts[0]])
    assert Ragged.of(parts) != Ragged.of(parts, np.int64) if not parts else True


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_and_its_mask(seed: int, library: str, side: Any) -> None:
    inner = (2,) * (seed % 2)
    parts = random_parts(seed, inner)
    ragged = Ragged.of(parts)
    if library == "torch":
        ragged = to_torch(ragged)
    longest = max(len(part) for part in parts)
    for length in (None, longest, longest + 3):
        padded, mask = as_numpy(ragged.padded(-1, length, side)), as_numpy(ragged.mask(length, side))
        width = longest if length is None else length
        assert padded.shape == (len(parts), width, *inner)
        assert padded.dtype == np.int32
        for row, (part, places) in enumerate(zip(parts, mask, strict=True)):
            np.testing.assert_array_equal(padded[row][places], part)
            assert (padded[row][~places] == -1).all()
            ones = slice(0, len(part)) if side == "right" else slice(width - len(part), width)
            assert places[ones].all()
            assert places.sum() == len(part)
    if longest:
        with pytest.raises(errors.ConfigError, match=f"row .* has {longest} elements"):
            ragged.padded(length=longest - 1)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_nested_parts(seed: int, library: str) -> None:
    random = np.random.default_rng(seed)
    nested = [random_parts(int(random.integers(1000)))[: random.integers(0, 5)] for _ in range(5)]
    flat = [part for parts in nested for part in parts]
    ragged = Ragged(Ragged.of(flat, np.int32), np.cumsum([0, *map(len, nested)]))
    if library == "torch":
        ragged = to_torch(ragged)
    for key in (slice(None), slice(1, 4), slice(None, None, 2), [3, 0, 3]):
        chosen = ragged[key]
        wanted = [nested[index] for index in key] if isinstance(key, list) else nested[key]
        assert len(chosen) == len(wanted)
        for one, other in zip(chosen, wanted, strict=True):
            check(one, other)
    for side in ("right", "left"):
        padded, mask = as_numpy(ragged.padded(7, side=side)), as_numpy(ragged.mask(side=side))
        np.testing.assert_array_equal(padded[mask], np.concatenate([*flat, np.empty(0, np.int32)]))
        assert (padded[~mask] == 7).all()
        most = max((len(part) for part in flat), default=0)
        assert padded.shape == mask.shape == (5, max(map(len, nested)), most)
    assert as_numpy(ragged.padded(length=(9, 11))).shape == (5, 9, 11)
    assert pickle.loads(pickle.dumps(ragged)) == ragged
    with pytest.raises(errors.ConfigError, match="one level"):
        ragged.torch()


def test_a_jagged_tensor_shares_the_memory() -> None:
    parts = [np.arange(length, dtype=np.float32) for length in (3, 0, 5)]
    ragged = Ragged.of(parts)
    nested = ragged.torch()
    assert nested.layout == torch.jagged
    ragged.values[0] = 9
    rows = nested.unbind()
    assert [row.tolist() for row in rows] == [[9, 1, 2], [], [0, 1, 2, 3, 4]]
    assert nested.values().data_ptr() == ragged.values.ctypes.data
    points = Ragged.of([np.ones((2, 3), np.float32), np.zeros((4, 3), np.float32)])
    assert [tuple(row.shape) for row in points.torch().unbind()] == [(2, 3), (4, 3)]
    np.testing.assert_array_equal(np.from_dlpack(ragged.values), ragged.values)
    np.testing.assert_array_equal(torch.utils.dlpack.from_dlpack(ragged.offsets).numpy(), ragged.offsets)


@pytest.mark.parametrize(
    ("values", "offsets", "message"),
    [
        ([1, 2, 3], [0, 2, 1, 3], "do not fall: row 1 has 2 and then 1"),
        ([1, 2, 3], [0, 2], "from 0 to its 3 values, got 0 to 2"),
        ([1, 2, 3], [1, 3], "got 1 to 3"),
        ([1, 2, 3], [], "offsets of a Ragged are int64"),
        ([1, 2, 3], [0.0, 3.0], "float64"),
        ([1, 2, 3], [[0, 3]], "int64"),
    ],
)
def test_offsets_that_do_not_fit(values: Any, offsets: Any, message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        Ragged(values, offsets)


def test_other_bad_input() -> None:
    with pytest.raises(errors.ConfigError, match="row 1 has to be int64"):
        Ragged.of([[1], [1.5]])
    with pytest.raises(errors.ConfigError, match="needs a dtype"):
        Ragged.of([])
    with pytest.raises(errors.ConfigError, match="no array"):
        np.asarray(Ragged.of([[1], [2]]))
    with pytest.raises(errors.ConfigError, match='side is "right" or "left"'):
        Ragged.of([[1]]).padded(side="top")  # type: ignore[arg-type]
    assert len(Ragged.of([], "int32")) == 0
    assert Ragged.of([], "int32").padded().shape == (0, 0)
    assert repr(Ragged.of([[1, 2], []])) == "<Ragged of 2 parts with 0 to 2 elements: int64 (2, None)>"
