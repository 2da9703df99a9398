"""`replay["name"]`, and parameters that are dropped: in process, served, on two servers, in a namespace."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import served_memories

import innet_drl as innet
from innet_drl import errors

COLUMNS: dict[str, Any] = {"observation": ("float32", (2,)), "action": "int64", "reward": "float32"}
TABLE = innet.Table("t", COLUMNS, 100, view=innet.NStep())
OTHER = innet.Table("other", COLUMNS, 100, view=innet.NStep())
ALL = ["in process", "served", "two servers", "namespace"]


@pytest.fixture(params=ALL)
def replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[innet.Replay]:
    if request.param == "in process":
        with innet.Memory([TABLE, OTHER], max_bytes=1 << 30) as memory:
            yield memory
        return
    namespace = "run-7" if request.param == "namespace" else None
    with (
        served_memories(tmp_path, 2 if "two" in request.param else 1) as address,
        innet.connect(address, tables=[TABLE, OTHER], namespace=namespace) as client,
    ):
        yield client


def write(replay: innet.Replay, table: str, count: int, reward: float = 0.0) -> None:
    with replay.writer(table, 1) as writer:
        for t in range(count):
            observation = np.full((1, 2), t, np.float32)
            writer.append(
                observation=observation, action=[0], reward=[reward], terminated=[t % 5 == 4], truncated=[False]
            )


def test_the_length_of_a_table_is_its_number_of_items(replay: innet.Replay) -> None:
    table = replay["t"]
    assert len(table) == 0
    write(replay, "t", 20)
    assert len(table) == len(replay["t"]) == 20
    assert len(replay["other"]) == 0
    assert (table.name, table.definition) == ("t", TABLE)
    assert "t" in replay
    assert "nothing" not in replay
    assert repr(table).startswith('<StoredTable "t" ')
    with pytest.raises(errors.UnknownTableError, match="nothing"):
        replay["nothing"]
    replay.drop_table("t")
    with pytest.raises(errors.UnknownTableError, match='"t"'):
        len(table)


def test_episodes_and_mixes_have_the_names_of_their_replay(replay: innet.Replay) -> None:
    write(replay, "t", 20)
    write(replay, "other", 10, reward=1.0)
    assert [len(episode) for episode in replay.episodes("t")] == [5] * 4
    mix = innet.Mix({"t": 0.5, "other": 0.5})
    batch = replay.sample(mix, 8)
    assert (batch.reward == batch.tables).all()
    receipt = replay.update_priorities(mix, batch.ids, np.ones(8))
    assert receipt.stale == 0


def test_dropped_parameters_are_gone_and_the_next_version_is_newer(replay: innet.Replay) -> None:
    assert replay.put_parameters("policy", {"w": np.ones(3, np.float32)}) == 1
    assert replay.put_parameters("policy", {"w": np.ones(3, np.float32)}) == 2
    assert replay.put_parameters("critic", {"w": np.ones(3, np.float32)}) == 1
    replay.drop_parameters("policy")
    assert replay.get_parameters("policy") is None
    assert replay.parameters() == {"critic": 1}
    # Without parameters of the name it does nothing.
    replay.drop_parameters("policy")
    replay.drop_parameters("nothing")
    assert replay.put_parameters("policy", {"w": np.zeros(3, np.float32)}) == 3
    found = replay.get_parameters("policy", newer_than=2)
    assert found is not None
    assert (found.version, found.tensors["w"].tolist()) == (3, [0.0] * 3)


def test_dropped_parameters_free_their_memory() -> None:
    with innet.Memory(max_bytes=10 << 20) as replay:
        for _ in range(5):
            replay.put_parameters("policy", {"w": np.ones(2 << 20, np.float32)})
            replay.drop_parameters("policy")
