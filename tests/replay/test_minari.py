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
from innet_drl import datasets, errors, structures

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
            np.testing.assert_array_equal(one.success[:-1], given.infos["success"][1:])
        # It has a last observation, to bootstrap from.
        assert stored[1].truncated[-2]


PARTS = gymnasium.spaces.Dict(
    goal=gymnasium.spaces.Box(-np.inf, np.inf, (2,)),
    hand=gymnasium.spaces.Dict(
        camera=gymnasium.spaces.Box(0, 255, (3, 3), np.uint8), on=gymnasium.spaces.Discrete(200)
    ),
)


def parts(episode: int, steps: Any) -> dict[str, Any]:
    """Observations of PARTS that tell their episode and steps."""
    steps = np.asarray(steps)
    goal = np.stack([np.full(len(steps), episode), steps], 1).astype(np.float32)
    camera = np.broadcast_to((10 * episode + steps).astype(np.uint8)[:, None, None], (len(steps), 3, 3))
    return {"goal": goal, "hand": {"camera": camera, "on": (100 + steps).astype(np.int64)}}


def assert_parts(found: Any, episode: int, steps: Any) -> None:
    found, expected = structures.flatten(found), structures.flatten(parts(episode, steps))
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, name)


def test_last_observations_of_several_parts_go_to_minari_and_back() -> None:
    action = gymnasium.spaces.Discrete(9)
    # Ends, whether a final row follows, the observations that Minari has, and the steps that come back.
    episodes = [
        ("terminated", True, range(5), 4),
        ("truncated", True, range(5), 4),
        # Nothing bootstraps from the repeated one.
        ("terminated", False, [0, 1, 2, 3, 3], 4),
        ("truncated", False, range(4), 3),
        # Without an end: another episode begins.
        ("none", False, range(4), 3),
    ]
    once: Any = {"sampler": "fifo", "max_times_sampled": 1}
    tables = [
        innet.Table.from_spaces(name, PARTS, action, 100, view=innet.NStep(n=1), **once) for name in ("played", "again")
    ]
    with innet.Memory(tables) as replay:
        with replay.writer("played", 1) as writer:
            for episode, (end, final, _, _) in enumerate(episodes):
                for t in range(4 + final):
                    observation = parts(episode, [t])
                    ends: Any = {name: [t == 3 and end == name] for name in ("terminated", "truncated")}
                    flags: Any = {"first": [t == 0], "final": [t == 4]}
                    writer.append(observation=observation, action=[t], reward=1.0, **ends, **flags)
        datasets.export_table(replay, "played", "minari:ours/parts-v0", observation_space=PARTS, action_space=action)
        data_set = minari.load_dataset("ours/parts-v0")
        assert data_set.observation_space == PARTS
        assert len(data_set) == len(episodes)
        for episode, (exported, (end, _, seen, steps)) in enumerate(zip(data_set, episodes, strict=True)):
            assert_parts(exported.observations, episode, seen)
            assert exported.actions.tolist() == list(range(steps))
            last = {"terminated": exported.terminations, "truncated": exported.truncations}
            for name, flags in last.items():
                ends_so = name == ("terminated" if end == "terminated" else "truncated")
                assert flags.tolist() == [False] * (steps - 1) + [ends_so]
        datasets.import_table(replay, "again", "minari:ours/parts-v0")
        for episode, (stored, (_, _, seen, steps)) in enumerate(zip(replay.episodes("again"), episodes, strict=True)):
            assert_parts(stored.observation, episode, seen)
            assert stored.final.tolist() == [False] * steps + [True]
        batch = replay.sample("again", sum(steps for *_, steps in episodes))
        for row in range(len(batch)):
            episode, t = batch.observation["goal"][row].astype(int)
            end, _, seen, _ = episodes[episode]
            one_row = structures.at_index(batch.next_observation, [row])
            assert_parts(one_row, episode, [seen[t + 1]])
            assert batch.discount[row] == pytest.approx(0 if t == 3 and end == "terminated" else 0.99)


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
    assert read["lives"].tolist() == [1, 2, 3, 0]


def create(name: str, steps: int, *, end: str = "terminated", **lengths: int) -> None:
    """Two episodes, the second one with arrays of these lengths. The reward and success of step t are t + 1."""

    def buffer(lengths: dict[str, int]) -> minari.data_collector.EpisodeBuffer:
        def values(array: str, default: int) -> Any:
            return np.arange(lengths.get(array, default))

        ends = {
            name: values(name, steps) == (steps - 1 if name.startswith(end[:6]) else -1)
            for name in ("terminations", "truncations")
        }
        return minari.data_collector.EpisodeBuffer(
            observations=values("observations", steps + 1).astype(np.float32)[:, None],
            actions=values("actions", steps),
            rewards=values("rewards", steps) + 1.0,
            infos={"success": values("infos", steps + 1) + (lengths.get("infos") == steps)},
            **ends,
        )

    spaces: Any = {
        "observation_space": gymnasium.spaces.Box(-np.inf, np.inf, (1,)),
        "action_space": gymnasium.spaces.Discrete(100),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        minari.create_dataset_from_buffers(name, [buffer({}), buffer(lengths)], **spaces)


def table(name: str = "t") -> innet.Table:
    columns: Any = {"observation": ("float32", (1,)), "action": "int64", "reward": "float32", "success": "int64"}
    return innet.Table(name, columns, 100, view=innet.NStep())


@pytest.mark.parametrize("infos", [5, 6], ids=["of the steps", "and of the reset"])
def test_infos_belong_to_their_steps(infos: int) -> None:
    create("others/infos-v0", 5, infos=infos)
    with innet.Memory(table()) as replay:
        datasets.import_table(replay, "t", "minari:others/infos-v0")
        stored = list(replay.episodes("t"))[1]
        np.testing.assert_array_equal(stored.success[:5], stored.reward[:5])
        # Minari's own readers find them there, too.
        datasets.export_table(replay, "t", "minari:ours/infos-v0")
        exported = minari.load_dataset("ours/infos-v0")[1]
        np.testing.assert_array_equal(exported.infos["success"], [0, *exported.rewards])
        replay.create_table(table("again"))
        datasets.import_table(replay, "again", "minari:ours/infos-v0")
        np.testing.assert_array_equal(list(replay.episodes("again"))[1].success, stored.success)


@pytest.mark.parametrize(
    ("array", "length", "named"),
    [
        ("observations", 2, "'observation'"),
        ("observations", 7, "'observation'"),
        ("actions", 4, "'action'"),
        ("actions", 6, "'action'"),
        ("terminations", 4, "'terminated'"),
        ("truncations", 6, "'truncated'"),
    ],
)
def test_damaged_lengths_are_refused(array: str, length: int, named: str) -> None:
    lengths: Any = {array: length}
    create("others/damaged-v0", 5, **lengths)
    reason = f"minari:others/damaged-v0 cannot be read: episode 1 has 5 steps, and {length} values of {named}"
    with innet.Memory(table()) as replay:
        with pytest.raises(errors.CorruptError, match=reason):
            datasets.import_table(replay, "t", "minari:others/damaged-v0")
        assert replay.stats()["tables"]["t"]["steps"] == 0


@pytest.mark.parametrize(("end", "kept"), [("terminated", 5), ("truncated", 4), ("none", 4)])
def test_without_the_last_observation_only_a_termination_keeps_the_last_step(
    end: str, kept: int, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"others/{end}-v0"
    create(name, 5, end=end, observations=5)
    with innet.Memory(table()) as replay:
        counts = datasets.import_table(replay, "t", f"minari:{name}")
        assert (counts.episodes, counts.steps, counts.rows) == (2, 5 + kept, 11)
        said = [record.getMessage() for record in caplog.records if "last observation" in record.getMessage()]
        reason = (
            "1 episodes end without a termination and without a last observation: the last step of each is left out"
        )
        assert said == ([] if kept == 5 else [f"minari:{name}: {reason}"])
        episode = list(replay.episodes("t"))[1]
        # No observation was made up.
        assert episode.observation[:, 0].tolist() == [0, 1, 2, 3, 4]
        assert episode.reward.tolist() == [1, 2, 3, 4, 5 if kept == 5 else 0]
        assert episode.final.tolist() == [False] * 4 + [kept == 4]


def test_an_export_counts_the_steps_that_come_back(caplog: pytest.LogCaptureFixture) -> None:
    with innet.Memory(table()) as replay:
        with replay.writer("t", 1) as writer:
            for t in range(20):
                ends: Any = {"terminated": [t == 5], "truncated": [False]}
                writer.append(observation=np.full((1, 1), t, np.float32), action=[t], reward=1.0, success=[t], **ends)
        counts = datasets.export_table(replay, "t", "minari:ours/open-v0")
    assert (counts.episodes, counts.steps, counts.rows) == (2, 19, 21)
    assert "minari:ours/open-v0: 1 episodes end without a termination" in caplog.text
    found = list(datasets.read("minari:ours/open-v0"))
    assert sum(int(np.count_nonzero(~one["final"])) for one in found) == 19
    one_step = {name: array[:1] for name, array in found[1].items()} | {"truncated": np.ones(1, bool)}
    with pytest.raises(errors.ConfigError, match="there is no episode to write"):
        datasets.write("minari:ours/nothing-v0", [one_step])


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
