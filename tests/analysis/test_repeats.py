"""The spread of repeated measurements."""

import random
import statistics

import pytest

from innet_drl.analysis.repeats import spread


@pytest.mark.parametrize("count", [2, 3, 5, 10, 30])
def test_medians_of_other_runs_fall_within_it(count: int) -> None:
    draw, runs = random.Random(count), 4000

    def repeats() -> list[float]:
        return [draw.gauss(100, 5) for _ in range(count)]

    inside = 0
    for _ in range(runs):
        low, high = spread(repeats())
        inside += low <= statistics.median(repeats()) <= high
    assert 0.94 < inside / runs < 0.99


def test_it_is_narrower_with_more_repeats() -> None:
    values = [9.0, 10.0, 11.0]
    narrow, wide = spread(3 * values), spread(values)
    assert wide[0] < narrow[0] < 10 < narrow[1] < wide[1]


def test_one_value_and_equal_values_have_none() -> None:
    assert spread([3.0]) == (3.0, 3.0)
    assert spread([3.0, 3.0, 3.0]) == (3.0, 3.0)


def test_times_are_not_negative() -> None:
    assert spread([1.0, 30.0, 2.0])[0] == 0.0
    assert spread([-1.0, 30.0, 2.0])[0] == -1.0
