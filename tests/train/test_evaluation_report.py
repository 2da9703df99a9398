"""Evaluations that can be quoted: conditions, protocols, several seeds and runs, intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from training import small

from innet_drl.cli import main
from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.learn.learner import Learner
from innet_drl.train.observe.display import score
from innet_drl.train.play.evaluation import Evaluation, evaluate
from innet_drl.train.play.evaluation_report import PROTOCOLS, aggregate, evaluate_runs
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import Config, preset

BREAKOUT = preset("breakout", channels=(2, 2, 2), hidden=8, evaluation_games=2, evaluation_frames=400)


def untrained(folder: Path, config: Config) -> Path:
    """The folder of a run with the agent that its seed begins with."""
    probe = environments.make(config, 1)
    probe.close()
    torch.manual_seed(config.seed)
    learner = Learner(config, probe.spec)
    run = RunFolder.new(folder)
    run.begin(config)
    state = {"meter": {"agent_steps": 70}, "learner": {"updates": 7, "publications": 1}}
    run.save_checkpoint(70, learner.tensors(), state)
    return folder


def printed(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """The report of `innet-drl evaluate`, and its lines for people."""
    capsys.readouterr()
    assert main(["evaluate", *map(str, arguments)]) == 0
    output = capsys.readouterr()
    return json.loads(output.out), output.err


def test_the_figures_are_those_of_rliable() -> None:
    """By rliable 1.2.0 with arch 7.2.0 and pandas 2: 21.75, and three times 15.75 to 15.92 and 38.17 to 38.33."""
    figures = aggregate([3.0, 12.0, 15.0, 15.5, 18.0, 21.0, 22.0, 24.0, 30.0, 31.0, 64.0, 120.0])
    assert figures["interquartile_mean"] == 21.75
    np.testing.assert_allclose(figures["interval"], [15.85, 38.25], atol=0.3)
    # As rliable's, the same for three scores, none of which is left out.
    assert aggregate([10.0, 12.0, 20.0]) == {"interquartile_mean": 14.0, "interval": [10.0, 20.0]}
    assert aggregate([7.0]) == {"interquartile_mean": 7.0, "interval": None}


class Tenths(gymnasium.RewardWrapper[Any, Any]):
    """Rewards with 0.1, which no float32 is."""

    def reward(self, reward: Any) -> float:
        return 0.1


def test_scores_have_the_precision_of_their_rewards(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = untrained(tmp_path / "run", small(environment="brought:Counter", environment_wrappers=(Tenths,)))
    report, lines = printed(capsys, run)
    assert report["runs"][0]["scores"] == [0.5, 0.5, 0.5]
    assert "mean score 0.500 (standard error 0.00, deviation 0.00) over 3 games" in lines


def test_lines_have_three_digits_of_a_score() -> None:
    evaluation = Evaluation([1.41, 1.432, 1.4], 0.0, None, 0, 0)
    assert str(evaluation).startswith("mean score 1.41 (standard error 0.00945, deviation 0.0164) over 3 games")
    shown = {
        None: "-",
        0.0: "0.00",
        5.0: "5.00",
        9.996: "10.0",
        -21.04: "-21.0",
        487.33: "487.3",
        1234567.0: "1,234,567.0",
    }
    assert {value: score(value) for value in shown} == shown


def test_one_run_has_an_interval_over_its_games(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = untrained(tmp_path / "run", small(evaluation_games=4, evaluation_epsilon=0.5))
    report, lines = printed(capsys, run)
    (played,) = report["runs"]
    assert (played["run"], played["agent_steps"], played["learner_updates"]) == (str(run), 70, 7)
    assert (report["games"], report["seeds"], report["epsilon"], report["protocol"]) == (4, [0], 0.5, None)
    assert report["environment"] == "CartPole-v1"
    assert report["mean"] == played["mean"] == pytest.approx(np.mean(played["scores"]))
    assert {name: report[name] for name in ("interquartile_mean", "interval")} == aggregate(played["scores"])
    assert report["interval_over"] == "games"
    assert "bootstrap over 4 games" in lines
    again, _ = printed(capsys, run, "--games", 2, "--epsilon", 0)
    assert (again["games"], again["epsilon"]) == (2, 0.0)


def test_each_seed_plays_other_games(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = untrained(tmp_path / "run", small())
    report, _ = printed(capsys, run, "--games", 10, "--seeds", 0, 1)
    scores = report["runs"][0]["scores"]
    single = [printed(capsys, run, "--games", 10, "--seed", seed)[0]["runs"][0]["scores"] for seed in (0, 1)]
    assert (scores, report["games"], report["seeds"]) == (single[0] + single[1], 20, [0, 1])
    # Environment i of seed 1 does not play the game of environment i + 1 of seed 0.
    assert single[0][1:] != single[1][:-1]


def test_several_runs_have_an_interval_over_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [untrained(tmp_path / str(seed), small(seed=seed, evaluation_games=5)) for seed in range(4)]
    report, lines = printed(capsys, *runs)
    means = [run["mean"] for run in report["runs"]]
    assert len(set(means)) > 1
    assert {name: report[name] for name in ("interquartile_mean", "interval")} == aggregate(means)
    assert (report["mean"], report["interval_over"]) == (pytest.approx(np.mean(means)), "runs")
    assert len(lines.splitlines()) == 5
    assert "bootstrap over 4 runs" in lines


def test_runs_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    one = untrained(tmp_path / "one", small())
    other = untrained(tmp_path / "other", small(environment="Acrobot-v1"))
    longer = untrained(tmp_path / "longer", small(evaluation_games=50))
    with pytest.raises(ConfigurationError, match="differ in environment: evaluate runs of one environment"):
        evaluate_runs([one, other])
    with pytest.raises(ConfigurationError, match="differ in --games: give one value for all"):
        evaluate_runs([one, longer])
    assert evaluate_runs([one, longer], changes={"evaluation_games": 1}).as_dict()["games"] == 1
    with pytest.raises(ConfigurationError, match="name their folders"):
        evaluate_runs([])
    with pytest.raises(ConfigurationError, match="--seeds 1 1: give each seed once"):
        evaluate_runs([one], seeds=[1, 1])


@pytest.mark.parametrize("given", [["--protocol", "mnih2015"], ["--sticky-actions", "0.25"], ["--no-ops", "0"]])
def test_conditions_of_atari_are_refused_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: list[str]
) -> None:
    run = untrained(tmp_path / "run", small())
    assert main(["evaluate", str(run), *given]) == 1
    told = capsys.readouterr().err
    assert given[0] in told
    assert "CartPole-v1, is not atari/<game>" in told


def test_a_protocol_sets_the_conditions_and_flags_change_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = untrained(tmp_path / "run", BREAKOUT)
    report, lines = printed(capsys, run, "--protocol", "mnih2015", "--games", 2, "--frames", 400)
    stated = {name: report[name] for name in ("protocol", "epsilon", "no_ops", "sticky_actions", "full_action_set")}
    assert stated == {
        "protocol": "mnih2015",
        "epsilon": 0.05,
        "no_ops": 30,
        "sticky_actions": 0.0,
        "full_action_set": False,
    }
    assert (report["episode_frames"], report["games"]) == (400, 2)
    assert "up to 30 no-ops at the start" in lines
    assert main(["evaluate", str(run), "--protocol", "machado2018"]) == 1
    assert "it plays with all 18 of the actions" in capsys.readouterr().err


def test_the_full_action_set_is_the_agents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = preset("breakout", channels=(2, 2, 2), hidden=8, sticky_actions=0.25, full_action_set=True, no_ops=0)
    run = untrained(tmp_path / "run", full)
    assert environments.make(full, 1).spec.actions == 18
    report, lines = printed(capsys, run, "--protocol", "machado2018", "--games", 2, "--frames", 400)
    assert (report["full_action_set"], report["sticky_actions"], report["no_ops"]) == (True, 0.25, 0)
    assert "sticky actions 0.25, full action set" in lines
    assert main(["evaluate", str(run), "--protocol", "mnih2015"]) == 1
    assert "train with full_action_set=False" in capsys.readouterr().err


def test_protocols_are_settings() -> None:
    for changes in PROTOCOLS.values():
        preset("breakout", **changes)


def test_games_without_no_ops_are_one_game() -> None:
    """Without random starts, Breakout's first frames depend on nothing but the actions."""
    down = torch.nn.Linear(1, 1)
    down.forward = lambda frames: (torch.arange(4) == 3).float().expand(len(frames), 4)  # type: ignore
    config = preset("breakout", no_ops=0, evaluation_games=6, evaluation_frames=2_000, evaluation_epsilon=0.0)
    result = evaluate(config, down)
    assert result is not None
    assert len(set(result.scores)) == 1
    assert result.no_ops == 0


def test_it_shows_how_far_it_is(tmp_path: Path) -> None:
    shown: list[tuple[str, str]] = []
    runs = [untrained(tmp_path / name, small(evaluation_games=2)) for name in ("a", "b")]
    evaluate_runs(runs, seeds=[3, 4], progress=lambda activity, done: shown.append((activity, done)))
    assert {activity for activity, _ in shown} == {
        f"evaluation of run {number} of 2, {run}" for number, run in enumerate(runs, 1)
    }
    assert shown[0][1] == "seed 3, 0 of 2 games, step 1"
    assert shown[-1][1].startswith("seed 4, 2 of 2 games")
