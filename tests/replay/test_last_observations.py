"""The observation after the last action of an episode: in every view, wherever it came, and what is without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from calls import Call
from serving import until

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import datasets

End = Literal["terminated", "truncated"]

COLUMNS: dict[str, Any] = {"observation": ("float32", (2,)), "action": "int64", "reward": "float32"}
LENGTH = 5


def table(view: Any, **options: Any) -> innet.Table:
    return innet.Table("t", COLUMNS, 2000, view=view, **{"sampler": "fifo", "max_times_sampled": 1, **options})


def row(episode: int, t: int, end: End | None = None, **flags: Any) -> dict[str, Any]:
    """A step whose observation names it, or (with t = LENGTH) the last observation of an episode; arrays (1, ...)."""
    ends = {name: np.array([t == LENGTH - 1 and end == name]) for name in ("terminated", "truncated")}
    observation = np.array([[episode + 1, t + 1]], np.float32)
    return {"observation": observation, "action": np.array([t]), "reward": np.ones(1, np.float32), **ends, **flags}


def play(writer: innet.Writer, end: End, how: str, episodes: int = 20) -> None:
    no, yes = np.zeros(1, bool), np.ones(1, bool)
    for episode in range(episodes):
        steps = [row(episode, t, end) for t in range(LENGTH)]
        last = row(episode, LENGTH, final=yes)
        if how == "same_step":
            steps[-1]["final_observation"] = last["observation"]
        elif how == "final_row_alone":
            steps.append(last)
        elif how != "never":
            steps = [*(step | {"final": no} for step in steps), last]
        if how == "extend":
            block: dict[str, Any] = {name: np.stack([step[name] for step in steps]) for name in last}
            writer.extend(**block)
            continue
        for step in steps:
            writer.append(**step)


WAYS = ["same_step", "next_step", "final_row_alone", "extend"]


@pytest.mark.parametrize("end", ["terminated", "truncated"])
@pytest.mark.parametrize("how", WAYS)
def test_every_view_has_the_last_observation(make_replay: MakeReplay, how: str, end: End) -> None:
    replay = make_replay()
    for view in (innet.NStep(n=3, gamma=0.5), innet.Sequences(8), innet.Window(0, 3)):
        # The recorder refuses windows in this mode: they have no place for last observations.
        if how == "same_step" and isinstance(view, innet.Window):
            continue
        replay.create_table(table(view))
        with replay.writer("t", 1, chunk_steps=7) as writer:
            play(writer, end, how)
            assert writer.dropped_windows == 0
        batch = replay.sample("t", writer.items, timeout=10)
        if isinstance(view, innet.NStep):
            assert len(batch) == 20 * LENGTH
            steps = np.minimum(3, LENGTH - batch.action)
            np.testing.assert_array_equal(batch.next_observation[:, 0], batch.observation[:, 0])
            np.testing.assert_array_equal(batch.next_observation[:, 1], batch.observation[:, 1] + steps)
            ends = batch.action + steps == LENGTH
            expected = np.where(ends & (end == "terminated"), 0.0, 0.5**steps)
            np.testing.assert_allclose(batch.discount, expected)
        elif isinstance(view, innet.Sequences):
            assert len(batch) == 20
            assert (batch.mask.sum(1) == LENGTH).all()
            np.testing.assert_array_equal(batch.observation[:, : LENGTH + 1, 1], [range(1, LENGTH + 2)] * 20)
        else:
            assert (batch.final.sum(1) == (batch.action[:, 0] >= LENGTH - 3)).all()
            assert (batch.observation[batch.final][:, 1] == LENGTH + 1).all()
        last = [episode["observation"][-1, 1] for episode in replay.episodes("t")]
        assert last == [LENGTH + 1] * 20
        replay.drop_table("t")


def test_the_observation_after_a_lost_life_is_the_next_row(make_replay: MakeReplay) -> None:
    view = innet.NStep(stack=2, n=3)
    replay = make_replay([table(view)])
    with replay.writer("t", 1, chunk_steps=3) as writer:
        for t in range(12):
            life = {"first": t == 0, "terminated": t % 4 == 3, "truncated": False}
            writer.append(observation=[[1, t + 1]], action=[t], reward=1.0, **life)
    batch = replay.sample("t", 12, timeout=10)
    steps = np.minimum(3, 4 - batch.action % 4)
    expected = np.stack([batch.action + steps, batch.action + steps + 1], 1)
    # After the last life nothing came.
    expected[batch.action + steps == 12, 1] = 0
    known = batch.action + steps < 12
    np.testing.assert_array_equal(batch.next_observation[known][..., 1], expected[known])
    assert not batch.next_observation[~known][:, -1].any()
    assert (batch.discount[batch.action % 4 > 0] == 0).all()


@pytest.mark.parametrize("view", [innet.Sequences(50), innet.NStep(n=3), innet.Window(1, 3)])
def test_truncated_episodes_without_a_last_observation_become_items(make_replay: MakeReplay, view: Any) -> None:
    replay = make_replay([table(view)])
    with replay.writer("t", 1) as writer:
        play(writer, "truncated", "never")
    batch = replay.sample("t", writer.items, timeout=10)
    if isinstance(view, innet.Sequences):
        assert len(batch) == 20
        # The last step has its values; what follows it is not known.
        np.testing.assert_array_equal(batch.mask[:, : LENGTH + 1], [[True] * (LENGTH - 1) + [False] * 2] * 20)
        np.testing.assert_array_equal(batch.discount > 0, batch.mask)
        assert batch.truncated[:, LENGTH - 1].all()
        np.testing.assert_array_equal(batch.action[:, :LENGTH], [range(LENGTH)] * 20)
        np.testing.assert_array_equal(batch.observation[:, :LENGTH, 1], [range(1, LENGTH + 1)] * 20)
        assert not batch.observation[:, LENGTH:].any()
    elif isinstance(view, innet.NStep):
        # The truncated step's observation is the last to bootstrap from.
        assert sorted(batch.action.tolist()) == sorted([*range(LENGTH - 1)] * 20)
        steps = np.minimum(3, LENGTH - 1 - batch.action)
        np.testing.assert_allclose(batch.discount, 0.99**steps, rtol=1e-6)
        np.testing.assert_array_equal(batch.next_observation[:, 1], batch.observation[:, 1] + steps)
        assert writer.dropped_windows == 20
    else:
        assert len(batch) == 20 * LENGTH
        assert not batch.final.any()


def test_a_sample_that_waits_in_another_thread_does_not_take_an_end_without_its_observation(
    make_replay: MakeReplay,
) -> None:
    replay = make_replay([table(innet.NStep(n=1))])
    taken: list[innet.Batch] = []
    with replay.writer("t", 1) as writer:
        reading = Call(lambda: taken.append(replay.sample("t", LENGTH, timeout=60)))
        until(lambda: replay.stats()["tables"]["t"]["waiting_samples"] == 1)
        for t in range(LENGTH):
            writer.append(**row(0, t, "terminated", final=np.zeros(1, bool)))
        assert replay.stats()["tables"]["t"]["items"] == LENGTH - 1
        writer.append(**row(0, LENGTH, final=np.ones(1, bool)))
        assert reading.ended() is None
        np.testing.assert_array_equal(taken[0].next_observation[:, 1], taken[0].action + 2)


def test_a_flush_makes_items_of_an_end_whose_observation_may_follow(make_replay: MakeReplay) -> None:
    replay = make_replay([table(innet.NStep(n=1), sampler="uniform", max_times_sampled=0)])
    with replay.writer("t", 1) as writer:
        writer.append(**row(0, LENGTH - 1, "terminated", final=np.zeros(1, bool)))
        # Of this thread, which cannot append meanwhile.
        assert not replay.sample("t", 1, timeout=10).next_observation.any()
        writer.append(**row(0, LENGTH, final=np.ones(1, bool)))
        writer.flush()
        assert replay.sample("t", 1, timeout=10).next_observation.tolist() == [[1, LENGTH + 1]]


def test_an_import_reports_its_items(tmp_path: Path) -> None:
    path = tmp_path / "episodes.parquet"
    ends: list[End] = ["terminated", "truncated"]
    played = [[row(episode, t, ends[episode % 2]) for t in range(LENGTH)] for episode in range(20)]
    episodes = [{name: np.concatenate([step[name] for step in steps]) for name in steps[0]} for steps in played]
    datasets.write(path, episodes)
    with innet.Memory(table(innet.Sequences(50))) as memory:
        counts = datasets.import_table(memory, "t", path)
        assert (counts.episodes, counts.items, memory.stats()["tables"]["t"]["items"]) == (20, 20, 20)
