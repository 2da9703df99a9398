"""`SumTree`: priorities under indexes, for who keeps the items."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl import errors


def tree_of(priorities: list[float], **options: Any) -> innet.SumTree:
    tree = innet.SumTree(len(priorities), seed=0, **options)
    tree.update(np.arange(len(priorities)), np.array(priorities))
    return tree


def test_a_sample_has_indexes_probabilities_and_weights() -> None:
    priorities = np.random.default_rng(0).random(1000) * 3
    priorities[::7] = 0
    tree = tree_of(list(priorities), priority_exponent=0.6)
    sampled = tree.sample(512, beta=0.4)
    expected = {"indexes": np.int64, "probabilities": np.float64, "weights": np.float32}
    for name, dtype in expected.items():
        array = getattr(sampled, name)
        assert (array.dtype, array.shape) == (dtype, (512,))
    assert len(sampled) == 512
    mass = priorities**0.6
    assert tree.total == pytest.approx(mass.sum(), rel=1e-6)
    probability = mass[sampled.indexes] / mass.sum()
    np.testing.assert_allclose(sampled.probabilities, probability, rtol=1e-4)
    # (N P(i))^-beta over the largest: N cancels.
    weight = (len(tree) * sampled.probabilities) ** -0.4
    np.testing.assert_allclose(sampled.weights, weight / weight.max(), rtol=1e-6)
    assert sampled.weights.max() == 1.0
    assert (priorities[sampled.indexes] > 0).all()


def test_indexes_are_sampled_in_proportion_one_from_each_part() -> None:
    priorities = np.random.default_rng(1).integers(1, 50, 300).astype(float)
    tree = tree_of(list(priorities), priority_exponent=1.0, priority_unit_log2=0)
    counts = np.zeros(300)
    for _ in range(200):
        index = tree.sample(300).indexes
        counts += np.bincount(index, minlength=300)
    expected = 200 * 300 * priorities / priorities.sum()
    # Stratified samples scatter less than independent ones, whose deviation is the root of what is expected.
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_length_and_total_follow_the_updates() -> None:
    tree = innet.SumTree(10, priority_exponent=1.0)
    assert (len(tree), tree.total, tree.capacity) == (0, 0.0, 10)
    tree.update([3, 9], [2.0, 0.5])
    assert (len(tree), tree.total) == (2, 2.5)
    tree.update([3], [0.0])
    assert (len(tree), tree.total) == (1, 0.5)
    assert set(tree.sample(64).indexes) == {9}
    tree.update(np.zeros(0, np.int64), np.zeros(0))
    assert (len(tree), tree.total) == (1, 0.5)


def test_the_last_of_equal_indexes_counts() -> None:
    tree = tree_of([1.0, 1.0, 1.0], priority_exponent=1.0)
    tree.update([1, 2, 1, 1], [5.0, 7.0, 6.0, 4.0])
    assert tree.total == 1.0 + 4.0 + 7.0


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dtypes_and_layouts_mean_the_same(dtype: Any) -> None:
    tree = innet.SumTree(8, priority_exponent=0.5)
    tree.update(np.arange(16)[::2][:4], np.array([4, 0, 9, 0, 16, 0, 25, 0], dtype)[::2])
    assert tree.total == 2 + 3 + 4 + 5
    tree.update(np.array([0], np.uint64), np.array([0], dtype))
    assert tree.total == 3 + 4 + 5


@pytest.mark.parametrize("dtype", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"])
def test_indexes_of_every_integer_dtype_are_taken(dtype: str) -> None:
    tree = innet.SumTree(200, priority_exponent=1.0)
    tree.update(np.array([5, 127, 0], dtype), [1.0, 2.0, 4.0])
    sampled = tree.sample(100)
    assert set(zip(sampled.indexes, np.round(sampled.probabilities * 7), strict=True)) == {(0, 4), (5, 1), (127, 2)}


def test_tensors_are_taken() -> None:
    torch = pytest.importorskip("torch")
    tree = innet.SumTree(4, priority_exponent=1.0)
    tree.update(torch.arange(4), torch.arange(4, dtype=torch.float32).requires_grad_())
    assert tree.total == 6.0


def test_exponent_0_samples_every_index_that_was_set() -> None:
    tree = innet.SumTree(5, priority_exponent=0.0)
    tree.update([1, 3], [0.0, 100.0])
    sampled = tree.sample(100)
    assert np.bincount(sampled.indexes).tolist() == [0, 50, 0, 50]
    assert (sampled.weights == 1).all()


@pytest.mark.parametrize(
    ("index", "priority", "error", "message"),
    [
        ([0, 1], [1.0, np.nan], errors.PriorityError, "^priority 1 of 2 is nan: .*finite and not negative"),
        ([0, 1], [np.inf, 1.0], errors.PriorityError, "^priority 0 of 2 is inf: "),
        ([0, 1], [1.0, -0.5], errors.PriorityError, "^priority 1 of 2 is -0.5: "),
        ([0, -1], [1.0, 1.0], errors.ConfigError, "an index is 0 to 3.*got -1"),
        ([4, 0], [1.0, 1.0], errors.ConfigError, "an index is 0 to 3.*got 4"),
        ([0], [1.0, 1.0], errors.ConfigError, "1 indexes came with 2 priorities"),
        ([0.5], [1.0], errors.ConfigError, "indexes has one dimension of integers, got float64"),
        ([True], [1.0], errors.ConfigError, "indexes has one dimension of integers, got bool"),
        (np.array([-1], np.int8), [1.0], errors.ConfigError, "an index is 0 to 3.*got -1"),
        (np.array([2**32 - 1], np.uint32), [1.0], errors.ConfigError, "an index is 0 to 3.*got 4294967295"),
        ([[0]], [[1.0]], errors.ConfigError, "one dimension"),
    ],
)
def test_an_update_that_is_refused_changes_nothing(
    index: list[Any], priority: list[Any], error: type[Exception], message: str
) -> None:
    tree = tree_of([1.0, 2.0, 3.0, 4.0], priority_exponent=1.0)
    with pytest.raises(error, match=message):
        tree.update(index, priority)
    assert tree.total == 10.0


def test_what_cannot_be_sampled() -> None:
    tree = innet.SumTree(4)
    with pytest.raises(errors.EmptyError, match="none of its 4 indexes has a priority above zero"):
        tree.sample(1)
    tree.update([0], [1.0])
    with pytest.raises(errors.ConfigError, match="batch_size is 1 to 65536, got 0"):
        tree.sample(0)
    with pytest.raises(errors.TooLargeError, match="65536"):
        tree.sample(65537)
    for beta in (-0.1, np.nan):
        with pytest.raises(errors.ConfigError, match="beta"):
            tree.sample(1, beta=beta)
    assert tree.sample(65536).indexes.max() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity": 0}, "capacity is 1 to 16777216 indexes, got 0"),
        ({"capacity": 2**24 + 1}, "capacity is 1 to"),
        ({"capacity": 1, "priority_exponent": 4.5}, "priority_exponent is 0 to 4"),
        ({"capacity": 1, "priority_exponent": np.nan}, "priority_exponent is 0 to 4"),
        ({"capacity": 1, "priority_unit_log2": 1}, "priority_unit_log2 is -30 to 0"),
    ],
)
def test_trees_that_cannot_be_made(options: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ConfigError, match=message):
        innet.SumTree(**options)


def test_a_seed_repeats_the_samples() -> None:
    def samples(seed: int | None) -> list[NDArray[np.int64]]:
        tree = innet.SumTree(1000, seed=seed)
        tree.update(np.arange(1000), np.ones(1000))
        return [tree.sample(32).indexes for _ in range(3)]

    np.testing.assert_array_equal(samples(1), samples(1))
    first, second, _ = samples(1)
    assert (first != second).any()
    assert not np.array_equal(samples(1), samples(2))
    assert not np.array_equal(samples(None), samples(None))


def test_priorities_far_apart_stay_what_they_are() -> None:
    tree = tree_of([1e-12, 1e-300, 0.0], priority_exponent=1.0)
    # A positive priority is at least one unit.
    assert len(tree) == 2
    assert set(tree.sample(64).indexes) == {0, 1}
    tree.update([0], [1e300])
    assert tree.total == pytest.approx(2.0**20)


def test_priorities_outside_the_range_are_counted() -> None:
    tree = tree_of([1e-5, 1e-7, 0.0, 1.0], priority_exponent=1.0)
    # 5 units of 2^-19 and one: not 100 times as often.
    assert (tree.rounded_up_priorities, tree.saturated_priorities) == (1, 0)
    tree.update([0, 1, 2], [3e6, 1e6, 2.0**-19])
    assert (tree.rounded_up_priorities, tree.saturated_priorities) == (1, 1)
    fine = tree_of([1e-5, 1e-7], priority_exponent=1.0, priority_unit_log2=-30)
    assert fine.rounded_up_priorities == 0
    counts = np.bincount(fine.sample(10_100).indexes)
    assert 95 < counts[0] / counts[1] < 105


@pytest.mark.parametrize("count", [64, 20_000])
def test_threads_sample_and_update_at_once(count: int) -> None:
    tree = tree_of([1.0] * 5000, priority_exponent=1.0, priority_unit_log2=0)
    values = np.random.default_rng(0).integers(1, 100, count).astype(np.float32)

    def work() -> None:
        for _ in range(10):
            sampled = tree.sample(count)
            assert (sampled.probabilities > 0).all()
            tree.update(sampled.indexes, values)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tree) == 5000
    tree.update(np.arange(5000), np.full(5000, 2.0))
    assert tree.total == 10_000
