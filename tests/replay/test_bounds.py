"""Numbers from outside: each has a bound, and the error for one beyond it names the argument."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from places import HELPERS
from steps import VIEW, fill, table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

WALK = HELPERS / "absurd_numbers.py"
RUST = re.compile(r"Some\(|\w+ \{ \w+: |[A-Z]\w+\([A-Z]\w+|\bNaN\b")
"""Rust's notation, which no user knows."""


@pytest.mark.parametrize("where", ["process", "server"])
@pytest.mark.timeout(400)
def test_absurd_numbers_are_errors_that_name_the_argument(where: str) -> None:
    """In a process of its own, whose address space is limited: an abort or a huge allocation ends it."""
    walk = [sys.executable, str(WALK), where]
    done = subprocess.run(walk, capture_output=True, text=True, timeout=300, check=False)
    lines: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, f"{lines[-1:]}: {done.stderr}"
    assert "panicked" not in done.stderr
    outcomes = [line for line in lines if "error" in line]
    assert len(outcomes) > 500
    for outcome in outcomes:
        call = f"{outcome['name']}({outcome['argument']}={outcome['value']})"
        told = f"{call}: {outcome['error']}: {outcome['text']}"
        assert outcome["peak"] < 1 << 30, call
        if outcome["error"] is None:
            continue
        assert outcome["own"] or outcome["error"] == "TypeError", told
        assert outcome["argument"] in outcome["text"], told
        assert not RUST.search(outcome["text"]), told


@pytest.mark.parametrize(
    ("argument", "value", "bounds"),
    [
        ("prefetch", 1025, "0 to 1024"),
        ("prefetch", 2**40, "0 to 1024"),
        ("prefetch", 2**63 - 1, "0 to 1024"),
        ("threads", 0, "1 to 256"),
        ("threads", 4000, "1 to 256"),
    ],
)
def test_numbers_of_threads_and_batches_are_bounded(
    make_replay: MakeReplay, argument: str, value: int, bounds: str
) -> None:
    replay = make_replay([table()])
    arguments: dict[str, Any] = {argument: value}
    with pytest.raises(errors.ConfigError, match=f"{argument} is an integer from {bounds}, got {value}"):
        replay.batches("t", 4, VIEW, **arguments)


def test_the_bounds_themselves_are_taken(make_replay: MakeReplay) -> None:
    replay = make_replay([table(samples_per_insert=1e9, slack=1e15)])
    fill(replay, 50)
    assert len(replay.sample("t", 4, VIEW, timeout=1e9, threads=256)) == 4
    assert len(replay.sample("t", 4, VIEW, timeout=float("inf"))) == 4
    with replay.batches("t", 4, VIEW, prefetch=1024, timeout=1e9) as batches:
        assert len(next(batches)) == 4


def test_a_float_for_an_integer_names_the_argument() -> None:
    for call in (
        lambda: innet.Table("t", {"a": "uint8"}, capacity=1e5),  # type: ignore[arg-type]
        lambda: innet.SumTree(capacity=np.float64(8)),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match=r"^capacity is an integer, got a float"):
            call()
