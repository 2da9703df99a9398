"""`python -m benchmarks tokens`: its checks find what is wrong, and this project and TCP pass them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import report
from benchmarks.catalogue import BENCHMARKS
from benchmarks.contest import Entry, Measured, measure, missing
from benchmarks.systems.queues import BATCH, Trajectory, blocks, split
from benchmarks.trajectories import NUMBERS, compare, compare_numbers

pytestmark = pytest.mark.slow


def batch_of(producer: int, first: int = 0) -> list[Trajectory]:
    """A batch that has come from a producer."""
    numbers = producer * NUMBERS + np.arange(first, first + BATCH)
    return split(blocks(seed=producer)[first // BATCH] | {"numbers": numbers})


def test_trajectories_of_every_producer_and_block_pass() -> None:
    for producer, first in ((0, 0), (1, 0), (0, 3 * BATCH)):
        compare(batch_of(producer, first))


@pytest.mark.parametrize("place", [1, 2], ids=["tokens", "log-probabilities"])
def test_a_wrong_value_is_refused(place: int) -> None:
    batch: list[Any] = batch_of(1)
    wrong = list(batch[7])
    wrong[place] = wrong[place] + 1
    batch[7] = tuple(wrong)
    with pytest.raises(AssertionError, match=f"trajectory {NUMBERS + 7} differs"):
        compare(batch)


def test_tokens_of_a_neighbour_are_refused() -> None:
    batch = batch_of(0)
    batch[3] = (batch[3][0], *batch[4][1:])
    with pytest.raises(AssertionError, match="trajectory 3 differs"):
        compare(batch)


def test_a_trajectory_that_comes_twice_or_never_is_refused() -> None:
    compare_numbers([2, 0, 1, NUMBERS], held=0)
    with pytest.raises(AssertionError, match="trajectory 1 came 2 times"):
        compare_numbers([0, 1, 2, NUMBERS, 1], held=0)
    compare_numbers([0, 1, 3, NUMBERS], held=1)
    with pytest.raises(AssertionError, match="1 trajectories are missing"):
        compare_numbers([0, 1, 3, NUMBERS], held=0)


def turn(gigabytes: float, milliseconds: float, held: float) -> dict[str, Any]:
    """A round of one second, with a CPU second for each GB."""
    told = {"count": 30_000 * gigabytes, "bytes": gigabytes * 1e9, "elapsed": 1.0, "cpu_s": gigabytes, "held": held}
    return {**told, "times_ms": [milliseconds] * 200}


def test_figures_of_the_rounds_have_goals_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    rounds = {"innet": turn(1.5, 4.0, 1.2), "redis": turn(0.4, 9.0, 2.0), "tcp": turn(3.0, 1.0, 0.0)}
    (tokens,) = (each for each in BENCHMARKS if each.name == "tokens")
    report.results(tokens, {label: Measured("1.0", [each]) for label, each in rounds.items()})
    ours, _, _, best, limit, *most = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (ours["value"], ours["unit"]) == (45_000, "trajectories/s")
    assert [ours[unit.name] for unit in tokens.also] == [1.5, 1.0, 1.2]
    assert (best["goal"], best["ratio"], best["met"], best["best_peer"]) == ("3 x redis", 3.75, True, "redis")
    assert (limit["goal"], limit["ratio"], limit["met"], limit["limit"]) == ("0.333 x tcp", 0.5, True, "tcp")
    assert [(each["goal"], each["ratio"], each["met"]) for each in most] == [
        ("at most 5 ms, p99", 0.8, True),
        ("at most 1 CPU s/GB", 1.0, True),
        ("at most 1.1 bytes of memory/byte held", pytest.approx(1.2 / 1.1, rel=1e-3), False),
    ]


@pytest.mark.timeout(300)
def test_this_project_and_tcp_are_measured() -> None:
    # One free place, which a producer may take several times in a row.
    for name, size in {"innet": 512, "tcp": BATCH}.items():
        (measured,) = measure([Entry(name, f"queues.{name}", "Tokens", {"size": size})], 1, 0.5).values()
        (each,) = measured.rounds
        assert each["bytes"] == pytest.approx(each["count"] * 32_800, rel=0.05)
        assert len(each["times_ms"]) == each["count"] // BATCH
        assert each["cpu_s"] > 0
        # What a queue holds takes its bytes at least; sockets hold little.
        assert each["held"] > 0.9 if name == "innet" else each["held"] == 0


@pytest.mark.parametrize("system", ["redis", "ray", "transferqueue"])
def test_a_peer_that_is_not_there_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch, system: str) -> None:
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("benchmarks.contest.ROOT", Path("/nowhere"))
    assert re.search("redis-server|pip install|make bench-peers", missing(f"queues.{system}") or "")
