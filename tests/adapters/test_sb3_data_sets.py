"""Demonstrations for Stable-Baselines3, whose tables have actions scaled to [-1, 1]."""

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
def test_actions_are_scaled_by_an_import_and_have_their_units_in_an_export(
    buffer: Any, tmp_path: Path, name: str
) -> None:
    first, second = at(tmp_path, name), at(tmp_path, name.replace("data", "again").replace("random", "again"))
    datasets.write(first, [recording(of_space())])
    datasets.import_table(buffer.replay, buffer.table.name, first, action_space=ACTION)
    # As SB3's policy scales them: `BasePolicy.scale_action`.
    expected = 2.0 * ((of_space() - ACTION.low) / (ACTION.high - ACTION.low)) - 1.0
    stored = next(buffer.replay.episodes(buffer.table.name))
    np.testing.assert_allclose(stored.scaled_action[:STEPS], expected, atol=1e-6)
    assert set(np.unique(buffer.sample(64).actions)) <= set(np.unique(stored.scaled_action[:STEPS]))
    datasets.export_table(buffer.replay, buffer.table.name, second, action_space=ACTION)
    found = next(datasets.read(second))
    np.testing.assert_allclose(found["action"][:STEPS], of_space(), atol=1e-6)
    assert found["action"].dtype == ACTION.dtype
    if name.startswith("minari:"):
        assert minari.load_dataset("robot/again-v0").action_space == ACTION


def test_actions_of_other_units_are_refused_with_the_remedy(buffer: Any, tmp_path: Path) -> None:
    path, table = tmp_path / "a.npz", buffer.table.name
    datasets.write(path, [recording(of_space())])
    remedy = "no column 'scaled_action' for table 'sb3' .*: give action_space=, the environment's"
    with pytest.raises(errors.SchemaError, match=remedy):
        datasets.import_table(buffer.replay, table, path)
    outside = of_space()
    outside[3, 0] = 2.1
    datasets.write(path, [recording(of_space()), recording(outside)])
    with pytest.raises(errors.SchemaError, match=r"a\.npz: 'action' is .* in row 16, outside of Box"):
        datasets.import_table(buffer.replay, table, path, action_space=ACTION)
    with pytest.raises(errors.SchemaError, match=r"'action' has float32 of the shape \(2,\), and .* has \(1,\)"):
        datasets.import_table(buffer.replay, table, path, action_space=spaces.Box(-9, 9, (1,)))
    for space in (spaces.Box(-np.inf, np.inf, (2,)), spaces.Discrete(3)):
        with pytest.raises(errors.ConfigError, match="a Box with finite bounds"):
            datasets.import_table(buffer.replay, table, path, action_space=space)
    assert buffer.replay.stats()["tables"][table]["steps"] == 0
    datasets.write(path, [recording(of_space())])
    datasets.import_table(buffer.replay, table, path, action_space=ACTION)
    with pytest.raises(errors.SchemaError, match="give action_space=, the environment's"):
        datasets.export_table(buffer.replay, table, "minari:robot/units-v0")
    # As it is stored, and back.
    datasets.export_table(buffer.replay, table, path)
    assert "scaled_action" in next(datasets.read(path))
    assert datasets.import_table(buffer.replay, table, path).steps == STEPS


def test_actions_that_sb3_does_not_scale_need_no_space(tmp_path: Path) -> None:
    buffer: Any = InnetReplayBuffer(100, OBSERVATION, spaces.Discrete(3), "cpu")
    datasets.write(tmp_path / "a.npz", [recording(np.array([0, 1, 2]))])
    datasets.import_table(buffer.replay, buffer.table.name, tmp_path / "a.npz")
    assert next(buffer.replay.episodes(buffer.table.name)).action[:3, 0].tolist() == [0, 1, 2]
    with pytest.raises(errors.SchemaError, match="has no column 'scaled_action' for action_space="):
        datasets.import_table(buffer.replay, buffer.table.name, tmp_path / "a.npz", action_space=ACTION)


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
    datasets.export_table(buffer.replay, buffer.table.name, tmp_path / "a.npz", action_space=env.action_space)
    found = np.concatenate([one["action"][~one["final"], 0] for one in datasets.read(tmp_path / "a.npz")])
    np.testing.assert_allclose(found, played, atol=1e-5)
    assert np.abs(found).max() > 1
