"""The actor's rows: what it stores of rewards, lives and the ends of games."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from innet_drl.train import environments
from innet_drl.train.environments import EnvironmentSpec, Step
from innet_drl.train.memory import make_table
from innet_drl.train.networks import make_network
from innet_drl.train.play.actor import Actor
from innet_drl.train.settings.config import PRESETS, Config

BREAKOUT = dataclasses.replace(PRESETS["breakout"], environments=2, channels=(4, 4, 4), hidden=8)


class Rows:
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def append(self, **row: Any) -> None:
        self.rows.append({name: np.array(value) for name, value in row.items()})


def played(config: Config, monkeypatch: pytest.MonkeyPatch, taken: int | None = None) -> list[dict[str, Any]]:
    """Rows of five steps: environment 0 loses a life, then its game; environment 1 is cut off as it loses a life."""
    lost = [(0, 0), (1, 0), (0, 1), (0, 0), (0, 0)]
    over = [(0, 0), (0, 0), (0, 0), (1, 0), (0, 0)]
    cut = [(0, 0), (0, 0), (0, 1), (0, 0), (0, 0)]
    rewards = [(7, 0), (0, -3), (1, 0), (0, 0), (0, 0)]
    arena = environments.make(config, 2)
    step = arena.step
    turns = iter(zip(over, cut, lost, rewards, strict=True))

    def scripted(actions: NDArray[np.int64]) -> Step:
        terminated, truncated, life_lost, reward = next(turns)
        return Step(
            step(actions).observation,
            np.array(reward, np.float32),
            np.array(terminated, np.bool_),
            np.array(truncated, np.bool_),
            np.array(life_lost, np.bool_),
            actions if taken is None else np.full_like(actions, taken),
        )

    monkeypatch.setattr(arena, "step", scripted)
    writer = Rows()
    actor = Actor(config, 0, arena, make_network(config, arena.spec), writer)  # type: ignore[arg-type]
    for _ in range(5):
        actor.step()
    arena.close()
    return writer.rows


def column(rows: list[dict[str, Any]], name: str) -> list[list[float]]:
    return [row[name].astype(float).tolist() for row in rows]


def test_a_lost_life_ends_an_episode_but_not_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(BREAKOUT, monkeypatch)
    assert column(rows, "terminated") == [[0, 0], [1, 0], [0, 1], [1, 0], [0, 0]]
    assert column(rows, "truncated") == [[0, 0]] * 5
    # The last observation of a game is a row of its own; the first of the next one follows it.
    assert column(rows, "final") == [[0, 0], [0, 0], [0, 0], [0, 1], [1, 0]]
    assert column(rows, "first") == [[1, 1], [0, 0], [0, 0], [0, 0], [0, 1]]


def test_the_stored_action_is_the_one_that_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(BREAKOUT, monkeypatch, taken=3)
    assert column(rows, "action") == [[3, 3]] * 5


def test_lives_do_not_count_where_they_are_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(dataclasses.replace(BREAKOUT, life_loss_ends=False), monkeypatch)
    assert column(rows, "terminated") == [[0, 0], [0, 0], [0, 0], [1, 0], [0, 0]]
    assert column(rows, "truncated") == [[0, 0], [0, 0], [0, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(("clip", "first"), [(True, [1.0, 0.0]), (False, [7.0, 0.0])])
def test_rewards_are_stored_by_their_sign(clip: bool, first: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = played(dataclasses.replace(BREAKOUT, clip_rewards=clip), monkeypatch)
    assert column(rows, "reward")[0] == first
    assert column(rows, "reward")[1] == [0.0, -1.0 if clip else -3.0]


def test_many_actions_take_a_wider_column() -> None:
    assert make_table(BREAKOUT, EnvironmentSpec(256, 1, (3,), "float32", 1), "t").columns["action"].dtype == np.uint8
    assert make_table(BREAKOUT, EnvironmentSpec(257, 1, (3,), "float32", 1), "t").columns["action"].dtype == np.int32


def test_a_memory_of_images_takes_the_room_of_packed_ones() -> None:
    images = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
    assert make_table(BREAKOUT, images, "t").capacity_bytes == 2_000 * BREAKOUT.capacity
    # Learning must start even where nothing can be packed.
    late = dataclasses.replace(BREAKOUT, min_size=BREAKOUT.capacity - 1)
    assert make_table(late, images, "t").capacity_bytes > 84 * 84 * late.capacity
    assert make_table(BREAKOUT, EnvironmentSpec(2, 1, (4,), "float32", 1), "t").capacity_bytes == 0
