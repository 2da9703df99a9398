"""Runs that start from demonstrations."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import brought
import gymnasium
import numpy as np
import pytest
from data_sets import load, save
from serving import served_memories
from training import small

import innet_drl as innet
from innet_drl import datasets, errors, structures, train
from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import make_table, memory_settings
from innet_drl.train.runs.preload import preload
from innet_drl.train.settings.config import PRESETS

EPISODES, STEPS = 20, 15


def demonstrations(path: Path, name: str = "observation") -> Path:
    """CartPole's episodes of a fixed length, whose first number counts their steps."""
    random = np.random.default_rng(0)

    def episode(number: int) -> dict[str, Any]:
        observation = random.normal(size=(STEPS + 1, 4)).astype(np.float32)
        observation[:, 0] = 1000 + 100 * number + np.arange(STEPS + 1)
        return {
            name: observation,
            "action": np.append(random.integers(0, 2, STEPS), 0),
            "reward": np.append(np.ones(STEPS), 0.0),
            "terminated": np.arange(STEPS + 1) == STEPS - 1,
            "truncated": np.zeros(STEPS + 1, bool),
            "final": np.arange(STEPS + 1) == STEPS,
        }

    datasets.write(path, map(episode, range(EPISODES)))
    return path


def config(path: Path, **settings: Any) -> train.Config:
    base: dict[str, Any] = {"steps": 3000, "evaluation_games": 1, "video": False, "seed": 1}
    return train.preset("cartpole", preload=str(path), **{**base, **settings})


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "processes"])
def test_a_run_samples_its_demonstrations(tmp_path: Path, serial: bool) -> None:
    seen: list[tuple[int, int]] = []
    path = demonstrations(tmp_path / "data.parquet")
    result = train.run(
        config(path, serial=serial, preload_share=0.25, loss=Counting(seen) if serial else "double_q"),
        folder=tmp_path / "run",
    )
    assert result.learner_updates > 0
    if serial:
        # A quarter of each batch, and they are demonstrations.
        assert set(seen) == {(16, 16)}


class Counting:
    """Double Q-learning that counts demonstrations: items of the mix's second table, and items that look like one."""

    def __init__(self, seen: list[tuple[int, int]]) -> None:
        self.seen = seen

    def __call__(self, online: Any, target: Any, batch: Any) -> Any:
        if "tables" in batch:
            own = int((batch.tables == 1).sum())
            self.seen.append((own, int((batch.observation[:, 0] >= 900).sum())))
        q = online(batch.observation)
        error = batch.reward - q.gather(1, batch.action.long()[:, None])[:, 0]
        return error.square(), error.abs(), q


def test_demonstrations_stay_when_steps_are_evicted(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.parquet")
    run = config(path, capacity=600, min_size=200, serial=True)
    envs = environments.make(run, 1)
    settings = memory_settings(run, envs.spec, "apex", {})
    assert settings.demonstrations == "apex-demonstrations"
    with innet.Memory(settings.table) as replay:
        preload(replay, settings, envs)
        table = replay.stats()["tables"]["apex-demonstrations"]
        assert table["inserted_steps"] == EPISODES * (STEPS + 1)
        assert replay.stats()["tables"]["apex"]["steps"] == 0
        # A second session keeps them.
        preload(replay, dataclasses.replace(settings, resumed=True), envs)
        assert replay.stats()["tables"]["apex-demonstrations"]["inserted_steps"] == EPISODES * (STEPS + 1)
        # What another run has left is no demonstration of this one.
        replay.empty_table("apex-demonstrations")
        preload(replay, settings, envs)
        assert replay.stats()["tables"]["apex-demonstrations"]["steps"] == EPISODES * (STEPS + 1)


@pytest.mark.parametrize("servers", [1, 3])
def test_all_demonstrations_are_kept_on_each_number_of_servers(tmp_path: Path, servers: int) -> None:
    path = demonstrations(tmp_path / "data.parquet")
    run = config(path, capacity=600, min_size=200)
    envs = environments.make(run, 1)
    settings = memory_settings(run, envs.spec, "run", {})
    with served_memories(tmp_path, servers) as address, innet.connect(address, tables=[settings.table]) as client:
        preload(client, settings, envs)
        table = client.stats()["tables"]["run-demonstrations"]
        assert table["steps"] == table["inserted_steps"] == EPISODES * (STEPS + 1)
        assert sum(len(episode) for episode in client.episodes("run-demonstrations")) == table["steps"]


def test_a_resumed_run_has_them_again(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.parquet")
    first = config(path, serial=True, steps=1500)
    train.run(first, folder=tmp_path / "run")
    again = train.run(config(path, serial=True, steps=2500), folder=tmp_path / "run", resume=True, preload=path)
    assert again.agent_steps >= 2500


def test_an_export_of_a_run_is_a_data_set_for_another(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.parquet", name="frame")
    result = train.run(config(path, serial=True, steps=1500), folder=tmp_path / "run")
    assert result.learner_updates > 0


def test_a_data_set_of_another_environment_is_refused(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.parquet")
    other = train.preset("vector", environment="Acrobot-v1", preload=str(path), steps=1000, serial=True)
    assert gymnasium.make("Acrobot-v1").observation_space.shape == (6,)
    with pytest.raises(errors.SchemaError, match=r"'observation' has the shape \(4,\), and \(6,\)"):
        train.run(other, folder=tmp_path / "run")
    with pytest.raises(errors.ConfigError, match="there is no file"):
        train.run(config(tmp_path / "missing.parquet"), folder=tmp_path / "other")


def recorded(path: Path, environment: gymnasium.Env[Any, Any], steps: int = 40) -> Path:
    """What a random policy does in an environment, as the environment has it."""
    table = innet.Table.from_spaces("t", environment.observation_space, environment.action_space, capacity=1000)
    with innet.Memory(table) as replay:
        with innet.Recorder(environment, replay.writer("t", 1, innet.NStep(n=1))) as recorder:
            recorder.reset(seed=0)
            for _ in range(steps):
                *_, terminated, truncated, _ = recorder.step(environment.action_space.sample())
                if terminated or truncated:
                    recorder.reset()
        datasets.export_table(replay, "t", path)
    return path


def preloaded(path: Path, environment: Any, **settings: Any) -> dict[str, Any]:
    """All rows of the demonstrations' table of a run, by column, without final rows."""
    run = small(environment=environment, preload=path, **settings)
    envs = environments.make(run, 1)
    with innet.Memory(make_table(run, envs.spec, "run")) as replay:
        preload(replay, memory_settings(run, envs.spec, "run", {}), envs)
        found = [dict(structures.flatten(dict(episode.items()))) for episode in replay.episodes("run-demonstrations")]
    kept = [~episode["final"] for episode in found]
    return {
        column: np.concatenate([episode[column][which] for episode, which in zip(found, kept, strict=True)])
        for column in found[0]
    }


@pytest.mark.parametrize("row", brought.OBSERVATIONS)
def test_observations_become_the_frames_of_actors(tmp_path: Path, row: str) -> None:
    path = recorded(tmp_path / "data.parquet", brought.Sampler(row))
    envs = environments.make(small(environment=brought.Sampler, environment_args={"observation": row}), 1)
    whole = load(path)
    given = structures.unflatten({name: array[~whole["final"]] for name, array in whole.items()})["observation"]
    frames = envs.frames(given)
    found = preloaded(path, brought.Sampler, environment_args={"observation": row})
    for index, frame in enumerate(frames if isinstance(frames, tuple) else (frames,)):
        name = f"frame/{index}" if isinstance(frames, tuple) else "frame"
        np.testing.assert_array_equal(found[name], frame)


@pytest.mark.parametrize("row", brought.ACTIONS)
def test_actions_are_numbered_as_those_of_actors(tmp_path: Path, row: str) -> None:
    arguments: dict[str, Any] = {"observation": "vector of float64", "action": row}
    path = recorded(tmp_path / "data.parquet", brought.Sampler(**arguments))
    taken = np.concatenate([episode["action"][~episode["final"]] for episode in datasets.read(path)])
    numbers = preloaded(path, brought.Sampler, environment_args=arguments)["action"]
    assert len(set(numbers.tolist())) > 2
    envs = environments.make(small(environment=brought.Sampler, environment_args=arguments), 1)
    np.testing.assert_array_equal(envs.numbered(numbers.astype(np.int64)), taken)


def changed(path: Path, to: Path, change: Any) -> Path:
    """A data set with the arrays that `change` returns for those of another one."""
    held = load(path)
    return save(to, held | change(held))


@pytest.mark.parametrize(
    ("row", "action"),
    [("discrete", 3), ("discrete with a start", 2), ("several discrete", [0, 0]), ("bits", [0, 2, 0])],
)
def test_an_impossible_action_is_refused_with_its_step(tmp_path: Path, row: str, action: Any) -> None:
    arguments: dict[str, Any] = {"observation": "vector of float64", "action": row}
    path = recorded(tmp_path / "data.parquet", brought.Sampler(**arguments))

    def change(held: dict[str, Any]) -> dict[str, Any]:
        actions = held["action"].astype(np.int64)
        first = np.flatnonzero(held["episode"] == held["episode"][-1])[0]
        actions[first + 2] = action
        # The row of a final observation has no action.
        actions[held["final"]] = 99
        return {"action": actions}

    bad = changed(path, tmp_path / "bad.parquet", change)
    episode = len(list(datasets.read(path))) - 1
    with pytest.raises(
        errors.SchemaError, match=rf"step 2 of episode {episode} .* has the action {re.escape(str(action))}"
    ):
        preloaded(bad, brought.Sampler, environment_args=arguments)


def test_an_export_of_a_run_has_numbers_and_frames(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"observation": "image, channels last", "action": "several discrete"}
    settings: dict[str, Any] = {"environment_args": arguments}
    path = recorded(tmp_path / "data.parquet", brought.Sampler(**arguments))
    played = preloaded(path, brought.Sampler, **settings)
    again = tmp_path / "run.parquet"
    ends = {"terminated": np.arange(len(played["action"])) == 39, "truncated": np.zeros(40, bool)}
    save(again, {name: played[name] for name in ("frame", "action", "reward")} | ends)
    found = preloaded(again, brought.Sampler, **settings)
    for name in ("frame", "action", "reward"):
        np.testing.assert_array_equal(found[name], played[name])
    bad = changed(again, tmp_path / "bad.parquet", lambda held: {"action": held["action"] + 5})
    with pytest.raises(errors.SchemaError, match="the environment has the 6 of MultiDiscrete"):
        preloaded(bad, brought.Sampler, **settings)


def test_rewards_are_clipped_as_those_of_actors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "innet_drl")
    arguments: dict[str, Any] = {"observation": "vector of float64", "action": "discrete with a start"}
    path = recorded(tmp_path / "data.parquet", brought.Sampler(**arguments))
    scaled = changed(path, tmp_path / "scaled.parquet", lambda held: {"reward": held["reward"] * 7})
    settings: dict[str, Any] = {"environment_args": arguments, "serial": True}
    raw = preloaded(scaled, brought.Sampler, **settings)["reward"]
    assert set(raw.tolist()) == {-7.0, 0.0, 7.0}
    assert "their rewards" not in caplog.text
    clipped = preloaded(scaled, brought.Sampler, clip_rewards=True, life_loss_ends=True, **settings)["reward"]
    np.testing.assert_array_equal(clipped, np.sign(raw))
    said = "; their rewards become -1, 0 or 1, as in the run (clip_rewards); a lost life does not end their episodes"
    assert said in caplog.text


def test_atari_presets_clip_and_number_the_minimal_actions(tmp_path: Path) -> None:
    path, rows_of = tmp_path / "data.parquet", 30
    held: dict[str, Any] = {
        "observation": np.zeros((rows_of, 84, 84), np.uint8),
        "action": np.arange(rows_of) % 4,
        "reward": np.where(np.arange(rows_of) % 2, 7.0, -4.0),
        "terminated": np.arange(rows_of) == rows_of - 1,
        "truncated": np.zeros(rows_of, bool),
    }
    save(path, held)
    breakout = dataclasses.replace(PRESETS["breakout"], preload=path, capacity=2000, min_size=400, frame_size=84)
    envs = environments.make(breakout, 1)
    with innet.Memory(make_table(breakout, envs.spec, "run")) as replay:
        settings = memory_settings(breakout, envs.spec, "run", {})
        preload(replay, settings, envs)
        (episode,) = replay.episodes("run-demonstrations")
        assert set(episode.reward.tolist()) == {-1.0, 1.0}
        assert set(episode.action.tolist()) == {0, 1, 2, 3}
        # All 18 actions of the console.
        save(path, held | {"action": np.arange(rows_of) % 18})
        with pytest.raises(errors.SchemaError, match=r"has the action 4, and the environment has Discrete\(4\)"):
            preload(replay, settings, envs)


def test_texts_are_refused(tmp_path: Path) -> None:
    path = recorded(tmp_path / "data.parquet", brought.Sampler())
    bad = changed(path, tmp_path / "bad.parquet", lambda held: {"action": held["action"].astype(str)})
    with pytest.raises(errors.SchemaError, match="column 'action' has texts"):
        preloaded(bad, brought.Sampler)


def test_settings_of_demonstrations_are_checked(tmp_path: Path) -> None:
    for share in (0.0, 0.001, 1.0):
        with pytest.raises(ConfigurationError, match=r"preload_share .* share of a batch \(64\) that leaves items"):
            config(tmp_path / "a.parquet", preload_share=share)
    with pytest.raises(ConfigurationError, match="preload"):
        config(tmp_path / "a.parquet", replay="redis://127.0.0.1:6379")


@pytest.mark.slow
def test_the_flag_preload(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.parquet")
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--preload", str(path)]
    done = subprocess.run(
        [
            *command,
            "--serial",
            "--steps",
            "1500",
            "--evaluation-games",
            "1",
            "--no-video",
            "--out",
            str(tmp_path / "run"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "the run starts from 300 steps of" in done.stderr + done.stdout
