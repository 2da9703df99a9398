"""Minari data sets of others, and what Minari needs of ours."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import gymnasium
import minari
import numpy as np
import pytest
from data_sets import episodes

import innet_drl as innet
from innet_drl import datasets, errors

pytestmark = pytest.mark.usefixtures("minari_folder")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_minari_data_sets_of_others(tmp_path: Path) -> None:
    """A data set as Minari's own collector makes it: more observations than steps, infos, an episode without an end."""
    from minari.data_collector import EpisodeBuffer

    random = np.random.default_rng(0)

    def buffer(steps: int, ended: bool) -> EpisodeBuffer:
        return EpisodeBuffer(
            observations={"goal": random.normal(size=(steps + 1, 2)), "hand": random.normal(size=(steps + 1, 3))},
            actions=random.integers(0, 3, steps),
            rewards=random.normal(size=steps),
            terminations=np.arange(steps) == (steps - 1 if ended else -1),
            truncations=np.zeros(steps, bool),
            infos={"success": np.arange(steps + 1) % 2 == 0},
        )

    buffers = [buffer(5, True), buffer(7, False)]
    space = gymnasium.spaces.Dict(
        goal=gymnasium.spaces.Box(-np.inf, np.inf, (2,)), hand=gymnasium.spaces.Box(-np.inf, np.inf, (3,))
    )
    minari.create_dataset_from_buffers(
        "others/reach-v0", iter(buffers), observation_space=space, action_space=gymnasium.spaces.Discrete(3)
    )
    table = innet.Table.from_spaces(
        "reach", space, gymnasium.spaces.Discrete(3), 100, view=innet.NStep(), columns={"success": "bool"}
    )
    with innet.Memory(table) as replay:
        counts = datasets.import_table(replay, "reach", "minari:others/reach-v0")
        assert (counts.episodes, counts.steps, counts.rows) == (2, 12, 14)
        stored = list(replay.episodes("reach"))
        for one, given in zip(stored, buffers, strict=True):
            assert isinstance(given.observations, dict)
            np.testing.assert_array_equal(one.observation["hand"], given.observations["hand"].astype(np.float32))
            np.testing.assert_array_equal(one.action[:-1], given.actions)
            np.testing.assert_array_equal(one.success[:-1], given.infos["success"][:-1])
        # It has a last observation, to bootstrap from.
        assert stored[1].truncated[-2]


def test_infos_of_minari_do_not_replace_its_columns(tmp_path: Path) -> None:
    episode = minari.data_collector.EpisodeBuffer(
        observations=np.zeros((4, 2), np.float32),
        actions=np.array([1, 2, 3]),
        rewards=np.ones(3),
        terminations=np.array([False, False, True]),
        truncations=np.zeros(3, bool),
        infos={"action": np.array([9, 9, 9, 9]), "terminated": np.ones(4, bool), "lives": np.arange(4)},
    )
    spaces = {"observation_space": gymnasium.spaces.Box(-1, 1, (2,)), "action_space": gymnasium.spaces.Discrete(10)}
    arguments: Any = spaces
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        minari.create_dataset_from_buffers("infos/of-v0", [episode], **arguments)
    read = next(datasets.read("minari:infos/of-v0"))
    assert read["action"].tolist() == [1, 2, 3, 0]
    assert read["terminated"].tolist() == [False, False, True, False]
    assert read["lives"].tolist() == [0, 1, 2, 3]


def test_a_minari_name_that_is_taken_or_wrong_is_left_alone(tmp_path: Path) -> None:
    datasets.write("minari:robot/taken-v0", episodes(0, 2))
    for name, reason in (
        ("robot/taken-v0", "exists"),
        ("robot", "exists|no id"),
        ("", "no id"),
        (str(tmp_path), "no id|exists"),
    ):
        with pytest.raises(errors.ConfigError, match=reason):
            datasets.write(f"minari:{name}", episodes(0, 2))
    assert tmp_path.is_dir()
    assert len(list(datasets.read("minari:robot/taken-v0"))) == 2
    unlike = [{"frame" if name == "observation" else name: value for name, value in episodes(0, 1)[0].items()}]
    with pytest.raises(errors.SchemaError, match="no column 'observation', which a Minari data set has"):
        datasets.write("minari:robot/frames-v0", unlike)
