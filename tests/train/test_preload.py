"""Runs that start from demonstrations."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from calls import Lines
from serving import served_memories

import innet_drl as innet
from innet_drl import datasets, errors, train
from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.evaluation import Evaluation
from innet_drl.train.memory import memory_settings
from innet_drl.train.metrics import Metrics
from innet_drl.train.preload import preload

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
    path = demonstrations(tmp_path / "data.npz")
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
    path = demonstrations(tmp_path / "data.npz")
    small = config(path, capacity=600, min_size=200, serial=True)
    spec = environments.make(small, 1).spec
    settings = memory_settings(small, spec, "apex", {})
    assert settings.demonstrations == "apex-demonstrations"
    with innet.Memory(settings.table) as replay:
        preload(replay, settings)
        table = replay.stats()["tables"]["apex-demonstrations"]
        assert table["inserted_steps"] == EPISODES * (STEPS + 1)
        assert replay.stats()["tables"]["apex"]["steps"] == 0
        # A second session keeps them.
        preload(replay, dataclasses.replace(settings, resumed=True))
        assert replay.stats()["tables"]["apex-demonstrations"]["inserted_steps"] == EPISODES * (STEPS + 1)
        # What another run has left is no demonstration of this one.
        replay.empty_table("apex-demonstrations")
        preload(replay, settings)
        assert replay.stats()["tables"]["apex-demonstrations"]["steps"] == EPISODES * (STEPS + 1)


@pytest.mark.parametrize("servers", [1, 3])
def test_all_demonstrations_are_kept_on_each_number_of_servers(tmp_path: Path, servers: int) -> None:
    path = demonstrations(tmp_path / "data.npz")
    small = config(path, capacity=600, min_size=200)
    spec = environments.make(small, 1).spec
    settings = memory_settings(small, spec, "run", {})
    with served_memories(tmp_path, servers) as address, innet.connect(address, tables=[settings.table]) as client:
        preload(client, settings)
        table = client.stats()["tables"]["run-demonstrations"]
        assert table["steps"] == table["inserted_steps"] == EPISODES * (STEPS + 1)
        assert sum(len(episode) for episode in client.episodes("run-demonstrations")) == table["steps"]


def test_without_a_share_they_are_in_the_run_s_own_table(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.npz")
    lines = tmp_path / "run" / "metrics.jsonl"
    train.run(config(path, preload_share=0.0, steps=2500, report_seconds=0.5), folder=tmp_path / "run")
    last = json.loads(lines.read_text().splitlines()[-1])
    # Beside the run's own steps and the final rows of its games.
    assert last["replay_steps"] - last["agent_steps"] - last["games"] >= EPISODES * (STEPS + 1)


class Enough(train.Callback):
    def on_evaluation(self, evaluation: Evaluation, agent_steps: int) -> None:
        raise train.StopTraining("enough")


class AtOnce(train.Callback):
    def on_metrics(self, metrics: Metrics) -> None:
        raise train.StopTraining("enough")


def test_updates_that_demonstrations_bring_end_with_the_run(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"preload_share": 0.0, "min_size": 128, "batch_size": 32, "evaluation_period": 20}
    path = demonstrations(tmp_path / "data.npz")
    one = config(path, serial=True, environments=4, **settings)
    result = train.run(one, folder=tmp_path / "run", callbacks=[Enough()])
    assert result.learner_updates == 20


def test_the_log_has_the_demonstrations_that_did_not_come(tmp_path: Path, log: Lines) -> None:
    path = demonstrations(tmp_path / "data.npz")
    settings: dict[str, Any] = {"preload_share": 0.0, "min_size": 128, "environments": 4, "report_seconds": 0.1}
    train.run(config(path, samples_per_insert=512.0, **settings), folder=tmp_path / "run", callbacks=[AtOnce()])
    # By the thread of the import.
    log.wait_for("data.npz ended early: ")
    assert any(re.search(r"early: \d+ of its 300 steps are in table", line) for line in log.lines)


def test_a_resumed_run_has_them_again(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.npz")
    first = config(path, serial=True, steps=1500)
    train.run(first, folder=tmp_path / "run")
    again = train.run(config(path, serial=True, steps=2500), folder=tmp_path / "run", resume=True, preload=path)
    assert again.agent_steps >= 2500


def test_an_export_of_a_run_is_a_data_set_for_another(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.npz", name="frame")
    result = train.run(config(path, serial=True, steps=1500), folder=tmp_path / "run")
    assert result.learner_updates > 0


def test_a_data_set_of_another_environment_is_refused(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.npz")
    other = train.preset("vector", environment="Acrobot-v1", preload=str(path), steps=1000, serial=True)
    assert gymnasium.make("Acrobot-v1").observation_space.shape == (6,)
    with pytest.raises(errors.SchemaError, match=r"'observation' has the shape \(4,\), and \(6,\)"):
        train.run(other, folder=tmp_path / "run")
    with pytest.raises(errors.ConfigError, match="there is no file"):
        train.run(config(tmp_path / "missing.npz"), folder=tmp_path / "other")


def test_settings_of_demonstrations_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="preload_share"):
        config(tmp_path / "a.npz", preload_share=0.001)
    with pytest.raises(ConfigurationError, match="preload_share"):
        config(tmp_path / "a.npz", preload_share=1.0)
    with pytest.raises(ConfigurationError, match="preload"):
        config(tmp_path / "a.npz", replay="redis://127.0.0.1:6379")


@pytest.mark.slow
def test_the_flag_preload(tmp_path: Path) -> None:
    path = demonstrations(tmp_path / "data.npz")
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
