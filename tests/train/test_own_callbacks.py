"""What callbacks see of a run, metrics of their own, and evaluations in another environment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from corridor import Corridor, Four
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from innet_drl import train
from innet_drl.train.environments.vector import INFO_BYTES, last_info
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.metrics import Game, values_of
from innet_drl.train.runs.following import follow


def config(**settings: Any) -> train.Config:
    base: dict[str, Any] = {"environment": Corridor, "steps": 3000, "evaluation_games": 4, "video": False}
    return train.preset("vector", **{**base, **settings})


class Seeing(train.Callback):
    def __init__(self) -> None:
        self.games: list[Game] = []
        self.updates: list[int] = []

    def on_start(self, config: train.Config, folder: Path) -> None:
        assert isinstance(self.training.network, torch.nn.Module)
        assert self.training.average is not self.training.network

    def on_games(self, games: list[Game]) -> None:
        self.games += games
        self.training.log("success", sum(bool(game.info["success"]) for game in games) / len(games))
        self.training.log("nothing", math.nan)

    def on_metrics(self, metrics: train.Metrics) -> None:
        self.updates.append(self.training.learner_updates)
        assert self.training.agent_steps >= metrics["agent_steps"]
        norm = sum(float(weights.detach().norm()) for weights in self.training.network.parameters())
        self.training.log("weights", norm)


@pytest.mark.parametrize("serial", [True, False], ids=["serial", "processes"])
def test_callbacks_see_the_network_and_games_and_log_metrics(tmp_path: Path, serial: bool) -> None:
    seeing = Seeing()
    train.run(config(serial=serial, report_seconds=0.5), callbacks=[seeing], folder=tmp_path / "run")
    assert len(seeing.games) > 100
    for game in seeing.games:
        assert game.info == {"at": 5, "success": True, "who": "robot", "deep/half": 2.5}
    assert seeing.updates == sorted(seeing.updates)
    assert seeing.updates[-1] > 0
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    logged = [values_of(line, "own") for line in lines]
    assert any(values.get("success") == 1.0 for values in logged)
    assert sum("weights" in values for values in logged) == len(logged) - 1
    assert not any("nothing" in values for values in logged)


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_the_last_info_is_of_the_step_that_ended_the_game(mode: AutoresetMode) -> None:
    envs = SyncVectorEnv([lambda: Corridor(2), lambda: Corridor(3)], autoreset_mode=mode)
    envs.reset(seed=0)
    for step in (1, 2, 3):
        _, _, terminated, _, info = envs.step(np.zeros(2, int))
        for index in np.flatnonzero(terminated):
            assert last_info(info, int(index))["at"] == step


def test_a_large_info_is_cut() -> None:
    info = {f"text{number}": np.array(["x" * 200]) for number in range(5)}
    assert len(json.dumps(last_info(info, 0))) <= INFO_BYTES
    assert last_info(info, 0)
    # A long text does not take the place of what follows it.
    assert last_info({"mission": np.array(["x" * 900]), "success": np.array([True])}, 0) == {"success": True}


def test_evaluations_have_an_environment_of_their_own(tmp_path: Path) -> None:
    other = config(evaluation_environment_args={"length": 7, "reward": 2.0}, serial=True)
    result = train.run(other, folder=tmp_path / "arguments")
    assert result.evaluation is not None
    assert result.evaluation.scores == [14.0] * 4
    best = tmp_path / "arguments" / "best.safetensors"
    best.unlink()
    next(follow([tmp_path / "arguments"]))
    assert best.exists(), "a follower plays under the run's own conditions"
    result = train.run(
        config(evaluation_environment="CartPole-v1", environment=Four, serial=True), folder=tmp_path / "run"
    )
    assert result.evaluation is not None
    assert all(score != 5.0 for score in result.evaluation.scores)


def test_an_evaluated_environment_of_other_spaces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"evaluation_environment .*has other observations"):
        train.run(config(evaluation_environment_args={"size": 3}), folder=tmp_path / "run")
    with pytest.raises(ConfigurationError, match=r"evaluation_environment Acrobot-v1 has other actions"):
        train.run(config(evaluation_environment="Acrobot-v1"), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
