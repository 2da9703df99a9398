"""Training apart: actors in processes, the memory embedded or on a server, and what is left of it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import innet_drl as innet
from innet_drl import launch
from innet_drl.cli import main
from innet_drl.config import Config
from innet_drl.folder import RunFolder
from innet_drl.metrics import Metrics
from training import lines, small


def test_a_run_leaves_a_complete_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    config = small(actors=2, targets_ahead="on", layer_norm=True)
    result = launch.train(config, run)
    assert result.learner_updates > 100
    assert result.evaluation is not None
    assert Config.load(run / "config.yaml") == config
    last = lines(run)[-1]
    assert last.keys() == Metrics.__dataclass_fields__.keys()
    assert last["learner_updates"] == result.learner_updates
    assert last["agent_steps"] == result.agent_steps
    assert last["games"] > 0
    assert last["parameter_lag"] is not None
    assert {"environment", "inference", "write"} <= set(last["actor_time"]) | set(lines(run)[-2]["actor_time"])
    assert list(run.glob("events.out.tfevents.*"))
    assert [path.suffix for path in (run / "checkpoints").iterdir()] == [".safetensors"]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--games", "2"]) == 0
    assert '"mean"' in capsys.readouterr().out


def test_a_server_holds_the_memory_and_keeps_the_replay_ratio(tmp_path: Path) -> None:
    with innet.Replay() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        config = small(replay=server.addresses[0], steps=2_000)
        result = launch.train(config, tmp_path / "run")
        table = memory.stats()["tables"]["run"]
    assert result.learner_updates > 100
    assert table["sampled_items"] >= config.batch_size * result.learner_updates
    wanted = config.samples_per_insert * (table["inserted_items"] - config.min_size)
    # A push is applied as a whole once it may begin.
    push = config.samples_per_insert * config.environments * config.chunk_steps
    assert abs(table["sampled_items"] - wanted) <= config.slack + push


def test_a_run_goes_on_where_it_ended(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = launch.train(small(steps=600), run)
    second = launch.train(small(steps=1_200), run, resume=True)
    assert second.agent_steps >= 1_200 > first.agent_steps
    assert second.learner_updates > first.learner_updates
    assert second.seconds > first.seconds
    counts = [line["learner_updates"] for line in lines(run)]
    assert counts == sorted(counts)


def test_an_actor_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from innet_drl.processes import Actors

    killed: list[int] = []
    reports = Actors.reports

    def kill_once(self: Actors) -> object:
        if not killed:
            process = self._processes[0]
            os.kill(process.pid, signal.SIGKILL)
            killed.append(process.pid)
        return reports(self)

    monkeypatch.setattr(Actors, "reports", kill_once)
    result = launch.train(small(), tmp_path / "run")
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
    assert process.returncode == 0
    assert "SIGINT" in output
    assert "everything is in" in output
    assert errors == ""
    checkpoint = RunFolder(run).latest_checkpoint()
    assert checkpoint.state["learner"]["updates"] > 0


def test_importing_the_package_does_not_import_torch() -> None:
    code = "import sys, innet_drl; sys.exit(any(name in sys.modules for name in ('torch', 'gymnasium', 'tyro')))"
    subprocess.run([sys.executable, "-c", code], check=True)
