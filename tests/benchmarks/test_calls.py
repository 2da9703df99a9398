"""`python -m benchmarks.calls`: a server and a client on each stack for a moment, and what becomes of their times."""

import os
from pathlib import Path

import pytest

from benchmarks import calls
from benchmarks.services import SPINNING, NetworkStack
from innet_drl._core import fstack_release

pytestmark = pytest.mark.slow


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="each end polls on a core of its own")
@pytest.mark.parametrize("name", ["kernel-spin", "fstack", "fstack_segments"])
def test_both_calls_are_timed_at_every_size(tmp_path: Path, name: str) -> None:
    if name != "kernel-spin" and fstack_release is None:
        pytest.skip("built without F-Stack")
    stacks: dict[str, NetworkStack] = {
        each.name: each for each in (SPINNING, calls.fstack(tmp_path, 0), calls.fstack(tmp_path, 1))
    }
    before = os.sched_getaffinity(0)
    times = calls.one(stacks[name], share=0.001)
    assert times.keys() == {(call, size) for call in ("put", "get") for size in calls.SIZES}
    assert all(len(each) >= 2 and min(each) > 0 for each in times.values())
    assert os.sched_getaffinity(0) == before


def test_a_row_has_the_best_of_the_rounds_beside_the_kernel() -> None:
    fstack: list[calls.Times] = [{("get", 64): [30.0, 20.0, 40.0]}, {("get", 64): [90.0, 25.0, 27.0]}]
    kernel: list[calls.Times] = [{("get", 64): [36.0] * 3}, {("get", 64): [50.0] * 3}]
    (row,) = calls.rows({"fstack": fstack, SPINNING.name: kernel})
    assert (row["call"], row["bytes"]) == ("get_parameters", 64)
    assert row["fstack"] == {"p50_us": 27.0, "p99_us": 39.8, "p50_lower_by": 0.25}
    assert row[SPINNING.name] == {"p50_us": 36.0, "p99_us": 36.0, "p50_lower_by": 0.0}
