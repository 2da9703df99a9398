"""Forked workers: random numbers of their own."""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import pytest
from steps import VIEW, fill, table

import innet_drl as innet

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")

inherited, inherited_seeded = (innet.SumTree(100_000, seed=seed) for seed in (None, 7))


def sampled_actions(seed: int | None) -> list[int]:
    """What a memory of this process samples."""
    with innet.Memory([table()], seed=seed) as memory:
        fill(memory, 500)
        actions: list[int] = memory.sample("t", 32, VIEW)["action"].tolist()
        return actions


def sampled_indexes(tree: innet.SumTree) -> list[int]:
    tree.update(np.arange(100_000), np.ones(100_000))
    indexes: list[int] = tree.sample(32).indexes.tolist()
    return indexes


def draw(_: int) -> dict[str, list[int]]:
    return {
        "memory": sampled_actions(None),
        "tree": sampled_indexes(innet.SumTree(100_000)),
        "inherited tree": sampled_indexes(inherited),
        "memory with a seed": sampled_actions(7),
        "tree with a seed": sampled_indexes(innet.SumTree(100_000, seed=7)),
        "inherited tree with a seed": sampled_indexes(inherited_seeded),
    }


def test_forked_workers_sample_what_others_do_not_unless_they_have_a_seed() -> None:
    # The parent has used its random numbers, which its children inherit.
    draws: list[dict[str, Any]] = [draw(0)]
    # One task for each process.
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        draws += pool.map(draw, range(2), chunksize=1)
    for name in draws[0]:
        different = {tuple(one[name]) for one in draws}
        wanted = 1 if name in ("memory with a seed", "tree with a seed") else 3
        if name == "inherited tree with a seed":
            # The parent's own sample was its first, and the children's their second.
            wanted = 2
        assert len(different) == wanted, name
