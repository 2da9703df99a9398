"""What a process needs to join a run: the published settings, and the reports of actors; and why it may not join."""

from __future__ import annotations

import dataclasses
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from serving import Server, served_memories
from training import small

import innet_drl as innet
from innet_drl.cli import main
from innet_drl.launch.joining import Joining, _await_run, _RunEnded, join
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.flags import parse_learner
from innet_drl.train.observe.metrics import ActorReport, Game
from innet_drl.train.play.evaluation import Evaluation
from innet_drl.train.published_run import (
    REPORT_BYTES,
    REPORTS,
    ROW,
    ReportWriter,
    RunPublisher,
    published_runs,
    reports_table,
)
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs.evaluation_schedule import EvaluatedAgent, save_if_best
from innet_drl.train.runs.following import follow
from innet_drl.train.settings.config import Config

pytestmark = pytest.mark.slow

ACTOR = np.array([1], np.int32)


@pytest.fixture(params=[1])
def address(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of one server, or of as many as the test's parameter asks for."""
    with served_memories(tmp_path, request.param) as addresses:
        yield addresses


ONE_AND_SEVERAL_SERVERS = pytest.mark.parametrize("address", [1, 3], indirect=True)


def publish(address: str, name: str, *, ended: bool = False, **changes: Any) -> None:
    with RunPublisher.connect(name, small(replay=address, **changes), "") as run:
        run.publish(0, ended=ended)


@ONE_AND_SEVERAL_SERVERS
def test_the_settings_of_a_run_reach_processes_that_join(address: str) -> None:
    config = small(
        replay=address, actors=5, environment="brought:make", environment_args={"size": 3, "name": "x"}, layers=(7, 8)
    )
    with RunPublisher.connect("run", config, "") as run, innet.connect(address) as replay:
        run.publish(12)
        (published,) = published_runs(replay).values()
        assert published.agent_steps == 12
        assert published.config() == config
        joined = Joining(address, 4, changes={"actor_threads": 2}).config(published, "run")
        assert joined == dataclasses.replace(config, actor_threads=2)
        # The learner's certificate is a file of its own host.
        other = Joining(address, 0, replay_ca=Path("here.pem")).config(published, "run")
        assert other.replay_ca == Path("here.pem")


@ONE_AND_SEVERAL_SERVERS
def test_reports_arrive_whole_and_once(address: str) -> None:
    games = [Game(number % 8, 0.1 * number - 1e6, number, {"name": "x" * (number % 500)}) for number in range(1000)]
    seconds = {"inference": 0.25, "environment": 0.125}
    means = {"epsilon": 0.5, "parameter_lag": 1e-30}
    reports = [ActorReport(1, 250, games, 77, seconds, means), ActorReport(0, 8, [], 0, {})]
    with RunPublisher.connect("run", small(replay=address), "") as run, innet.connect(address) as replay:
        assert run.reports() == []
        for report in reports:
            ReportWriter(replay, "run", report.actor).write(report, None)
        received = run.reports()
        assert run.reports() == []
    # Servers have no common order.
    assert sorted(received, key=lambda report: report.actor) == sorted(reports, key=lambda report: report.actor)


def test_a_report_that_was_cut_is_left_out(address: str, caplog: pytest.LogCaptureFixture) -> None:
    """Its actor died between two rows, and a later one has its number."""
    begun = np.full((1, REPORT_BYTES), ord(" "), np.uint8)
    with RunPublisher.connect("run", small(replay=address), "") as run, innet.connect(address) as replay:
        with replay.writer("run" + REPORTS, 1, ROW, chunk_steps=1) as writer:
            writer.append(report=begun, actor=ACTOR, first=[True], terminated=[False], truncated=[False])
        assert run.reports() == []
        ReportWriter(replay, "run", 1).write(ActorReport(1, 2, [], 0, {}), None)
        assert [report.steps for report in run.reports()] == [2]
        with replay.writer("run" + REPORTS, 1, ROW, chunk_steps=1) as writer:
            writer.append(report=begun, actor=ACTOR, first=[False], terminated=[True], truncated=[False])
        assert run.reports() == []
    assert caplog.text.count("cannot be read") == 1


def test_reports_to_a_server_that_was_away_arrive_once(tmp_path: Path) -> None:
    with Server(f"unix://{tmp_path}/s") as server, ExitStack() as stack:
        run = stack.enter_context(RunPublisher.connect("run", small(replay=server.address), ""))
        replay = stack.enter_context(innet.connect(server.address, grace=0.05))
        writer = ReportWriter(replay, "run", 0)
        games = [Game(0, 1.0, 1)] * 100

        def write(steps: int, timeout: float | None) -> None:
            writer.write(ActorReport(0, steps, games, 0, {}), timeout)

        write(1, None)
        server.send(signal.SIGSTOP)
        for steps in (2, 4):
            with pytest.raises(innet.errors.DeadlineError):
                write(steps, 0.05)
        server.send(signal.SIGCONT)
        write(8, None)
        received = run.reports()
    assert [report.steps for report in received if report.steps] == [1, 2, 4, 8]
    assert sum(len(report.games) for report in received) == 400


@ONE_AND_SEVERAL_SERVERS
def test_reports_of_an_actor_arrive_in_order(address: str) -> None:
    """The newest one has its present parameters, and the last games count."""
    actors, written = range(4), 500
    with RunPublisher.connect("run", small(replay=address), "") as run, innet.connect(address) as replay:
        writers = [ReportWriter(replay, "run", actor) for actor in actors]
        # Later ones take the places of earlier ones in the table.
        for _ in range(3):
            for updates in range(written):
                for actor in actors:
                    writers[actor].write(ActorReport(actor, 1, [], updates, {}), None)
            received = run.reports()
            for actor in actors:
                order = [report.parameter_updates for report in received if report.actor == actor]
                assert order == list(range(written))


def test_a_report_that_cannot_be_read_is_left_out(address: str, caplog: pytest.LogCaptureFixture) -> None:
    with RunPublisher.connect("run", small(replay=address), "") as run, innet.connect(address) as replay:
        with replay.writer("run" + REPORTS, 1, ROW, chunk_steps=1) as writer:
            for text in (b"nonsense", b"[1]", b'{"games": [[1]]}', b'{"games": [], "actor": 1}'):
                row = np.frombuffer(text.ljust(reports_table("run").columns["report"].shape[0] or 0), np.uint8)[None]
                writer.append(report=row, actor=ACTOR, terminated=[True], truncated=[False])
        assert run.reports() == []
    assert caplog.text.count("cannot be read") == 4


def test_a_run_of_another_release_is_named(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innet, "__version__", "9.9.9")
    publish(address, "run")
    monkeypatch.undo()
    with innet.connect(address) as replay:
        # Of a user's own.
        replay.put_parameters("mine/run", {"w": np.zeros(1)})
    with pytest.raises(ConfigurationError, match=rf"has innet-drl 9\.9\.9, and this host has {innet.__version__}"):
        join(Joining(address, 0))


def test_an_index_beyond_the_actors_of_the_run(address: str) -> None:
    publish(address, "run", actors=4)
    with pytest.raises(ConfigurationError, match=r"index 4: run run has 4 actors, 0 to 3"):
        join(Joining(address, 4))


def test_of_several_runs_one_has_to_be_named(address: str) -> None:
    publish(address, "done", ended=True)
    publish(address, "a")
    publish(address, "b")
    with pytest.raises(ConfigurationError, match=r"has several runs, a, b: name the actor's by --run"):
        join(Joining(address, 0))
    with pytest.raises(ConfigurationError, match="index 9: run b"):
        join(Joining(address, 9, run="b"))


def test_an_actor_that_joins_again_joins_its_own_run(address: str) -> None:
    publish(address, "a")
    publish(address, "b")
    with innet.connect(address) as replay:
        assert _await_run(replay, Joining(address, 0), "a")[0] == "a"
        publish(address, "a", ended=True)
        with pytest.raises(_RunEnded):
            _await_run(replay, Joining(address, 0), "a")


def test_an_actor_of_a_run_that_has_ended_ends(address: str, caplog: pytest.LogCaptureFixture) -> None:
    publish(address, "done", ended=True)
    publish(address, "other")
    with caplog.at_level("INFO"):
        join(Joining(address, 0, run="done"))
    assert "run done has ended" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["actor", "--replay", "embedded", "--index", "0"],
            "replay embedded: processes join a run through its server",
        ),
        (["actor", "--replay", "redis://x", "--index", "0"], "processes join a run through its server"),
        (["actor", "--replay", "unix:///x", "--index", "-1"], "--index -1: it must be at least 0"),
        (["actor", "--replay", "innets://x:1", "--index", "0", "--replay-ca", "no.pem"], "replay_ca no.pem"),
        (["learner", "--preset", "cartpole", "--out", "run"], "replay embedded: processes join a run"),
        (["evaluate", "--follow", "a", "b"], "--follow evaluates the new checkpoints of one run"),
        (["evaluate", "--follow", "--best", "a"], "--follow evaluates the new checkpoints of one run"),
    ],
)
def test_wrong_flags(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    # Signals are the test's.
    monkeypatch.setattr("innet_drl.launch.joining._end_on_signals", lambda: None)
    assert main(arguments) == 1
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_token_that_the_server_refuses_ends_the_actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "token of the learners"
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/replay", token=token) as server:
        with pytest.raises(innet.errors.AuthenticationError):
            join(Joining(server.addresses[0], 0, token="another token than this"))


def test_a_learner_that_comes_back_has_the_settings_of_its_folder(tmp_path: Path) -> None:
    command = ["--replay=unix:///x", "--preset=cartpole", f"--out={tmp_path / 'run'}"]
    RunFolder.new(tmp_path / "run").begin(small(learning_rate=0.25))
    found: Config = parse_learner(command).config
    assert (found.learning_rate, found.hidden, found.replay) == (0.25, 32, "unix:///x")
    assert parse_learner([*command, "--learning-rate=0.5"]).config.learning_rate == 0.5
    # The errors of training advise to resume.
    assert parse_learner(["--replay=unix:///x", "--resume", str(tmp_path / "run")]).config.learning_rate == 0.25


def test_the_best_agent_of_learner_and_follower_is_kept(tmp_path: Path) -> None:
    folder = RunFolder.new(tmp_path / "run")
    folder.begin(small())

    def evaluated(mean: float) -> float:
        evaluation = Evaluation([mean], epsilon=0.0, episode_frames=None, cut_off=0, no_ops=0)
        return save_if_best(folder, EvaluatedAgent({}, int(mean), 0), evaluation)

    assert [evaluated(mean) for mean in (-3.0, 7.0, 5.0)] == [-3.0, 7.0, 7.0]
    assert folder.best_agent().state["agent_steps"] == 7


def test_a_follower_takes_one_run() -> None:
    with pytest.raises(ConfigurationError, match="one run"):
        next(follow([]))
