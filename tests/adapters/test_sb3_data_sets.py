"""Demonstrations for Stable-Baselines3, whose algorithms scale actions to [-1, 1]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from data_sets import NAMES, at
from gymnasium import spaces
from serving import served_memories

from innet_drl import datasets, errors
from innet_drl.sb3 import InnetReplayBuffer

pytestmark = pytest.mark.usefixtures("minari_folder")

OBSERVATION = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTION = spaces.Box(np.array([-2.0, 0.5], np.float32), np.array([2.0, 1.5], np.float32))
STEPS = 12


@pytest.fixture(params=["in process", "served"])
def buffer(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "in process":
        yield InnetReplayBuffer(1000, OBSERVATION, ACTION, "cpu")
    else:
        with served_memories(tmp_path, 1) as address:
            yield InnetReplayBuffer(1000, OBSERVATION, ACTION, "cpu", address=address)


def recording(action: np.ndarray[Any, Any]) -> dict[str, Any]:
    """An episode in the environment's units, with a final row."""
    count = len(action) + 1
    final = np.arange(count) == count - 1
    return {
        "observation": np.arange(3 * count, dtype=np.float32).reshape(count, 3),
        "action": np.concatenate([action, np.zeros_like(action[:1])]),
        "reward": np.ones(count, np.float32),
        "terminated": final & False,
        "truncated": np.arange(count) == count - 2,
        "final": final,
    }


def of_space() -> np.ndarray[Any, Any]:
    """Actions that include the bounds."""
    share = np.linspace(0, 1, STEPS, dtype=np.float32)[:, None]
    return ACTION.low + share * (ACTION.high - ACTION.low)


@pytest.mark.parametrize("name", NAMES)
def test_tables_have_the_units_of_the_environment_and_samples_those_of_sb3(
    buffer: Any, tmp_path: Path, name: str
) -> None:
    first, second = at(tmp_path, name), at(tmp_path, name.replace("data", "again").replace("random", "again"))
    datasets.write(first, [recording(of_space())])
    datasets.import_table(buffer.replay, buffer.table.name, first)
    # As SB3's policy scales them: `BasePolicy.scale_action`.
    expected = 2.0 * ((of_space() - ACTION.low) / (ACTION.high - ACTION.low)) - 1.0
    stored = next(buffer.replay.episodes(buffer.table.name))
    np.testing.assert_array_equal(stored.action[:STEPS], of_space())
    sampled = np.unique(buffer.sample(256).actions, axis=0)
    np.testing.assert_allclose(sampled, expected, atol=1e-6)
    options: Any = {"action_space": ACTION} if name.startswith("minari:") else {}
    datasets.export_table(buffer.replay, buffer.table.name, second, **options)
    found = next(datasets.read(second))
    np.testing.assert_array_equal(found["action"][:STEPS], of_space())
    assert found["action"].dtype == ACTION.dtype
    if name.startswith("minari:"):
        data_set = minari.load_dataset("robot/again-v0")
        assert data_set.action_space == ACTION
        assert all(ACTION.contains(action) for episode in data_set for action in episode.actions)


@pytest.mark.parametrize("value", [2.1, np.nan])
def test_actions_outside_the_space_are_refused_with_the_remedy(buffer: Any, tmp_path: Path, value: float) -> None:
    path, table = tmp_path / "a.parquet", buffer.table.name
    outside = of_space()
    outside[:, 0] = value
    datasets.write(path, [recording(outside)])
    datasets.import_table(buffer.replay, table, path)
    with pytest.raises(errors.SchemaError, match=r"'sb3' has the action \[.*\] outside of Box.*: empty it \(`reset`\)"):
        buffer.sample(256)
    buffer.reset()
    step: Any = np.zeros((1, 3)), np.zeros((1, 3)), np.array([[0.5, 1.1]]), np.ones(1), np.zeros(1, bool), [{}]
    with pytest.raises(
        errors.SchemaError,
        match=r"action has 1.1: SB3's algorithms scale actions to \[-1, 1\], call policy.scale_action",
    ):
        buffer.add(*step)
    assert buffer.size() == 0
    datasets.write(path, [recording(of_space())])
    datasets.import_table(buffer.replay, table, path)
    buffer.sample(256)


def test_actions_that_sb3_does_not_scale_are_stored_as_they_are(tmp_path: Path) -> None:
    buffer: Any = InnetReplayBuffer(100, OBSERVATION, spaces.Discrete(3), "cpu")
    datasets.write(tmp_path / "a.parquet", [recording(np.array([0, 1, 2]))])
    datasets.import_table(buffer.replay, buffer.table.name, tmp_path / "a.parquet")
    assert next(buffer.replay.episodes(buffer.table.name)).action[:3].tolist() == [0, 1, 2]
    assert buffer.sample(64).actions.shape == (64, 1)


def test_what_an_algorithm_collects_is_exported_in_the_environment_s_units(tmp_path: Path) -> None:
    from stable_baselines3 import SAC

    env = gymnasium.make("Pendulum-v1")
    model = SAC("MlpPolicy", env, replay_buffer_class=InnetReplayBuffer, learning_starts=100, seed=0)
    played: list[float] = []
    step = env.unwrapped.step
    env.unwrapped.step = lambda action: played.append(float(action[0])) or step(action)  # type: ignore[method-assign, func-returns-value]
    model.learn(40)
    buffer: Any = model.replay_buffer
    buffer.flush()
    datasets.export_table(buffer.replay, buffer.table.name, tmp_path / "a.parquet")
    found = np.concatenate([one["action"][~one["final"], 0] for one in datasets.read(tmp_path / "a.parquet")])
    np.testing.assert_allclose(found, played, atol=1e-5)
    assert np.abs(found).max() > 1
