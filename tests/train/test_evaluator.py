"""Evaluation and video: greedy games by unclipped score, with an end, and what a player would see."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import gymnasium
import imageio_ffmpeg
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from training import small

from innet_drl.analysis.recorded_run import read_run
from innet_drl.analysis.report import write_report
from innet_drl.launch import start
from innet_drl.train import environments
from innet_drl.train.environments import Environments, EnvironmentSpec
from innet_drl.train.errors import UnavailableEnvironmentError
from innet_drl.train.networks import Network, QNetwork, make_network, q_values
from innet_drl.train.play import video
from innet_drl.train.play.evaluation import evaluate
from innet_drl.train.play.exploration import choose
from innet_drl.train.settings.config import PRESETS, Config

BREAKOUT = dataclasses.replace(PRESETS["breakout"], evaluation_games=3, evaluation_frames=400)
SPEC = EnvironmentSpec(4, 4, (BREAKOUT.frame_size,) * 2, "uint8", 4)
CARTPOLE = PRESETS["cartpole"]


class Balance(torch.nn.Module):
    """Pushes towards the side that the pole falls to."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.tensor(gain))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        falls = self.gain * (observation[:, 2] + 0.5 * observation[:, 3])
        return torch.stack((-falls, falls), dim=1)


def test_a_good_agent_scores_500_and_a_bad_one_does_not() -> None:
    good = evaluate(CARTPOLE, Balance())
    bad = evaluate(CARTPOLE, Balance(-1.0))
    assert good is not None
    assert bad is not None
    assert good.mean == 500
    assert len(good.scores) == CARTPOLE.evaluation_games
    assert bad.mean < 20


def test_an_evaluation_says_that_its_games_are_one_game() -> None:
    down = torch.nn.Linear(1, 1)
    down.forward = lambda frames: (torch.arange(18) == 5).float().expand(len(frames), 18)  # type: ignore
    seaquest = dataclasses.replace(BREAKOUT, environment="atari/seaquest", evaluation_epsilon=0.0)
    told = str(evaluate(dataclasses.replace(seaquest, evaluation_frames=4000), down))
    assert "up to 30 no-ops at the start" in told
    assert "all scores are equal" in told
    perfect = evaluate(CARTPOLE, Balance())
    assert "all scores" not in str(perfect)
    assert "no-ops" not in str(perfect)


def test_an_evaluation_is_a_function_of_its_seed() -> None:
    results = [evaluate(CARTPOLE, Balance(-1.0), seed=seed) for seed in (1, 1, 2)]
    scores = [result.scores for result in results if result is not None]
    assert scores[0] == scores[1] != scores[2]


def test_a_game_without_an_end_is_cut_off() -> None:
    """An agent that never serves the ball would play for ever."""
    network = make_network(BREAKOUT, SPEC)
    assert isinstance(network, QNetwork)
    torch.nn.init.zeros_(network.advantage.weight)
    network.advantage.bias.data = torch.tensor([1.0, 0.0, 0.0, 0.0])
    result = evaluate(dataclasses.replace(BREAKOUT, evaluation_epsilon=0.0), network)
    assert result is not None
    assert result.cut_off == len(result.scores) == 3
    assert "ended by 400 frames" in str(result)


class Loop(gymnasium.Env[Any, Any]):
    """Ends after as many steps as the agent's first action says; action 0 plays for ever."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(4)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.length = 0, 0
        # The observation from which the agent takes its action.
        return self.np_random.random(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps += 1
        if self.steps == 1:
            self.length = int(action)
        return np.zeros(1, np.float32), 1.0, self.steps == self.length, False, {}


def make_loops(num_envs: int, mode: str) -> SyncVectorEnv:
    return SyncVectorEnv([Loop] * num_envs, autoreset_mode=AutoresetMode[mode])


class Fourths(torch.nn.Module):
    """Takes the action of the quarter of the observation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((4 * observation[:, 0]).long(), 4).float()


@pytest.mark.parametrize("mode", ["NEXT_STEP", "SAME_STEP"])
def test_games_of_any_environment_have_a_limit(mode: str) -> None:
    config = small(
        environment=make_loops, environment_args={"mode": mode}, evaluation_games=50, evaluation_frames=20, seed=1
    )
    result = evaluate(config, Fourths())
    assert result is not None
    # Whole games from their start: of one to three steps, or at the limit.
    assert set(result.scores) == {1.0, 2.0, 3.0, 20.0}
    assert len(result.scores) == 50
    assert result.cut_off == result.scores.count(20.0)
    assert f"{result.cut_off} ended by a time limit" in str(result)


def test_an_evaluation_can_be_stopped_and_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[Environments] = []
    monkeypatch.setattr(Environments, "close", lambda environments: closed.append(environments))
    assert evaluate(CARTPOLE, Balance(), stopped=lambda: True) is None
    assert len(closed) == 1


def test_a_video_is_an_mp4_in_the_players_size(tmp_path: Path) -> None:
    network = make_network(BREAKOUT, SPEC)
    path = tmp_path / "game.mp4"
    video.record(BREAKOUT, network, path, seconds=2)
    frames = imageio_ffmpeg.read_frames(str(path))
    assert next(frames)["size"] == (480, 630)
    assert next(frames)
    frames.close()


@pytest.mark.slow
def test_a_video_is_of_the_game_of_its_seed(tmp_path: Path) -> None:
    torch.manual_seed(1)
    small_network = dataclasses.replace(BREAKOUT, channels=(4, 4, 4), hidden=8)
    config = dataclasses.replace(small_network, evaluation_epsilon=0.8, evaluation_frames=2_000, sticky_actions=0.25)
    network = make_network(config, SPEC)
    shown = [video.record(config, network, tmp_path / "game.mp4", seed=seed, seconds=1_000) for seed in range(5, 10)]
    # The same games as the agent plays them, without a picture.
    scores = [score_of_game(config, network, seed) for seed in range(5, 10)]
    assert len(set(scores)) > 2
    assert shown == scores


def score_of_game(config: Config, network: Network, seed: int) -> float:
    envs = environments.make(config, 1, episode_frames=config.evaluation_frames)
    random = np.random.default_rng(seed)
    observation, score, ended = envs.reset(seed), 0.0, False
    while not ended:
        step = envs.step(choose(q_values(network, observation), np.full(1, config.evaluation_epsilon), random))
        score += float(step.reward[0])
        ended = bool(step.terminated[0] or step.truncated[0])
        observation = step.observation
    return score


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    network = make_network(BREAKOUT, SPEC)
    with pytest.raises(FileNotFoundError):
        video.record(BREAKOUT, network, tmp_path / "missing" / "game.mp4", seconds=2)


def test_a_video_that_fails_leaves_no_file(tmp_path: Path) -> None:
    unknown = dataclasses.replace(BREAKOUT, environment="atari/breakot")
    with pytest.raises(UnavailableEnvironmentError):
        video.record(unknown, Balance(), tmp_path / "game.mp4", seconds=2)
    assert not list(tmp_path.iterdir())


def test_an_atari_agent_plays_with_sticky_actions_after_training(tmp_path: Path) -> None:
    config = dataclasses.replace(
        PRESETS["atari"],
        serial=True,
        environments=2,
        environment_threads=1,
        channels=(4, 4, 4),
        hidden=8,
        min_size=200,
        capacity=1_000,
        batch_size=8,
        steps=300,
        evaluation_games=2,
        evaluation_frames=400,
        video=False,
    )
    start.train(config, tmp_path / "run")
    written = json.loads((tmp_path / "run" / "evaluation.json").read_text())
    assert (written["sticky_actions"], written["sticky"]["sticky_actions"]) == (0.0, 0.25)
    assert len(written["sticky"]["scores"]) == len(written["scores"]) == 2
    assert "the same with sticky actions" in write_report([tmp_path / "run"]).path.read_text()
    evaluation = read_run(tmp_path / "run", "run").evaluation
    assert evaluation is not None
    assert evaluation["sticky"]["mean"] == written["sticky"]["mean"]
