"""Batches of several tables: counts, probabilities, weights, priorities; in process, served, by calls and iterators."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from serving import served_memories

import innet_drl as innet
from innet_drl import errors

COLUMNS: dict[str, Any] = {"observation": ("uint8", (8, 8)), "action": "int64", "reward": "float32"}
VIEW = innet.NStep(n=1, stack=2)
MIX = innet.Mix({"online": 0.75, "demonstrations": 0.25})
ITEMS = {"online": 40, "demonstrations": 10}


@pytest.fixture(params=["in process", "served", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory(max_bytes=1 << 30, seed=5) as memory:
            yield memory
        return
    with served_memories(tmp_path, 2 if "two" in request.param else 1) as address, innet.connect(address) as client:
        yield client


def fill(replay: innet.Replay, **settings: Any) -> None:
    """Both tables, whose observations and actions tell the item: a table has as many, with priorities 1, 2, ..."""
    for number, (name, count) in enumerate(ITEMS.items()):
        replay.create_table(innet.Table(name, COLUMNS, 1000, priority_exponent=1.0, view=VIEW, **settings))
        for server in (0, 1):
            with replay.writer(name, 1, chunk_steps=3, server=server) as writer:
                for item in range(server, count, 2):
                    writer.append(
                        observation=np.full((1, 8, 8), 100 * number + item, np.uint8),
                        action=[item],
                        reward=[float(number)],
                        priority=[item + 1.0],
                        terminated=[True],
                        truncated=[False],
                    )


def probability(table: int, item: int, priorities: dict[str, Any] | None = None) -> float:
    """The share of the table times the probability of its item."""
    name = list(ITEMS)[table]
    of_table = np.arange(1.0, ITEMS[name] + 1) if priorities is None else priorities[name]
    return float(MIX.shares[name] * of_table[item] / of_table.sum())


def drawn(replay: innet.Replay, how: str, size: int) -> Callable[[], Any]:
    if how == "sample":
        return lambda: replay.sample(MIX, size)
    batches = replay.batches(MIX, size, prefetch=0 if how == "on demand" else 3)
    return lambda: next(batches)


@pytest.mark.parametrize("how", ["sample", "on demand", "ahead"])
def test_a_batch_has_the_shares_with_exact_probabilities(replay: innet.Replay, how: str) -> None:
    fill(replay)
    draw = drawn(replay, how, 32)
    counts = {name: np.zeros(count) for name, count in ITEMS.items()}
    rounds = 120
    for _ in range(rounds):
        batch = draw()
        assert batch.tables.dtype == np.uint8
        assert np.bincount(batch.tables).tolist() == [24, 8]
        assert (batch.reward == batch.tables).all()
        assert (batch.observation[:, -1, 0, 0] == 100 * batch.tables + batch.action).all()
        expected = [probability(*which) for which in zip(batch.tables, batch.action, strict=True)]
        np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-6)
        # (N P(i))^-beta over the largest of the batch; N cancels.
        weights = np.asarray(expected) ** -0.4
        np.testing.assert_allclose(batch.weights, weights / weights.max(), rtol=1e-5)
        for table, name in enumerate(ITEMS):
            np.add.at(counts[name], batch.action[batch.tables == table], 1)
    for table, name in enumerate(ITEMS):
        share = np.array([probability(table, item) for item in range(ITEMS[name])]) * 32 * rounds
        assert counts[name].sum() == pytest.approx(share.sum())
        assert stats.chisquare(counts[name], share).pvalue > 1e-8, name


def test_weights_over_the_memory_are_over_both_tables(replay: innet.Replay) -> None:
    fill(replay)
    batch = replay.sample(MIX, 32, normalize="memory")
    smallest = min(probability(0, 0), probability(1, 0))
    np.testing.assert_allclose(batch.weights, (smallest / batch.probabilities) ** 0.4, rtol=1e-5)


def test_priorities_go_to_the_table_of_each_id(replay: innet.Replay) -> None:
    fill(replay)
    priorities = {name: np.arange(1.0, count + 1) for name, count in ITEMS.items()}
    for round_ in range(20):
        batch = replay.sample(MIX, 32)
        new = np.random.default_rng(round_).random(32) + 0.5
        order = np.random.default_rng(round_).permutation(32)
        receipt = replay.update_priorities(MIX, batch.ids[order], new[order], wait=round_ % 2 == 0)
        if round_ % 2 == 0:
            assert receipt.stale == 0
            # The receipt also counts the update of the round before, which did not wait.
            assert receipt.applied >= len(np.unique(batch.ids))
        for place in order:
            priorities[list(ITEMS)[batch.tables[place]]][batch.action[place]] = new[place]
    replay.update_priorities(MIX, [], [])
    batch = replay.sample(MIX, 64)
    expected = [probability(*which, priorities) for which in zip(batch.tables, batch.action, strict=True)]
    np.testing.assert_allclose(batch.probabilities, expected, rtol=1e-4)


def test_ids_of_another_replay_object_are_updated_too(tmp_path: Path) -> None:
    with served_memories(tmp_path, 1) as address, innet.connect(address) as first, innet.connect(address) as second:
        fill(first)
        batch = first.sample(MIX, 32)
        unique = len(np.unique(batch.ids))
        receipt = second.update_priorities(MIX, batch.ids, np.ones(32))
        assert receipt.stale == 0
        assert receipt.applied >= unique
        gone = second.update_priorities(MIX, np.array([2**60], np.uint64), [1.0])
        assert (gone.applied, gone.stale) == (0, 1)


def test_a_mix_waits_for_the_table_that_has_nothing(replay: innet.Replay) -> None:
    fill(replay)
    replay.empty_table("demonstrations")
    with pytest.raises(errors.DeadlineError, match="demonstrations"):
        replay.sample(MIX, 32, timeout=0.2)
    with pytest.raises(errors.DeadlineError, match="demonstrations"):
        next(replay.batches(MIX, 32, timeout=0.3))


def test_an_undelivered_part_does_not_count() -> None:
    with innet.Memory() as replay:
        fill(replay, samples_per_insert=4.0, slack=200.0)
        replay.empty_table("demonstrations")
        with pytest.raises(errors.DeadlineError):
            replay.sample(MIX, 32, timeout=0)
        table = replay.stats()["tables"]["online"]
        assert table.get("limiter_sampled", 0) == 0


def test_torch_pickles_slices(replay: innet.Replay) -> None:
    fill(replay)
    batch = replay.sample(MIX, 32, device="cpu")
    assert isinstance(batch.tables, torch.Tensor)
    assert torch.bincount(batch.tables).tolist() == [24, 8]
    numpy = replay.sample(MIX, 32)
    again = pickle.loads(pickle.dumps(numpy))
    assert (again.tables == numpy.tables).all()
    assert (numpy[20:28].tables == numpy.tables[20:28]).all()


def test_a_mix_of_one_table_has_the_array_of_tables(replay: innet.Replay) -> None:
    fill(replay)
    alone = innet.Mix({"online": 1.0})
    for batch in (replay.sample(alone, 8), next(replay.batches(alone, 8))):
        assert (batch.tables.dtype, batch.tables.tolist()) == (np.uint8, [0] * 8)
    assert "tables" not in replay.sample("online", 8)
    replay.create_table(innet.Table("t", {**COLUMNS, "tables": "int64"}, 10))
    with pytest.raises(errors.SchemaError, match="array of mixed batches"):
        replay.sample(innet.Mix({"t": 1.0}), 8, VIEW)


def test_tables_that_do_not_fit_are_told_apart(replay: innet.Replay) -> None:
    fill(replay)
    other = {**COLUMNS, "reward": "float64"}
    replay.create_table(innet.Table("double", other, 1000, view=VIEW))
    with pytest.raises(errors.SchemaError, match=r"\"double\".*reward: float64 \(\).*\"online\".*reward: float32"):
        replay.sample(innet.Mix({"online": 0.5, "double": 0.5}), 8)
    replay.create_table(innet.Table("sequences", COLUMNS, 1000, view=innet.Sequences(4)))
    with pytest.raises(errors.ConfigError, match=r"have the views NStep.* and Sequences.*name one view"):
        replay.sample(innet.Mix({"online": 0.5, "sequences": 0.5}), 8)
    with pytest.raises(errors.UnknownTableError, match="nothing"):
        replay.sample(innet.Mix({"online": 0.5, "nothing": 0.5}), 8)
    with pytest.raises(errors.ConfigError, match=r"a batch of 3 items has none of a table with the share 0.1"):
        replay.sample(innet.Mix({"online": 0.9, "demonstrations": 0.1}), 3)
    with pytest.raises(errors.PriorityError):
        replay.update_priorities(MIX, replay.sample(MIX, 32).ids, np.full(32, np.nan))


def test_shares_are_checked() -> None:
    with pytest.raises(errors.ConfigError, match=r"add up to 1, got 0.9"):
        innet.Mix({"a": 0.5, "b": 0.4})
    with pytest.raises(errors.ConfigError, match=r"above 0 and at most 1, got -0.5"):
        innet.Mix({"a": 1.0, "b": -0.5})
    with pytest.raises(errors.ConfigError, match="1 to 256 tables, got 0"):
        innet.Mix({})
    with pytest.raises(TypeError, match="a share for each table"):
        innet.Mix("online")  # type: ignore[arg-type]


def test_a_mix_is_a_value() -> None:
    assert repr(MIX) == "Mix(shares={'online': 0.75, 'demonstrations': 0.25})"
    for other in (copy.copy(MIX), pickle.loads(pickle.dumps(MIX)), innet.Mix(MIX.shares)):
        assert other == MIX
    assert innet.Mix({"online": 1.0}) != MIX
