"""Training with several learners: the same weights everywhere, and an end with a reason when one is gone."""

import dataclasses
import functools
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gradient_workers import (
    die_while_learning,
    fail_to_begin,
    fail_while_learning,
    gradient_server,
    kill_the_actor_and_await_the_next,
    name_gpus,
    starve,
    tell_process,
)
from places import ROOT
from serving import until
from training import lines, small

import innet_drl as innet
from innet_drl import train
from innet_drl.launch import actors, learners, start
from innet_drl.launch.launcher import start_fork_server
from innet_drl.train.errors import ConfigurationError, LearnerError
from innet_drl.train.run_folder import RunFolder

pytestmark = pytest.mark.slow

EXAMPLE = ROOT / "examples" / "ddp_hook.py"

UPDATES = 18
"""Updates of every learner when another begins its twentieth: it has made 19, they may still apply theirs."""


def test_two_learners_end_with_the_same_weights_and_go_on_with_them(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start.train(small(learners=2, targets_ahead="on"), run)
    assert first.learner_updates > 50
    last = lines(run)[-1]
    assert last["learner_updates"] == first.learner_updates
    # Each samples as many as one alone.
    sampled = last["samples_per_insert"] * last["replay_steps"]
    assert sampled > 1.5 * first.learner_updates * small().batch_size
    # A learner with other weights would have ended it with an error.
    second = start.train(small(learners=2, steps=first.agent_steps + 400), run, resume=True)
    assert second.learner_updates > first.learner_updates


def test_parts_of_a_network_may_be_frozen_or_unused(tmp_path: Path) -> None:
    config = small(learners=2, network="own_networks:PartlyTrained", steps=600)
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 20
    resumed = start.train(dataclasses.replace(config, steps=result.agent_steps + 200), tmp_path / "run", resume=True)
    assert resumed.learner_updates > result.learner_updates


def test_a_server_sums_the_gradients_and_holds_the_memory(tmp_path: Path) -> None:
    with gradient_server() as server:
        result = start.train(small(learners=3, replay=server, gradients=server), tmp_path / "run")
    assert result.learner_updates > 20


def test_a_wrong_aggregator_is_named_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("innet_drl.train.runs.trainer.Trainer", None)
    with pytest.raises(innet.errors.ConfigError, match="nowhere"):
        start.train(small(learners=2, gradients="nowhere://a:1"), tmp_path / "run")
    with innet.Memory([]) as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        (address,) = server.addresses
        with pytest.raises(
            ConfigurationError, match=f"{address} sums no gradients: start it as innet-replay serve --gradients"
        ):
            start.train(small(learners=2, gradients=address), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_learner_that_is_killed_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners, "run_learner", die_while_learning)
    with pytest.raises(LearnerError, match="learner 1"):
        start.train(small(learners=2, steps=100_000), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").glob("*.safetensors"))


def test_a_learner_that_fails_ends_the_run_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "run_learner", fail_while_learning)
    with pytest.raises(LearnerError, match=r"learner 1 failed: .*no gradient here"):
        start.train(small(learners=2, steps=100_000), tmp_path / "run")
    assert RunFolder(tmp_path / "run").latest_checkpoint().state["learner"]["updates"] >= UPDATES


def test_an_actor_is_replaced_while_another_learner_waits_for_its_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners, "run_learner", functools.partial(kill_the_actor_and_await_the_next, tmp_path))
    monkeypatch.setattr(actors, "run_actor", functools.partial(tell_process, tmp_path))
    config = small(learners=2, actors=1, actor_restarts=1)
    assert start.train(config, tmp_path / "run").learner_updates > 50


def test_a_signal_ends_training_while_another_learner_has_no_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learners, "run_learner", functools.partial(starve, tmp_path))

    def interrupt() -> None:
        until((tmp_path / "starved").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    run = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        train.run(small(learners=2, steps=1_000_000), folder=run)
    thread.join()
    assert RunFolder(run).latest_checkpoint().state["learner"]["updates"] >= UPDATES


def test_a_learner_that_cannot_begin_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learners, "run_learner", fail_to_begin)
    with pytest.raises(LearnerError, match="no place here"):
        start.train(small(learners=2), tmp_path / "run")


def test_further_learners_see_the_gpus_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that were chosen, as by Ray, after the process was started that learners are forked from."""
    start_fork_server()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    monkeypatch.setattr(learners, "run_learner", name_gpus)
    with pytest.raises(LearnerError, match="it sees the GPUs 6,7"):
        start.train(small(learners=2, device="cpu"), tmp_path / "run")


def test_several_learners_want_processes_and_a_replay_server() -> None:
    with pytest.raises(ConfigurationError, match="learners"):
        small(learners=2, serial=True)
    assert small(learners=3).slack > small().slack
    assert small().learners == 1


@pytest.mark.timeout(400)
def test_the_example_learns() -> None:
    command = [sys.executable, str(EXAMPLE), "--workers", "2", "--updates", "1200"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=380)
    assert done.returncode == 0, done.stdout + done.stderr
    scores = [float(score) for score in re.findall(r"mean score of the last 20 games ([\d.]+)", done.stdout)]
    assert len(scores) == 10
    # Chance alone keeps the pole up for 22 steps; this reaches 190 and more.
    assert max(scores) > 100, scores
