"""Evaluations beside training: the learner does not wait for them, and none of their failures ends it."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import brought
import gymnasium
import numpy as np
import pytest
from serving import until
from training import small

from innet_drl import train
from innet_drl.launch import evaluator as launch_evaluator
from innet_drl.launch.evaluator import Evaluator
from innet_drl.launch.launcher import LocalLauncher
from innet_drl.train import environments
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.networks import make_network
from innet_drl.train.play.evaluation import Evaluation, evaluate
from innet_drl.train.run_folder import RunFolder

pytestmark = pytest.mark.slow

SPEC = EnvironmentSpec(2, 1, (4,), "float32", 1)
CONFIG = small(evaluation_games=3)
CALLS: list[str] = []


@pytest.fixture
def network() -> Any:
    return make_network(CONFIG, SPEC)


@pytest.fixture
def evaluator() -> Iterator[Evaluator]:
    with Evaluator(CONFIG, SPEC, LocalLauncher()) as made:
        yield made


def arrays(network: Any) -> dict[str, Any]:
    return {name: value.numpy() for name, value in network.state_dict().items()}


def played(evaluator: Evaluator) -> Evaluation | None:
    """The result, once there is one or its process has failed."""
    found: list[Evaluation] = []

    def ended() -> bool:
        result = evaluator.result()
        found.extend([result] if result is not None else [])
        return not evaluator._playing

    until(ended)
    return found[0] if found else None


def process(evaluator: Evaluator) -> Any:
    assert isinstance(evaluator._launcher, LocalLauncher)
    return evaluator._launcher._processes.get("evaluator")


def test_another_process_plays_the_games_of_this_one(evaluator: Evaluator, network: Any) -> None:
    for _ in range(2):
        assert evaluator.idle
        evaluator.begin(arrays(network))
        assert not evaluator.idle
        assert played(evaluator) == evaluate(CONFIG, network, seed=CONFIG.seed)
    assert evaluator.result() is None


def test_a_killed_process_is_reported_and_replaced(
    evaluator: Evaluator, network: Any, caplog: pytest.LogCaptureFixture
) -> None:
    evaluator.begin(arrays(network))
    os.kill(process(evaluator).pid, signal.SIGKILL)
    assert played(evaluator) is None
    (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "training continues; there will be others: its process was killed" in warning.getMessage()
    evaluator.begin(arrays(network))
    assert played(evaluator) is not None


def test_a_process_that_keeps_dying_is_given_up(
    evaluator: Evaluator, network: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch_evaluator, "run_evaluator", die)
    for _ in range(1 + launch_evaluator.FAILURES):
        assert evaluator.idle
        evaluator.begin(arrays(network))
        assert played(evaluator) is None
    assert not evaluator.idle
    assert "there are no more during training" in caplog.records[-1].getMessage()


def die(config: object, spec: object, parameters: object, pipe: Any) -> None:
    """The main function of an evaluator that ends at once."""
    os._exit(3)


def test_a_stopped_process_keeps_nothing_from_ending(evaluator: Evaluator, network: Any) -> None:
    evaluator.begin(arrays(network))
    os.kill(process(evaluator).pid, signal.SIGSTOP)
    assert evaluator.result() is None
    evaluator.__exit__(None, None, None)
    assert process(evaluator) is None


def test_a_hung_environment_process_keeps_nothing_from_ending(tmp_path: Path) -> None:
    """The environment is a fork of the evaluator, and holds its end of the pipe."""
    os.mkfifo(tmp_path / "steps")
    config = small(
        environment=brought.Hung,
        environment_args={"folder": str(tmp_path)},
        async_environments=True,
        evaluation_games=1,
    )
    spec = environments.make(small(environment=brought.Counter), 1).spec
    with Evaluator(config, spec, LocalLauncher()) as evaluator:
        evaluator.begin(arrays(make_network(config, spec)))
        hung = int((tmp_path / "steps").read_text())
        os.kill(process(evaluator).pid, signal.SIGKILL)
        assert played(evaluator) is None
    # The environment hangs until now.
    os.kill(hung, signal.SIGKILL)


def test_an_evaluation_that_is_ended_closes_its_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_evaluator, "STOP_SECONDS", 60.0)
    os.mkfifo(tmp_path / "steps")
    config = small(
        environment=brought.Endless,
        environment_args={"folder": str(tmp_path)},
        evaluation_games=1,
        evaluation_frames=10**9,
    )
    spec = environments.make(small(environment=brought.Counter), 1).spec
    with Evaluator(config, spec, LocalLauncher()) as evaluator:
        evaluator.begin(arrays(make_network(config, spec)))
        assert (tmp_path / "steps").read_text() == "stepped"
    (file,) = (path for path in tmp_path.iterdir() if path.name != "steps")
    assert file.name.startswith("closed-")


def test_an_evaluation_that_reaches_the_target_ends_training(tmp_path: Path) -> None:
    during: list[Evaluation] = []

    class Watch(train.Callback):
        def on_evaluation(self, evaluation: Evaluation, agent_steps: int) -> None:
            during.append(evaluation)

    config = small(steps=1_000_000, evaluation_period=50, target_return=1.0)
    result = train.run(config, callbacks=[Watch()], folder=tmp_path / "run")
    assert during[0].mean >= 1.0
    assert result.agent_steps < 1_000_000
    assert RunFolder(result.folder).best_agent().state["mean"] == max(evaluation.mean for evaluation in during)


def test_environments_of_an_evaluation_may_be_processes(tmp_path: Path) -> None:
    config = small(
        environment=brought.Counter,
        async_environments=True,
        environments=1,
        batch_size=16,
        steps=1_000_000,
        evaluation_games=1,
        evaluation_period=5,
        target_return=5.0,
    )
    result = train.run(config, folder=tmp_path / "run")
    assert result.best_mean == 5.0
    assert result.agent_steps < 1_000_000


def test_the_learner_does_not_wait_for_an_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This one never ends."""
    monkeypatch.setattr(launch_evaluator, "run_evaluator", stay)
    result = train.run(small(evaluation_period=20), folder=tmp_path / "run")
    assert result.learner_updates > 100
    assert result.evaluation is not None


def stay(config: object, spec: object, parameters: object, pipe: Any) -> None:
    """The main function of an evaluator that plays for ever."""
    threading.Event().wait()


def test_a_run_outlives_its_evaluator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch_evaluator, "run_evaluator", die)
    result = train.run(small(evaluation_period=20), folder=tmp_path / "run")
    assert result.learner_updates > 100
    assert result.evaluation is not None
    assert any("an evaluation failed, and training continues" in record.getMessage() for record in caplog.records)


class Counted(gymnasium.Env[Any, Any]):
    """A game of one step, of which it is counted how many are open."""

    observation_space = gymnasium.spaces.Box(0, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    open = most_open = 0

    def __init__(self, render_mode: str | None = None) -> None:
        Counted.open += 1
        Counted.most_open = max(Counted.most_open, Counted.open)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(1, np.float32), 1.0, True, False, {}

    def close(self) -> None:
        Counted.open -= 1


def test_an_evaluation_opens_ten_environments_at_most() -> None:
    gymnasium.register("Counted-v0", lambda **options: Counted(**options))
    try:
        config = small(environment="Counted-v0", evaluation_games=30)
        probe = environments.make(config, 1)
        network = make_network(config, probe.spec)
        probe.close()
        Counted.open = Counted.most_open = 0
        result = evaluate(config, network)
    finally:
        gymnasium.registry.pop("Counted-v0")
    assert result is not None
    assert result.scores == [1.0] * 30
    # Gymnasium makes one more to look at its spaces.
    assert 10 <= Counted.most_open <= 11
