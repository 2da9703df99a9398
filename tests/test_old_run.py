"""A run of the first release, which `tests/old_run` holds, is read, evaluated, recorded over and resumed."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from innet_drl.cli import main
from innet_drl.launch import local
from innet_drl.train.agent import load
from innet_drl.train.checkpoints import save_checkpoint
from innet_drl.train.config import Config
from innet_drl.train.errors import RunFolderError
from innet_drl.train.run_folder import RunFolder
from training import lines

OLD_RUN = Path(__file__).parent / "old_run"
"""Serial, CartPole, 81 steps and 12 updates of a network of 194 weights; written at commit d7afddb."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OLD_RUN, tmp_path / "run"))


def test_settings_and_checkpoint_are_read(run: Path) -> None:
    folder = RunFolder.open(run)
    config = folder.config()
    assert (config.environment, config.serial, config.layers, config.seed) == ("CartPole-v1", True, (8,), 3)
    # What is written today is what was written then, and settings that were added since.
    config.save(run / "again.yaml")
    now, then = (yaml.safe_load((run / name).read_text()) for name in ("again.yaml", "config.yaml"))
    assert now.items() >= then.items()
    assert now.keys() - then.keys() == {
        "learning_rate_final",
        "learning_rate_anneal_updates",
        "replay_patience",
        "namespace",
        "environment_args",
        "environment_wrappers",
        "async_environments",
        "network",
        "impala_norm",
        "loss",
        "munchausen",
        "munchausen_scale",
        "munchausen_temperature",
        "munchausen_floor",
        "atoms",
        "value_range",
        "quantiles",
        "no_ops",
        "full_action_set",
        "max_version_lag",
        "trace_seconds",
        "environment_timeout",
        "frame_size",
        "publish",
    }
    checkpoint = folder.latest_checkpoint()
    assert checkpoint.state["learner"] == {"updates": 12, "publications": 2}
    assert checkpoint.state["meter"]["agent_steps"] == 81
    names = {name.partition(".")[0] for name in checkpoint.tensors}
    assert names == {"model", "target", "average", "optimizer", "journal", "actor"}


def test_the_agent_is_evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = load(run)
    assert agent.config == Config.load(OLD_RUN / "config.yaml")
    average = RunFolder.open(run).latest_checkpoint().tensors["average.advantage.weight"]
    assert agent.network.state_dict()["advantage.weight"].equal(average)
    assert main(["evaluate", str(run), "--games", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (played,) = printed["runs"]
    assert (played["agent_steps"], played["learner_updates"], len(played["scores"])) == (81, 12, 2)
    assert json.loads((run / "evaluation.json").read_text()).keys() <= printed.keys() | played.keys()


def test_a_run_without_an_average_publishes_the_newest_weights(run: Path) -> None:
    settings = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**settings, "average_decay": 0}))
    assert RunFolder.open(run).config().publish == "newest"


def test_a_network_with_normalised_features_is_refused(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unreleased network normalised the inputs of its head, too."""
    checkpoint = RunFolder.open(run).latest_checkpoint()
    norms = {f"{network}.features_norm.weight": torch.ones(8) for network in ("model", "target", "average")}
    save_checkpoint(checkpoint.path, {**checkpoint.tensors, **norms}, checkpoint.state)
    wanted = "another network than the run's settings make: they differ in features_norm.weight. Continue with"
    with pytest.raises(RunFolderError, match=wanted):
        load(run)
    for command in (["evaluate", str(run)], ["train", "--resume", str(run), "--steps", "400"]):
        assert main(command) == 1
        assert wanted in capsys.readouterr().err


@pytest.mark.parametrize("serial", [True, False])
def test_training_goes_on(run: Path, serial: bool) -> None:
    config = dataclasses.replace(RunFolder.open(run).config(), steps=400, serial=serial)
    before = lines(run)
    result = local.train(config, run, resume=True)
    assert result.agent_steps >= 400
    assert result.learner_updates > 12
    after = lines(run)
    # The run's last line was repeated with its evaluation; the old lines stay.
    assert after[: len(before)] == before
    assert after[-1].keys() - before[-1].keys() == {
        "seconds_left",
        "length_mean",
        "epsilon",
        "gradient_norm",
        "samples_per_insert_now",
        "samples_per_insert_target",
        "evaluation_best",
        "actor_scores",
        "actor_steps_per_s",
        "actor_waits",
        "processor_s",
        "processor_s_per_million_frames",
        "joules",
        "joules_per_million_frames",
        "resident_bytes",
        "learning_rate",
        "q_predicted",
        "return_discounted",
        "priority_total",
        "priority_max",
        "priority_concentration",
        "policy_churn",
        "policy_agreement",
        "dead_units",
        "feature_spread",
        "adam_epsilon_share",
        "equal_frames",
        "effective_sample_size",
        "priority_percentiles",
    }
