"""What a user can get wrong: one clear error each, a non-zero exit status, and nothing left running."""

import dataclasses
import functools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from training import fail_and_stay, fail_to_begin, lines, running_actors, small

import innet_drl as innet
from innet_drl import train
from innet_drl.cli import main
from innet_drl.launch import actors, launcher, start
from innet_drl.launch.launcher import LocalLauncher
from innet_drl.launch.playing import ActorAssignment
from innet_drl.signals import END_SIGNALS
from innet_drl.train.errors import (
    ActorError,
    ConfigurationError,
    DivergedError,
    RunFolderError,
    UnavailableEnvironmentError,
)
from innet_drl.train.memory import ReplayMemory
from innet_drl.train.observe.metrics import Metrics
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs import trainer
from innet_drl.train.runs.reporting import MetricsFiles, Reporter

TINY = ["--preset", "cartpole", "--serial", "--steps", "400", "--min-size", "300", "--evaluation-games", "2"]


def error_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The message of a command that fails."""
    assert main(arguments) == 1
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_a_missing_game(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = error_of(["train", "--environment", "atari/breakot", "--out", str(tmp_path / "run")], capsys)
    assert message == "error: there is no Atari game 'breakot': did you mean breakout?"


def test_a_missing_rom(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALE_ROMS_DIR", str(tmp_path))
    message = error_of(["train", "--out", str(tmp_path / "run")], capsys)
    assert "the ROM of 'breakout' cannot be used" in message
    assert "ALE_ROMS_DIR" in message


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections are tried for .1 s instead of 10."""
    monkeypatch.setattr(innet, "connect", functools.partial(innet.connect, timeout=0.1))


@pytest.mark.usefixtures("impatient")
def test_a_server_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = f"unix://{tmp_path}/absent"
    flags = ["train", "--preset", "cartpole", "--replay", address, "--out", str(tmp_path / "run")]
    assert address in error_of(flags, capsys)


def test_a_server_that_holds_another_run_of_this_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        config = small(replay=server.addresses[0], steps=400)
        first = start.train(config, tmp_path / "one" / "run")
        steps = memory.stats()["tables"]["run"]["steps"]
        with pytest.raises(ConfigurationError, match=r"memory of another run named 'run'.*another folder"):
            start.train(config, tmp_path / "other" / "run")
        assert memory.stats()["tables"]["run"]["steps"] == steps
        more = dataclasses.replace(config, steps=first.agent_steps + 100)
        start.train(more, tmp_path / "one" / "run", resume=True)
    assert not (tmp_path / "other" / "run").exists()


def test_cuda_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = error_of(["train", *TINY, "--device", "cuda", "--out", str(tmp_path / "run")], capsys)
    assert "take device cpu" in message
    assert "torch with CUDA" in message


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    "wrong", [["--environment", "atari/breakot"], ["--replay", "unix:///nowhere/replay", "--no-serial"]]
)
def test_a_start_that_fails_leaves_its_folder_free(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]
) -> None:
    run = tmp_path / "run"
    error_of(["train", *TINY, *wrong, "--out", str(run)], capsys)
    assert not run.exists()
    assert main(["train", *TINY, "--out", str(run)]) == 0


def test_resuming_with_another_network_names_the_flag_and_harms_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    more = ["train", "--resume", str(run), "--steps", "500"]
    message = error_of([*more, "--hidden", "64", "--layer-norm"], capsys)
    assert "of another network: keep hidden and layer_norm as in its config.yaml" in message
    wrong = dataclasses.replace(RunFolder(run).config(), hidden=64, steps=500)
    with pytest.raises(ConfigurationError, match="keep hidden as in its config") as raised:
        train.run(wrong, folder=run, resume=True)
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    assert main(more) == 0


def test_a_run_that_has_its_steps_is_told_to_take_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    message = error_of(["train", "--resume", str(run)], capsys)
    assert "has taken its 400 steps" in message
    assert f"--resume {run} --steps N" in message
    advice = re.escape(f"--resume {run} --steps N (in Python resume=True)")
    config = RunFolder(run).config()
    with pytest.raises(ConfigurationError, match=advice):
        train.run(config, folder=run, resume=True)
    assert train.run(dataclasses.replace(config, steps=500), folder=run, resume=True).agent_steps >= 500


def test_a_full_disk_for_the_metrics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Writing to /dev/full fails as writing to a full disk does."""
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    message = error_of(["train", "--resume", str(run), "--steps", "2000"], capsys)
    assert "the disk is full" in message
    assert f"--resume {run}" in message


def test_a_full_disk_while_actors_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert main(["train", *TINY, "--out", str(run)]) == 0
    capsys.readouterr()
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").symlink_to("/dev/full")
    message = error_of(["train", "--resume", str(run), "--no-serial", "--steps", "2000"], capsys)
    assert "the disk is full" in message


def test_a_full_disk_for_a_checkpoint_keeps_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    start.train(small(serial=True, steps=300), run)
    before = RunFolder(run).latest_checkpoint()

    def no_space(file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(RunFolderError, match="the disk is full"):
        start.train(small(serial=True, steps=600), run, resume=True)
    assert RunFolder(run).latest_checkpoint().path == before.path
    assert not list(run.glob("checkpoints/*.partial"))


def test_a_full_disk_on_the_way_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full for the first two checkpoints and a line of metrics; both are written later."""
    run = tmp_path / "run"
    save, write = RunFolder.save_checkpoint, MetricsFiles.write
    refused = {"checkpoint": 2, "line": 2}

    def refuse(what: str) -> None:
        if refused[what]:
            refused[what] -= 1
            raise OSError(28, "No space left on device")

    def save_later(self: RunFolder, *arguments: Any) -> None:
        with self.writing():
            refuse("checkpoint")
        save(self, *arguments)

    def write_later(self: MetricsFiles, line: Metrics) -> None:
        refuse("line")
        write(self, line)

    monkeypatch.setattr(trainer, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(RunFolder, "save_checkpoint", save_later)
    monkeypatch.setattr(MetricsFiles, "write", write_later)
    start.train(small(serial=True, steps=800, checkpoint_minutes=1e-6), run)
    assert refused == {"checkpoint": 0, "line": 0}
    assert RunFolder(run).newest_checkpoint() is not None
    assert [line["agent_steps"] // 200 for line in lines(run)] == [1, 2, 3, 4, 4]
    told = [record.getMessage() for record in caplog.records]
    assert len([line for line in told if "the checkpoint is not complete" in line and "the disk is full" in line]) == 2
    assert len([line for line in told if "pending until they can be written" in line]) == 1
    assert not any("--resume" in line or "start again" in line for line in told if "the disk is full" in line)
    monkeypatch.undo()
    assert start.train(small(serial=True), run, resume=True).agent_steps >= 1_000


def test_a_folder_is_trained_in_by_one_process_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start.train(small(serial=True, steps=300), run)
    with RunFolder.open(run).hold(), pytest.raises(RunFolderError, match=r"another process trains in .*folder"):
        start.train(small(serial=True, steps=600), run, resume=True)
    start.train(small(serial=True, steps=600), run, resume=True)


def test_the_loser_of_a_folder_leaves_it_to_the_winner(tmp_path: Path) -> None:
    made = RunFolder.unused(tmp_path / "run")
    with RunFolder.new(tmp_path / "run").hold():
        with pytest.raises(RunFolderError, match="another process trains"), made.hold():
            pass
        assert (tmp_path / "run").is_dir()


def test_a_file_in_place_of_the_folder_of_runs_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(RunFolderError, match=r"the run's folder .*runs"):
        RunFolder.unused(tmp_path / "runs" / "cartpole-1")


def test_a_certificate_is_looked_for_when_training_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A moved certificate does not keep a run from being evaluated, or resumed with the new one."""
    missing = tmp_path / "moved.pem"
    assert "there is no such file" in error_of(["train", *TINY, "--replay-ca", str(missing)], capsys)
    run = RunFolder.new(tmp_path / "run")
    run.begin(small(replay_ca=missing))
    assert run.config().replay_ca == missing


def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    first = RunFolder.unused(tmp_path / "runs" / "cartpole-1")
    second = RunFolder.unused(tmp_path / "runs" / "cartpole-1")
    assert (first.name, second.name) == ("cartpole-1", "cartpole-1-2")
    with second.hold():
        second.begin(small())
    with first.hold():
        pass
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["cartpole-1-2"]


def test_a_start_that_fails_leaves_no_folder_but_the_users_own(tmp_path: Path) -> None:
    wrong = small(environment="NoSuchGame-v0")
    (tmp_path / "mine").mkdir()
    for out in (tmp_path / "mine", tmp_path / "new" / "run"):
        with pytest.raises(UnavailableEnvironmentError):
            start.train(wrong, out)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_an_actor_whose_environment_cannot_be_made_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replacement would say the same once more."""
    monkeypatch.setattr(actors, "run_actor", fail_to_begin)
    started_here = LocalLauncher()
    with running_actors(small(actor_restarts=3), started_here) as running:
        wait(list(started_here._pipes))
        with pytest.raises(ActorError, match="no licence"):
            running.reports(0)


def test_an_actor_that_the_memory_refuses_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    started_here = LocalLauncher()
    with running_actors(small(actor_restarts=3), started_here, "ftp://nowhere") as running:
        wait(list(started_here._pipes))
        with pytest.raises(ActorError, match=r"actor 0 cannot play: .*ftp"):
            running.reports(0)
        assert not started_here._pipes
    assert not caplog.records


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    message = error_of(["train", *TINY, "--out", str(tmp_path / "file" / "run")], capsys)
    assert "the run's folder" in message


@pytest.mark.parametrize(("launcher", "message"), [("ray", "ray is not installed: pip install 'innet-drl[ray]'")])
def test_a_launcher_without_its_package(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    launcher: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, launcher, None)
    monkeypatch.delitem(sys.modules, f"innet_drl.launch.{launcher}", raising=False)
    monkeypatch.delattr(f"innet_drl.launch.{launcher}", raising=False)
    found = error_of(["train", *TINY, "--no-serial", f"--launcher={launcher}", "--out", str(tmp_path / "run")], capsys)
    assert found.strip().removeprefix("error: ") == message
    assert not list(tmp_path.iterdir())


def test_an_unknown_launcher_in_python(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="launcher x: it must be local, ray, or your own"):
        train.run(small(), folder=tmp_path / "run", launcher="x")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.new(tmp_path / "run").begin(small())
    message = error_of(["train", *TINY, "--out", str(tmp_path / "run")], capsys)
    assert f"--resume {tmp_path / 'run'}" in message


def test_a_run_without_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    RunFolder.new(tmp_path / "run").begin(small())
    assert "no checkpoint" in error_of(["train", "--resume", str(tmp_path / "run")], capsys)
    assert "no checkpoint" in error_of(["evaluate", str(tmp_path / "run")], capsys)


@pytest.mark.slow
def test_actors_that_keep_dying_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The actors get an address at which no process listens."""
    original = actors.Actors.__init__

    def elsewhere(
        self: actors.Actors, config: object, run: Any, first_step: int, launcher: Any, address: str, *others: Any
    ) -> None:
        original(self, small(actor_restarts=1), run, first_step, launcher, f"unix://{tmp_path}/absent", *others)

    monkeypatch.setattr(actors.Actors, "__init__", elsewhere)
    with pytest.raises(ActorError, match="no restart is left"):
        start.train(small(), tmp_path / "run")
    # Nothing was learned, and so nothing is left.
    assert not (tmp_path / "run").exists()


def test_a_server_that_goes_away_ends_the_run_with_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        report = Reporter.report

        def report_and_close(self: Reporter, memory: ReplayMemory) -> None:
            report(self, memory)
            if self._learner.updates > 0:
                server.close()

        monkeypatch.setattr(Reporter, "report", report_and_close)
        with pytest.raises((innet.ReplayError, ActorError)):
            start.train(small(replay=server.addresses[0], actor_restarts=0, steps=100_000), run)
    assert RunFolder(run).latest_checkpoint().state["learner"]["updates"] > 0
    monkeypatch.undo()
    checkpoint = RunFolder(run).latest_checkpoint()
    resumed = start.train(small(steps=checkpoint.state["meter"]["agent_steps"] + 300), run, resume=True)
    assert resumed.learner_updates > checkpoint.state["learner"]["updates"]


def test_a_failed_actor_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "run_actor", fail_and_stay)
    monkeypatch.setattr(LocalLauncher, "stop_seconds", 0.01)
    started_here = LocalLauncher()
    with running_actors(small(actor_restarts=0), started_here) as running:
        wait(list(started_here._pipes))
        with pytest.raises(ActorError, match="no restart is left: broken"):
            running.reports(0)
        assert not multiprocessing.active_children()


@pytest.mark.parametrize("serial", [True, False])
def test_a_run_that_diverges_ends_at_its_last_good_checkpoint(tmp_path: Path, serial: bool) -> None:
    run = tmp_path / "run"
    start.train(small(serial=True, steps=300), run)
    before = RunFolder(run).latest_checkpoint().path
    with pytest.raises(DivergedError, match=r"diverged by update .*learning_rate") as raised:
        start.train(small(serial=serial, steps=2_000, learning_rate=1e30), run, resume=True)
    assert str(before) in str(raised.value)
    assert RunFolder(run).latest_checkpoint().path == before


def test_a_server_that_holds_the_memory_of_other_settings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay") as server:
        config = small(replay=server.addresses[0], steps=300)
        start.train(config, run)
        more = dataclasses.replace(config, steps=1_000_000, batch_size=16)
        with pytest.raises(
            ConfigurationError, match=r"keep batch_size as in the run's config.yaml, or drop .*drop_table\('run'\)"
        ):
            start.train(more, run, resume=True)


def test_a_replaced_actor_explores_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "run_actor", fail_and_stay)
    monkeypatch.setattr(LocalLauncher, "stop_seconds", 0.01)
    started: list[int] = []
    start = actors.Actors._start

    def note(self: actors.Actors, assignment: ActorAssignment) -> None:
        started.append(assignment.first_step)
        start(self, assignment)

    monkeypatch.setattr(actors.Actors, "_start", note)
    started_here = LocalLauncher()
    with running_actors(small(), started_here, first_step=5) as running:
        wait(list(started_here._pipes))
        running.reports(700)
    assert started == [5, 700]


def test_a_signal_to_the_group_leaves_the_process_that_actors_are_forked_from() -> None:
    """Whatever it is importing: it is not ended by what ends the run, but by the end of the run."""
    launcher.start_fork_server()
    pid = launcher._server._forkserver_pid  # type: ignore[attr-defined]
    blocked = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigBlk"))
    mask = int(blocked.split()[1], 16)
    assert all(mask >> (number - 1) & 1 for number in END_SIGNALS)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(END_SIGNALS)


def test_a_fork_server_that_cannot_start_is_an_error_of_no_actor(tmp_path: Path) -> None:
    """Learners and benchmarks start processes, too."""
    directory = tmp_path / ("x" * 120)
    directory.mkdir()
    program = "from innet_drl.launch.launcher import start_fork_server; start_fork_server()"
    environment = {**os.environ, "TMPDIR": str(directory)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("innet_drl.train.errors.ProcessError")
    assert "set TMPDIR to a shorter one" in last
