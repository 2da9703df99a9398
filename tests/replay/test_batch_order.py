"""The order of a batch: random from samplers that are random, so every part of it is as good a sample as the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from order import BATCHES, check_every_place
from serving import served_memories

import innet_drl as innet

COLUMNS: dict[str, Any] = {"observation": "float32", "action": "int64", "reward": "float32"}
VIEW = innet.NStep(n=1)
ITEMS = 4000
SIZE = 64


@pytest.fixture(params=["in process", "served", "two servers"])
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory(max_bytes=1 << 30, seed=5) as memory:
            yield memory
        return
    with served_memories(tmp_path, 2 if "two" in request.param else 1) as address, innet.connect(address) as client:
        yield client


def fill(replay: innet.Replay, table: str, sampler: Any, items: int = ITEMS) -> None:
    """Items whose action is their position. Several servers have the positions one after the other."""
    once = 1 if sampler == "fifo" else 0
    replay.create_table(
        innet.Table(
            table, COLUMNS, 2 * ITEMS, sampler=sampler, max_times_sampled=once, priority_exponent=1.0, view=VIEW
        )
    )
    for server, positions in enumerate(np.array_split(np.arange(items), 2)):
        with replay.writer(table, 1, server=server) as writer:
            for position in positions:
                writer.append(
                    observation=[0.0],
                    action=[position],
                    reward=[0.0],
                    # Falls a little, so that ranks are positions.
                    priority=[2.0 - position / items],
                    terminated=[True],
                    truncated=[False],
                )


def batches_of(replay: innet.Replay, table: str | innet.Mix, how: str) -> Iterator[innet.Batch]:
    if how == "sample":
        return (replay.sample(table, SIZE) for _ in range(BATCHES))
    batches = replay.batches(table, SIZE)
    return (next(batches) for _ in range(BATCHES))


@pytest.mark.parametrize("sampler", ["prioritized", "uniform", "rank_based"])
def test_a_part_of_a_batch_is_as_good_as_the_whole(replay: innet.Replay, sampler: str) -> None:
    fill(replay, "t", sampler)
    for how in ("sample", "batches"):
        check_every_place([batch.action for batch in batches_of(replay, "t", how)], ITEMS)


def test_the_arrays_of_a_batch_stay_together(replay: innet.Replay) -> None:
    fill(replay, "t", "prioritized")
    for batch in batches_of(replay, "t", "sample"):
        priorities = 2.0 - batch.action / ITEMS
        np.testing.assert_allclose(batch.probabilities / batch.probabilities[0], priorities / priorities[0], rtol=1e-4)
    replay.update_priorities("t", batch.ids, np.where(batch.action == batch.action[0], 1.0, 0.0))
    # An id that was another item's would have left this one its priority.
    assert replay.stats()["tables"]["t"]["items_with_mass"] == ITEMS - len(np.unique(batch.ids)) + 1


def test_the_tables_of_a_mix_are_mixed(replay: innet.Replay) -> None:
    fill(replay, "a", "prioritized")
    fill(replay, "b", "uniform")
    for how in ("sample", "batches"):
        batches = list(batches_of(replay, innet.Mix({"a": 0.5, "b": 0.5}), how))
        check_every_place([batch.tables for batch in batches], 2)
        check_every_place([batch.action for batch in batches], ITEMS)
        assert all((batch.tables == 0).sum() == SIZE / 2 for batch in batches)


def test_a_queue_keeps_its_order_also_in_a_mix() -> None:
    with innet.Memory(seed=1) as memory:
        fill(memory, "queue", "fifo")
        fill(memory, "t", "uniform")
        assert memory.sample("queue", 100).action.tolist() == list(range(100))
        batch = memory.sample(innet.Mix({"queue": 0.5, "t": 0.5}), 200)
        assert batch.action[batch.tables == 0].tolist() == list(range(100, 200))
        assert (np.diff(batch.action[batch.tables == 1]) < 0).any()


def test_the_smallest_tables_of_a_mix_take_turns() -> None:
    with innet.Memory(seed=1) as memory:
        fill(memory, "a", "uniform", items=1)
        fill(memory, "b", "uniform", items=1)
        batches = [memory.sample(innet.Mix({"a": 0.5, "b": 0.5}), 2).tables[0] for _ in range(100)]
        assert 20 < sum(batches) < 80


def test_a_seed_repeats_the_order() -> None:
    def drawn(table: str | innet.Mix) -> list[list[int]]:
        with innet.Memory(seed=3) as memory:
            fill(memory, "a", "prioritized", 500)
            fill(memory, "b", "rank_based", 500)
            return [memory.sample(table, SIZE).action.tolist() for _ in range(5)]

    for table in ("a", "b", innet.Mix({"a": 0.5, "b": 0.5})):
        first, again = drawn(table), drawn(table)
        assert first == again
        assert first[0] != first[1]


def test_a_sum_tree_samples_in_random_order() -> None:
    tree = innet.SumTree(ITEMS, priority_exponent=1.0, seed=0)
    tree.update(np.arange(ITEMS), 2.0 - np.arange(ITEMS) / ITEMS)
    sampled = [tree.sample(SIZE) for _ in range(BATCHES)]
    check_every_place([each.indexes for each in sampled], ITEMS)
    for each in sampled:
        np.testing.assert_allclose(each.probabilities, (2.0 - each.indexes / ITEMS) / tree.total, rtol=1e-5)
