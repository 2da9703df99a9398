"""`innet_drl.train` from Python: settings, runs with callbacks, and trained agents."""

from __future__ import annotations

import dataclasses
import json
import logging
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from places import HELPERS
from training import lines, small

from innet_drl import train
from innet_drl.cli import main
from innet_drl.errors import MissingExtraError
from innet_drl.launch import start
from innet_drl.train.errors import ConfigurationError, ProcessError, RunFolderError
from innet_drl.train.flags import parse_train
from innet_drl.train.observe.display import Display
from innet_drl.train.run_folder import RunFolder


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
    written = [metrics["agent_steps"] for name, metrics in recorder.calls if name == "metrics"]
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
                small(steps=1_000_000, evaluation_period=20, seed=trial),
                callbacks=[Recorder(stop_at="evaluation", error=PrunedError())],
                folder=tmp_path / str(trial),
            )
    with RunFolder.open(tmp_path / "0").hold():
        pass
    assert train.run(small(steps=300), folder=tmp_path / "last").agent_steps >= 300


def test_an_error_of_a_callback_before_the_run_has_learned_leaves_no_folder(tmp_path: Path) -> None:
    for serial in (True, False):
        with pytest.raises(ZeroDivisionError):
            train.run(
                small(serial=serial),
                callbacks=[Recorder(stop_at="start", error=ZeroDivisionError())],
                folder=tmp_path / "run",
            )
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("serial", [True, False])
def test_an_error_of_a_callback_leaves_a_run_that_can_be_resumed(serial: bool, tmp_path: Path) -> None:
    recorder = Recorder(stop_at="evaluation", error=ZeroDivisionError())
    config = small(serial=serial, steps=1_000_000, evaluation_period=20)
    with pytest.raises(ZeroDivisionError):
        train.run(config, callbacks=[recorder], folder=tmp_path / "run")
    steps = RunFolder(tmp_path / "run").latest_checkpoint().state["meter"]["agent_steps"]
    resumed = train.run(small(serial=serial, steps=steps + 300), folder=tmp_path / "run", resume=True)
    assert resumed.learner_updates > 20


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


OWN_PROCESSES = """
import multiprocessing
import signal
import sys


def show(pipe):
    pipe.send(("json" in sys.modules, "torch" in sys.modules, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
    pipe.recv()


if __name__ == "__main__":
    from innet_drl import train
    from training import small

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["json"])
    train.run(small(steps=300), folder="run")
    ours, theirs = context.Pipe()
    process = context.Process(target=show, args=(theirs,))
    process.start()
    print(ours.recv())
    process.terminate()
    process.join(20)
    print(process.exitcode)
    process.kill()
"""


def test_the_fork_server_of_the_callers_processes_is_not_the_runs(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(OWN_PROCESSES)
    path = os.pathsep.join(filter(None, [str(HELPERS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    ended = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-2:] == ["(True, False, set())", str(-signal.SIGTERM)]


def test_a_run_in_the_main_thread_leaves_signals_alone(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Look(train.Callback):
        def on_metrics(self, metrics: train.Metrics) -> None:
            seen.append((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))

    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    train.run(small(serial=True, steps=300), callbacks=[Look()], folder=tmp_path / "run")
    assert set(seen) == {before}


def in_a_worker(folder: Path) -> str:
    """Trains in a process of the caller's, and returns what comes of it."""
    try:
        return str(train.run(small(steps=300), folder=folder).agent_steps >= 300)
    except ProcessError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_of_a_pool_says_what_trains_there(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        refused = pool.apply(in_a_worker, (tmp_path / "one",))
        assert "take concurrent.futures.ProcessPoolExecutor, or train in one process (serial)" in refused
        assert not (tmp_path / "one").exists()
    with ProcessPoolExecutor(1, context) as executor:
        assert executor.submit(in_a_worker, tmp_path / "two").result() == "True"


def test_a_run_is_resumed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    train.run(small(serial=True, steps=300), folder=run)
    # A setting that only another release has is left out.
    with (run / "config.yaml").open("a") as settings:
        settings.write("far_sight: 3\n")
    assert train.run(small(serial=True, steps=600), folder=run, resume=True).agent_steps >= 600
    assert "far_sight" not in (run / "config.yaml").read_text()
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
    with pytest.raises(ConfigurationError, match=r"no preset 'go' in innet-drl [\d.]+: there are atari, atari-gpu, "):
        train.preset("go")
    with pytest.raises(ConfigurationError, match=r"no setting 'learning_rat' in .*: did you mean learning_rate"):
        train.preset("cartpole", learning_rat=1)
    with pytest.raises(ConfigurationError, match="gamma 'high': it must be a number"):
        train.preset("cartpole", gamma="high")


def test_an_own_environment_inherits_nothing_of_a_game() -> None:
    own = train.Config(environment="LunarLander-v3")
    game = train.preset("breakout")
    assert (own.clip_rewards, own.life_loss_ends, own.stack) == (False, False, 1)
    sizes = ("environments", "capacity", "min_size", "epsilon_anneal_steps", "chunk_steps", "publish_period")
    assert all(getattr(own, name) < getattr(game, name) for name in sizes)


class Corridor(gymnasium.Env[Any, Any]):
    """Walks along a few cells, and breaks when a picture is taken of the second step."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"]}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, length: int, lock: object = None, render_mode: str | None = None) -> None:
        self.observation_space = gymnasium.spaces.Box(0, length, (1,), np.float32)
        self.action_space = gymnasium.spaces.MultiDiscrete([2, 2])
        self.render_mode = render_mode
        self.length, self.cell = length, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.cell = 0
        return np.array([self.cell], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.cell += 1
        return np.array([self.cell], np.float32), float(sum(action)), self.cell == self.length, False, {}

    def render(self) -> Any:
        if self.cell > 1:
            raise RuntimeError("the lamp went out")
        return np.zeros((64, 64, 3), np.uint8)


def corridor(**changes: Any) -> train.Config:
    """A run in a corridor of five cells, of an environment that is given as it is."""
    return small(**{"environment": Corridor, "environment_args": {"length": 5}, **changes})


def test_a_class_reaches_actors_and_its_agent_acts(tmp_path: Path) -> None:
    result = train.run(corridor(steps=600, stack=2), folder=tmp_path / "run")
    assert result.learner_updates > 0
    agent = train.load(result.folder)
    assert agent.config.environment == f"{__name__}:Corridor"
    action = agent.act(np.zeros((2, 1), np.float32))
    assert action.shape == (2,)
    assert agent.act(np.zeros((7, 2, 1), np.float32)).shape == (7, 2)
    with pytest.raises(ValueError, match=r"is \(2,\) of them, or a batch, and this is one of \(3,\)"):
        agent.act(np.zeros((3, 1), np.float32))


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    config = corridor(environment_args={"length": 5, "lock": threading.Lock()})
    with pytest.raises(ConfigurationError, match=r"environment_args: it cannot be pickled .*serial=True"):
        train.run(config, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    result = train.run(dataclasses.replace(config, serial=True, steps=300), folder=tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None


def test_a_serial_run_of_a_function_is_resumed_with_it(tmp_path: Path) -> None:
    def make(num_envs: int) -> Any:
        return gymnasium.make_vec("CartPole-v1", num_envs)

    config = small(environment=make, serial=True, steps=300)
    train.run(config, folder=tmp_path / "run")
    resumed = train.run(dataclasses.replace(config, steps=400), folder=tmp_path / "run", resume=True)
    assert resumed.agent_steps >= 400


def test_a_video_that_fails_late_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = train.run(corridor(serial=True, steps=300, video=True), folder=tmp_path / "run")
    assert result.evaluation is not None
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning == f"no video: {__name__}:Corridor cannot be drawn: the lamp went out; video=False leaves it out"
    assert not (result.folder / "videos").exists()


def test_an_environment_without_pictures_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = train.run(
        small(environment="brought:Counter", serial=True, steps=300, video=True), folder=tmp_path / "run"
    )
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    reason = r"brought:Counter cannot be drawn: its render\(\) raises"
    assert re.fullmatch(rf"no video: {reason} \w+; video=False leaves it out", warning), warning
    assert not (result.folder / "videos").exists()
    assert main(["record", str(result.folder)]) == 1
    assert not (result.folder / "videos").exists()


def test_the_time_left_follows_from_steps_and_minutes(tmp_path: Path) -> None:
    shown: list[train.Metrics] = []

    class Capture(Display):
        def show(self, metrics: train.Metrics, note: str) -> None:
            shown.append(metrics)

    config = small(serial=True, steps=600)
    start.train(config, tmp_path / "steps", display=Capture)
    assert len(shown) > 2
    for metrics in shown:
        assert metrics["seconds_left"] == round(
            max(0.0, (600 - metrics["agent_steps"]) / metrics["agent_steps_per_s"]), 1
        )
    shown.clear()
    start.train(dataclasses.replace(config, minutes=1e-9), tmp_path / "minutes", display=Capture)
    assert [metrics["seconds_left"] for metrics in shown] == [0.0]
    shown.clear()
    endless = dataclasses.replace(config, steps=None)
    start.train(endless, tmp_path / "endless", display=Capture, callbacks=[Recorder(stop_at="metrics")])
    assert {metrics.get("seconds_left") for metrics in shown} == {None}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("own.yaml", "learning_rate: 1e-3\nlayers: [16, 8]\nseed: 5\n"),
        ("own.toml", "learning_rate = 1e-3\nlayers = [16, 8]\nseed = 5\n"),
    ],
)
def test_a_file_changes_the_preset_and_flags_change_the_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    given = ["--preset", "cartpole", "--config", str(tmp_path / name), "--seed", "9"]
    wanted = train.preset("cartpole", learning_rate=1e-3, layers=(16, 8), seed=9)
    assert parse_train(given).config == wanted
    RunFolder.new(tmp_path / "run").begin(wanted)
    resumed = ["--resume", str(tmp_path / "run"), "--config", str(tmp_path / name), "--steps", "7"]
    assert parse_train(resumed).config == dataclasses.replace(wanted, seed=5, steps=7)


def test_the_settings_of_a_run_are_a_file_of_settings(tmp_path: Path) -> None:
    own = corridor(gamma=0.9, learning_rate=1e-4)
    own.save(tmp_path / "config.yaml")
    flags = parse_train(["--config", str(tmp_path / "config.yaml")])
    assert flags.config == dataclasses.replace(own, environment=f"{__name__}:Corridor")
    # An environment of the file chooses the preset, as the flag does.
    assert flags.preset == "vector"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("learning-rat: 1", "own.yaml: there is no setting 'learning-rat' in .*: did you mean learning_rate"),
        ("steps: many", "own.yaml: steps 'many': it must be an integer"),
        ("environment_args: 3", "own.yaml: environment_args 3: it must be a mapping of names to values"),
    ],
)
def test_a_wrong_file_of_settings_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    (tmp_path / "own.yaml").write_text(text)
    assert main(["train", "--preset", "cartpole", "--config", str(tmp_path / "own.yaml")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(reason, line)
    assert main(["train", "--config", str(tmp_path / "missing.yaml")]) == 1
    assert "missing.yaml cannot be read: No such file" in capsys.readouterr().err
    assert main(["train", "--preset", "pong"]) == 1
    assert "there is no preset 'pong' in innet-drl" in capsys.readouterr().err


def test_the_best_agent_is_evaluated_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train.run(small(serial=True, steps=300), folder=tmp_path / "run")
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--best", "--games", "1"]) == 0
    (played,) = json.loads(capsys.readouterr().out)["runs"]
    assert played["checkpoint"] == str(tmp_path / "run" / "best.safetensors")
    assert played["learner_updates"] > 0


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
        "train.run(train.preset('cartpole', steps=2000, evaluation_games=1), folder='run')\n"
    )
    ended = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    *trace, message = ended.stderr.strip().splitlines()
    assert message.startswith(
        "innet_drl.train.errors.ActorError: actor 0 cannot play: a script that trains does so under"
    )
    assert len([line for line in trace if not line.strip().startswith("^")]) <= 5, ended.stderr
