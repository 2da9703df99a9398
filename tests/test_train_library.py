"""`innet_drl.train` from Python: settings, runs with callbacks, and trained agents."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

from innet_drl import train
from innet_drl.train.errors import ConfigurationError, MissingExtraError, RunFolderError
from innet_drl.train.run_folder import RunFolder
from training import lines, small


class Recorder(train.Callback):
    """Notes every call; may end training at one."""

    def __init__(self, stop_at: str = "", error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._stop_at = stop_at
        self._error = error or train.StopTraining("enough")

    def _note(self, method: str, argument: object) -> None:
        self.calls.append((method, argument))
        if method == self._stop_at:
            raise self._error

    def on_start(self, config: train.Config, folder: Path) -> None:
        self._note("start", folder)

    def on_metrics(self, metrics: train.Metrics) -> None:
        self._note("metrics", metrics)

    def on_evaluation(self, evaluation: train.Evaluation, agent_steps: int) -> None:
        self._note("evaluation", (evaluation, agent_steps))

    def on_checkpoint(self, path: Path) -> None:
        self._note("checkpoint", path)

    def on_end(self, result: train.Result) -> None:
        self._note("end", result)


def test_a_run_calls_its_callbacks_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    result = train.run(small(serial=True, steps=400), callbacks=[recorder], folder=tmp_path / "run")
    names = [name for name, _ in recorder.calls]
    assert names[0] == "start"
    assert names[-1] == "end"
    assert recorder.calls[0][1] == tmp_path / "run"
    assert recorder.calls[-1][1] is result
    written = [metrics.agent_steps for name, metrics in recorder.calls if name == "metrics"]
    assert written == [line["agent_steps"] for line in lines(tmp_path / "run")]
    assert [path for name, path in recorder.calls if name == "checkpoint"] == [
        RunFolder(result.folder).newest_checkpoint()
    ]
    assert [told for name, told in recorder.calls if name == "evaluation"] == [(result.evaluation, result.agent_steps)]


@pytest.mark.parametrize("method", ["start", "metrics", "evaluation", "checkpoint"])
def test_a_callback_ends_a_run_in_good_order(tmp_path: Path, method: str) -> None:
    config = small(serial=True, steps=10_000, evaluation_period=20, checkpoint_minutes=1e-3)
    result = train.run(config, callbacks=[Recorder(stop_at=method)], folder=tmp_path / "run")
    assert result.agent_steps < 10_000
    assert RunFolder(result.folder).newest_checkpoint() is not None
    assert (result.evaluation is None) == (result.learner_updates == 0)


def test_a_callback_ends_a_run_of_processes(tmp_path: Path) -> None:
    recorder = Recorder(stop_at="metrics")
    result = train.run(small(steps=1_000_000), callbacks=[recorder], folder=tmp_path / "run")
    assert result.agent_steps < 1_000_000
    assert recorder.calls[-1] == ("end", result)


def test_an_error_of_a_callback_reaches_the_caller_and_nothing_is_left_running(tmp_path: Path) -> None:
    """As the pruning of a study does, which then starts the next run."""

    class PrunedError(Exception):
        pass

    for trial in range(2):
        with pytest.raises(PrunedError):
            train.run(
                small(steps=1_000_000, seed=trial),
                callbacks=[Recorder(stop_at="metrics", error=PrunedError())],
                folder=tmp_path / str(trial),
            )
    with RunFolder.open(tmp_path / "0").hold():
        pass
    assert train.run(small(steps=300), folder=tmp_path / "last").agent_steps >= 300


def test_a_run_in_a_thread_takes_nothing_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Actors apart, in the folder of its environment's name."""
    monkeypatch.chdir(tmp_path)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    levels = [(logger.level, list(logger.handlers)) for logger in (logging.getLogger(), logging.getLogger("innet_drl"))]
    threads, numbers, environment = torch.get_num_threads(), torch.random.get_rng_state(), dict(os.environ)
    with ThreadPoolExecutor(1) as other:
        result = other.submit(train.run, small(steps=300, learner_threads=3)).result()
    assert result.folder.parent == Path("runs")
    assert result.folder.name.startswith("CartPole-v1-")
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert torch.get_num_threads() == threads
    assert torch.random.get_rng_state().equal(numbers)
    assert dict(os.environ) == environment
    assert levels == [
        (logger.level, list(logger.handlers)) for logger in (logging.getLogger(), logging.getLogger("innet_drl"))
    ]


def test_a_run_in_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(train.Callback):
        def on_metrics(self, metrics: train.Metrics) -> None:
            seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train.run(small(serial=True, steps=300), callbacks=[Look()], folder=tmp_path / "run")
    assert set(seen) == {before}


def test_a_run_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train.run(small(serial=True, steps=300), folder=run)
    assert train.run(small(serial=True, steps=600), folder=run, resume=True).agent_steps >= 600
    with pytest.raises(ConfigurationError, match="name it, folder="):
        train.run(small(serial=True), resume=True)


def test_an_agent_acts_on_one_observation_and_on_a_batch(tmp_path: Path) -> None:
    result = train.run(small(serial=True, steps=400), folder=tmp_path / "run")
    agent = train.load(result.folder)
    assert agent.config == small(serial=True, steps=400)
    environment = gymnasium.make("CartPole-v1")
    observation, _ = environment.reset(seed=0)
    action = agent.act(observation)
    environment.step(action)
    assert isinstance(action, int)
    batch = np.stack([observation, -observation, observation])
    actions = agent.act(batch)
    assert isinstance(actions, np.ndarray)
    assert actions.shape == (3,)
    assert actions[0] == actions[2] == action
    q = agent.network(torch.from_numpy(batch))
    assert actions.tolist() == q.argmax(1).tolist()
    random = np.random.default_rng(0)
    explored = agent.act(np.repeat(batch[:1], 1000, 0), epsilon=1.0, random=random)
    assert 400 < np.sum(explored) < 600
    environment.close()
    with pytest.raises(ValueError, match=r"the shape \(5,\): it must be \(4,\), or a batch"):
        agent.act(np.zeros(5))


def test_the_best_agent_is_kept(tmp_path: Path) -> None:
    recorder = Recorder()
    config = small(serial=True, steps=1_500, evaluation_period=60, learning_rate=3e-3)
    result = train.run(config, callbacks=[recorder], folder=tmp_path / "run")
    scores = [told for name, told in recorder.calls if name == "evaluation"]
    best, steps = max(((evaluation.mean, -steps) for evaluation, steps in scores))
    assert result.best_mean == best
    kept = RunFolder(result.folder).best_agent()
    assert (kept.state["mean"], kept.state["agent_steps"]) == (best, -steps)
    agent = train.load(result.folder, best=True)
    assert agent.checkpoint == result.folder / "best.safetensors"
    # A later session keeps it, unless it is surpassed.
    later = train.run(small(serial=True, steps=1_600), folder=result.folder, resume=True)
    assert later.best_mean is not None
    assert later.best_mean >= best


def test_a_run_without_an_evaluation_has_no_best_agent(tmp_path: Path) -> None:
    result = train.run(small(serial=True, steps=100), folder=tmp_path / "run")
    assert result.best_mean is None
    with pytest.raises(RunFolderError, match="no evaluated agent"):
        train.load(result.folder, best=True)


def test_presets_and_settings_of_other_names() -> None:
    assert train.preset("cartpole", seed=3, layers=[8]) == train.preset("cartpole", seed=3, layers=(8,))
    with pytest.raises(ConfigurationError, match=r"no preset 'breakut' in innet-drl [\d.]+: did you mean breakout"):
        train.preset("breakut")
    with pytest.raises(ConfigurationError, match=r"no preset 'go' in innet-drl [\d.]+: there are breakout, "):
        train.preset("go")
    with pytest.raises(ConfigurationError, match=r"no setting 'learning_rat' in .*: did you mean learning_rate"):
        train.preset("cartpole", learning_rat=1)
    with pytest.raises(ConfigurationError, match="--gamma 'high': it must be a number"):
        train.preset("cartpole", gamma="high")


def test_an_own_environment_inherits_nothing_of_a_game() -> None:
    own = train.Config(environment="LunarLander-v3")
    game = train.preset("breakout")
    assert (own.clip_rewards, own.life_loss_ends, own.stack) == (False, False, 1)
    sizes = ("environments", "capacity", "min_size", "epsilon_anneal_steps", "chunk_steps", "publish_period")
    assert all(getattr(own, name) < getattr(game, name) for name in sizes)


@pytest.mark.parametrize("used", ["preset", "load"])
def test_a_missing_extra_is_named(used: str) -> None:
    code = f"import sys; sys.modules['yaml'] = None; from innet_drl import train; train.{used}"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    error = ended.stderr.strip().splitlines()[-1]
    assert error == f"{MissingExtraError.__module__}.MissingExtraError: yaml is not installed: " + (
        "pip install 'innet-drl[train]'"
    )


def test_a_script_without_a_guard_is_told_once(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from innet_drl import train\n"
        "train.run(train.preset('cartpole', steps=1000, evaluation_games=1), folder='run')\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stderr.strip().splitlines()[-1].startswith("innet_drl.train.errors.ActorError: actor 0 cannot play")
    assert ended.stderr.count("ActorError: ") == 1
    assert "under `if __name__ == '__main__':`" in ended.stderr
