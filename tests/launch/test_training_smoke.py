"""Training apart: actors in processes, the memory embedded or on a server, and what is left of it."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import pytest
from loguru import logger
from places import ROOT
from serving import until
from training import lines, small

import innet_drl as innet
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.launch.launcher import LocalLauncher
from innet_drl.signals import Interrupted
from innet_drl.train.memory import EmbeddedMemory, MemorySettings
from innet_drl.train.observe.metrics import METRICS, values_of
from innet_drl.train.play import evaluation, video
from innet_drl.train.play.evaluation import Evaluation
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs import evaluation_schedule
from innet_drl.train.runs.following import follow
from innet_drl.train.settings.config import Config

pytestmark = pytest.mark.slow


def test_a_program_that_trains_keeps_its_logs_and_signals(tmp_path: Path) -> None:
    """In a thread of its own, where no handler of a signal may be set."""
    told: list[str] = []
    sink = logger.add(told.append, format="{message}")
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as other:
        result = other.submit(start.train, small(serial=True, steps=300), tmp_path / "run").result()
    assert result.agent_steps >= 300
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    logger.info("still here")
    assert told == ["still here\n"]
    logger.remove(sink)


def test_an_environment_in_the_current_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Mine-v0', CartPoleEnv, max_episode_steps=200)\n"
    )
    command = [sys.executable, "-c", "import sys; from innet_drl.cli import main; sys.exit(main(sys.argv[1:]))"]
    flags = ["--environment", "mine:Mine-v0", "--steps", "400", "--min-size", "300", "--evaluation-games", "2"]
    done = subprocess.run(
        [*command, "train", *flags, "--environments", "4", "--batch-size", "32"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("mine-Mine-v0-")


def test_a_run_leaves_a_complete_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    config = small(actors=2, targets_ahead="on", layer_norm=True)
    result = start.train(config, run)
    assert result.learner_updates > 100
    assert result.evaluation is not None
    assert Config.load(run / "config.yaml") == config
    metrics = lines(run)
    last = metrics[-1]
    assert {name.partition("/")[0] for name in last} <= METRICS.keys()
    assert last["learner_updates"] == result.learner_updates
    assert last["agent_steps"] == result.agent_steps
    assert last["games"] > 0
    # A line without reports of actors, which the last one may be, has no lag.
    assert any("parameter_lag" in line for line in metrics)
    assert {"environment", "inference", "write"} <= {name for line in metrics for name in values_of(line, "actor_time")}
    assert list(run.glob("events.out.tfevents.*"))
    assert [path.suffix for path in (run / "checkpoints").iterdir()] == [".safetensors"]
    mean = result.evaluation.mean
    assert last == {**metrics[-2], "evaluation_mean": mean, "evaluation_best": mean}
    written = json.loads((run / "evaluation.json").read_text())
    assert written["scores"] == result.evaluation.scores
    assert (written["mean"], written["learner_updates"]) == (result.evaluation.mean, result.learner_updates)
    capsys.readouterr()
    assert main(["evaluate", str(run), "--games", "2"]) == 0
    assert '"mean"' in capsys.readouterr().out


def test_a_server_holds_the_memory_and_keeps_the_replay_ratio(tmp_path: Path) -> None:
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        config = small(replay=server.addresses[0], steps=2_000)
        result = start.train(config, tmp_path / "run")
        table = memory.stats()["tables"]["run"]
    assert result.learner_updates > 100
    assert table["sampled_items"] >= config.batch_size * result.learner_updates
    wanted = config.samples_per_insert * (table["inserted_items"] - config.min_size)
    # A push is applied as a whole once it may begin. An episode's end completes items of the push before.
    push = config.samples_per_insert * config.environments * (config.chunk_steps + config.n_step)
    assert abs(table["sampled_items"] - wanted) <= config.slack + push


def test_learner_and_actors_have_tokens_of_their_roles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, learner, actor = "token of the operator", "token of the learners", "token of the actors"
    with (
        innet.Memory() as memory,
        memory.serve(f"unix://{tmp_path}/replay", token=operator, learner_token=learner, actor_token=actor) as server,
    ):
        config = small(replay=server.addresses[0], steps=400)
        monkeypatch.setenv("INNET_TOKEN", learner)
        monkeypatch.setenv("INNET_ACTOR_TOKEN", "some other secret")
        with pytest.raises(innet.errors.AuthenticationError, match="another token"):
            start.train(config, tmp_path / "refused")
        monkeypatch.setenv("INNET_ACTOR_TOKEN", actor)
        assert start.train(config, tmp_path / "run").learner_updates > 0
        monkeypatch.setenv("INNET_TOKEN", actor)
        with pytest.raises(innet.errors.ForbiddenError, match="create_table"):
            start.train(config, tmp_path / "by-an-actor")


def test_a_memory_of_ones_own_has_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("INNET_TOKEN", "of some server")
    assert start.train(small(steps=400), tmp_path / "run").learner_updates > 0


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = start.train(small(steps=600), run)
    second = start.train(small(steps=first.agent_steps + 600), run, resume=True)
    assert second.agent_steps >= first.agent_steps + 600
    assert second.learner_updates > first.learner_updates
    assert second.seconds > first.seconds
    counts = [line["learner_updates"] for line in lines(run)]
    assert counts == sorted(counts)


def test_an_actor_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from innet_drl.launch.actors import Actors
    from innet_drl.launch.launcher import LocalLauncher

    killed: list[int] = []
    reports = Actors.reports

    def kill_once(self: Actors, agent_steps: int) -> object:
        if not killed:
            assert isinstance(self.launcher, LocalLauncher)
            process = self.launcher._processes["actor 0"]
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)
        return reports(self, agent_steps)

    monkeypatch.setattr(Actors, "reports", kill_once)
    result = start.train(small(), tmp_path / "run")
    assert killed
    assert result.learner_updates > 100


def test_ctrl_c_ends_with_a_checkpoint_and_a_summary(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--out", str(run)]
    command += ["--report-seconds", "0.1", "--evaluation-period", "0", "--steps", "10000000"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        for line in process.stdout:
            if "learning" in line:
                break
        # As a terminal does: to the learner and to its actors.
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.stdout.read(), process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "SIGINT" in output
    assert "everything is in" in output
    assert errors == ""
    checkpoint = RunFolder(run).latest_checkpoint()
    assert checkpoint.state["learner"]["updates"] > 0


def learning(run: Path, *flags: str) -> subprocess.Popen[str]:
    """A run that learns, in a session of its own, until a signal ends it."""
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--out", str(run), *flags]
    command += ["--report-seconds", "0.1", "--evaluation-period", "0", "--steps", "10000000"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if "learning" in line or "serial" in line:
            break
    return process


@pytest.mark.parametrize(
    ("number", "flags"),
    [(signal.SIGTERM, ()), (signal.SIGTERM, ("--serial",)), (signal.SIGHUP, ("--learners", "2"))],
    ids=["processes", "serial", "learners"],
)
def test_a_run_ends_by_the_signal_after_its_checkpoint(
    tmp_path: Path, number: signal.Signals, flags: tuple[str, ...]
) -> None:
    run = tmp_path / "run"
    # The tests themselves may run under nohup, whose children ignore SIGHUP.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        process = learning(run, *flags)
    finally:
        signal.signal(number, before)
    with process:
        # As a terminal or a supervisor does: to the learner and to its actors.
        os.killpg(process.pid, number)
        output, _ = process.communicate()
    assert process.returncode == -number, output
    assert f"{number.name}: ending with a checkpoint" in output
    assert RunFolder(run).latest_checkpoint()
    assert json.loads((run / "sessions.jsonl").read_text().splitlines()[-1])["how"] == "interrupted"


def test_a_lost_terminal_ends_a_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--out", str(run)]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        os.execv(command[0], [*command, "--report-seconds", "0.1", "--evaluation-period", "0"])
    try:
        shown = b""
        while b"learning" not in shown:
            shown = shown[-4096:] + os.read(terminal, 4096)
    finally:
        os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGHUP
    assert RunFolder(run).latest_checkpoint().state["learner"]["updates"] > 0


def test_nohup_outlives_the_terminal(tmp_path: Path) -> None:
    run = tmp_path / "run"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        process = learning(run, "--serial")
    finally:
        signal.signal(signal.SIGHUP, before)
    with process:
        process.send_signal(signal.SIGHUP)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate()
    assert process.returncode == -signal.SIGTERM
    assert "SIGHUP" not in output


def test_a_loop_of_a_shell_ends_at_ctrl_c(tmp_path: Path) -> None:
    flags = "--preset cartpole --serial --report-seconds 0.1 --evaluation-period 0 --steps 10000000"
    loop = f"for seed in 1 2; do {sys.executable} -m innet_drl train {flags} --seed $seed --out $seed; done"
    with subprocess.Popen(
        ["bash", "-c", loop], cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as shell:
        assert shell.stdout is not None
        for line in shell.stdout:
            if "serial" in line:
                break
        os.killpg(shell.pid, signal.SIGINT)
        shell.communicate()
    assert shell.returncode == -signal.SIGINT
    assert [path.name for path in tmp_path.iterdir()] == ["1"]


def test_ctrl_c_in_the_last_evaluation_skips_it_and_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = evaluation.evaluate

    def interrupt(*arguments: Any, **options: Any) -> Evaluation | None:
        signal.raise_signal(signal.SIGINT)
        return evaluate(*arguments, **options)

    def no_video(*arguments: Any, **options: Any) -> float:
        raise AssertionError("a video was begun")

    monkeypatch.setattr(evaluation_schedule, "evaluate", interrupt)
    monkeypatch.setattr(video, "record", no_video)
    run = tmp_path / "run"
    with pytest.raises(Interrupted, match="SIGINT"):
        start.train(small(serial=True, steps=300, video=True), run, signals=True)
    assert not (tmp_path / "run" / "evaluation.json").exists()
    # The run has reached its end: a follower evaluates its agent, and ends, too.
    monkeypatch.setattr(evaluation_schedule, "evaluate", evaluate)
    assert [report.agents[0].agent_steps for report in follow([run])] == [lines(run)[-1]["agent_steps"]]
    assert RunFolder(tmp_path / "run").latest_checkpoint()


def test_the_summary_tells_the_time_of_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = evaluation_schedule.EvaluationSchedule.evaluate

    def evaluate_for_an_hour(self: evaluation_schedule.EvaluationSchedule) -> Evaluation | None:
        self._session.meter._started -= 3600
        return evaluate(self)

    monkeypatch.setattr(evaluation_schedule.EvaluationSchedule, "evaluate", evaluate_for_an_hour)
    result = start.train(small(serial=True, steps=300), tmp_path / "run")
    assert result.evaluation is not None
    assert result.seconds < 3600
    assert lines(tmp_path / "run")[-1]["time_s"] < 3600


def children_of(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def test_actors_end_with_a_learner_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "innet_drl", "train", "--preset", "cartpole", "--actors", "2"]
    command += ["--report-seconds", "0.1", "--evaluation-period", "0", "--steps", "10000000"]
    command += ["--out", str(tmp_path / "run")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as learner:
        try:
            assert learner.stdout is not None
            assert any("learning" in line for line in learner.stdout)
            # Actors are children of the process that they are forked from, which is a child of the learner.
            actors = [actor for child in children_of(learner.pid) for actor in children_of(child)]
            assert len(actors) == 2
            learner.kill()
            # The actors have the same standard output: it ends when the last of them has ended.
            learner.communicate(timeout=60)
            until(lambda: not any(is_running(actor) for actor in actors))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(learner.pid, signal.SIGKILL)


@pytest.mark.timeout(300)
def test_the_example_leaves_a_run_that_can_be_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    example = ROOT / "examples" / "breakout_apex.py"
    flags = "--steps 600 --minutes 2 --environments 4 --min-size 128 --capacity 2000 --chunk-steps 10"
    flags += " --channels 4 4 4 --hidden 8 --batch-size 16 --samples-per-insert 1 --device cpu --numerics float32"
    flags += " --layout contiguous --evaluation-games 1 --evaluation-frames 200 --video"
    command = [sys.executable, str(example), *flags.split(), "--out", str(run)]
    subprocess.run(command, check=True, timeout=240, stdout=subprocess.DEVNULL)
    assert Config.load(run / "config.yaml").environment == "atari/breakout"
    assert lines(run)[-1]["learner_updates"] > 0
    assert lines(run)[-1]["evaluation_mean"] >= 0
    for pattern in ("events.out.tfevents.*", "checkpoints/*.safetensors", "videos/*.mp4"):
        (path,) = run.glob(pattern)
        assert path.stat().st_size > 0
    assert main(["evaluate", str(run), "--games", "1"]) == 0
    assert json.loads(capsys.readouterr().out)["games"] == 1
    assert main(["record", str(run), "--seconds", "1", "--to", str(tmp_path / "game.mp4")]) == 0
    frames = imageio_ffmpeg.read_frames(str(tmp_path / "game.mp4"))
    assert next(frames)["size"] == (480, 630)
    frames.close()


def test_a_memory_that_other_hosts_reach_wants_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As launchers with other hosts need it: actors and a second learner have the token, and others not."""
    addresses: list[str] = []
    create = EmbeddedMemory.create.__func__  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def created(cls: type[EmbeddedMemory], settings: MemorySettings) -> Iterator[EmbeddedMemory]:
        with create(cls, settings) as memory:
            addresses.append(memory.address)
            elsewhere = small(replay=memory.address)
            with pytest.raises(innet.errors.AuthenticationError):
                memory.check(elsewhere, "")
            memory.check(elsewhere, settings.token)
            yield memory

    monkeypatch.setattr(LocalLauncher, "listen", "innet://127.0.0.1:0")
    monkeypatch.setattr(EmbeddedMemory, "create", classmethod(created))
    result = start.train(small(learners=2, steps=600), tmp_path / "run")
    assert result.learner_updates > 0
    assert addresses[0].startswith("innet://127.0.0.1:")
