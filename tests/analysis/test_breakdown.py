"""The time of each process of a run: shares that sum to 1, and nothing left out."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Command
from serving import Server, until
from training import BothHavePlayed, lines, newest, small

from innet_drl.analysis.breakdown import KINDS, START, read, together
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train.callbacks import Result
from innet_drl.train.observe.metrics import MemoryCounters, Meter, values_of
from innet_drl.train.observe.stopwatch import Times, read_times

# Runs with processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A run of two actors, and a learner with a second thread."""
    run = tmp_path_factory.mktemp("runs") / "apart"
    config = small(actors=2, targets_ahead="on", evaluation_period=60, steps=1_000_000)
    return run, start.train(config, run, callbacks=[BothHavePlayed(evaluated=True)])


def shares(tmp_path: Path, *runs: Path) -> dict[str, dict[str, Any]]:
    """The bars of the command by name."""
    out = tmp_path / "breakdown.json"
    assert main(["analyze", "breakdown", *map(str, runs), "--json", str(out)]) == 0
    found = json.loads(out.read_text())["runs"]
    return {bar["process"]: bar for run in found for bar in run["bars"]}


def check_whole(run: Path, process: str, result: Result) -> None:
    """The activities of the first learner's process add up to the time of training."""
    seconds = read_times(run)["seconds"][process]
    # The meter begins within the start.
    assert 0 <= sum(seconds.values()) - result.seconds <= seconds[START]


def test_shares_of_each_process_sum_to_1(trained: tuple[Path, Result], tmp_path: Path, capfd: Any) -> None:
    run, result = trained
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "learner 0: targets", "actor 0", "actor 1"]
    known = {activity for activities in KINDS.values() for activity in activities}
    for bar in bars.values():
        assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
        assert sum(bar["kinds"].values()) == pytest.approx(1, abs=1e-9)
        assert bar["shares"].keys() <= known
        assert min(bar["shares"].values()) >= 0
    assert bars["learner 0"]["shares"].keys() >= {"wait for a batch", "forward", "backward", "optimizer", "priorities"}
    assert bars["learner 0: targets"]["shares"].keys() == {
        "wait for a batch",
        "upload",
        "targets",
        "wait for the learner",
    }
    for number in (0, 1):
        assert bars[f"actor {number}"]["shares"].keys() >= {"inference", "environment", "write", "parameters", "send"}
        assert bars[f"actor {number}"]["shares"]["wait for the replay ratio"] > 0
    check_whole(run, "learner 0", result)
    printed = capfd.readouterr().out
    assert "learner 0: targets" in printed
    assert "overlapped time" in printed
    assert "100.0%              100.0%   100.0%   100.0%" in printed


def test_a_serial_run_is_one_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = start.train(small(serial=True), run)
    (bar,) = shares(tmp_path, run).values()
    assert bar["process"] == "serial"
    assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert bar["shares"].keys() >= {"inference", "environment", "write", "sample", "targets", "forward", "backward"}
    check_whole(run, "serial", result)
    # Lines of metrics have the actor's part of the time apart.
    last = lines(run)[-1]
    assert values_of(last, "actor_time").keys() == {"inference", "environment", "write", "parameters"}
    assert last["learner_time/act"] > 0
    assert sum(values_of(last, "learner_time").values()) == pytest.approx(1, abs=0.01)


def test_the_first_of_several_learners_has_a_bar(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start.train(small(learners=2, steps=600), run)
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "actor 0"]
    assert sum(bars["learner 0"]["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert bars["learner 0"]["shares"].keys() >= {"average gradients", "forward", "priorities", "upload"}


def test_actors_that_join_report_their_times(tmp_path: Path) -> None:
    run = tmp_path / "cart"
    flags = ["--preset=cartpole", "--environments=4", "--min-size=128", "--batch-size=32", "--layers=32", "--hidden=32"]
    flags += ["--actors=2", "--steps=1000000000", "--evaluation-games=1", "--evaluation-period=0", "--no-video"]
    flags += ["--report-seconds=0.2"]
    with Server(f"unix://{tmp_path}/replay") as server, ExitStack() as stack:
        commands = [
            ["learner", f"--replay={server.address}", "--out=cart", *flags],
            *(["actor", f"--replay={server.address}", f"--index={index}"] for index in (0, 1)),
        ]
        running = [stack.enter_context(Command(*command, folder=tmp_path)) for command in commands]
        learner = running[0]
        until(lambda: values_of(newest(run), "actor_scores").keys() == {"0", "1"} or not learner.runs)
        begun = newest(run)["agent_steps"]
        until(lambda: newest(run)["agent_steps"] > begun + 3_000 or not learner.runs)
        assert [process.interrupt() for process in running] == [-signal.SIGINT] * 3
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "actor 0", "actor 1"]
    for number in (0, 1):
        bar = bars[f"actor {number}"]
        assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
        assert bar["shares"].keys() >= {"inference", "environment", "write", "wait for the replay ratio"}


def test_a_resumed_run_adds_its_times(tmp_path: Path) -> None:
    run, config = tmp_path / "run", small(serial=True, steps=300)
    first = start.train(config, run)
    before = sum(read_times(run)["seconds"]["serial"].values())
    second = start.train(dataclasses.replace(config, steps=600), run, resume=True)
    after = sum(read_times(run)["seconds"]["serial"].values())
    assert after - before >= second.seconds - first.seconds


def test_many_actors_share_a_bar(trained: tuple[Path, Result]) -> None:
    found = read(trained[0])
    actors = [bar for bar in found.bars if bar.process.startswith("actor ")]
    many = [dataclasses.replace(actors[n % 2], process=f"actor {n}") for n in range(8)]
    shown = dataclasses.replace(found, bars=[*found.bars[:2], *many]).shown
    assert [bar.process for bar in shown] == ["learner 0", "learner 0: targets", "actors"]
    assert shown[-1].seconds == pytest.approx(sum(bar.seconds for bar in many))
    assert sum(together(many).shares.values()) == pytest.approx(1)


def test_a_run_without_times_is_named(trained: tuple[Path, Result], tmp_path: Path, capsys: Any) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    (run / "times.json").unlink()
    assert main(["analyze", "breakdown", str(run)]) == 1
    assert f"{run} has recorded no times" in capsys.readouterr().err


def test_samples_of_a_new_run_count_from_its_first_line(tmp_path: Path) -> None:
    table = {"sampled_items": 640, "blocked_samples": 3, "steps": 9, "bytes": 9, "stale_updates": 0}
    for resumed, samples, blocked in ((False, 20, 3), (True, 0, 0)):
        times, counters = Times(tmp_path, resumed=resumed), MemoryCounters(resumed=resumed)
        times.add_samples(counters.record(Meter(), table), 32)
        assert (times.samples, times.blocked_samples) == (samples, blocked)
        later = {**table, "sampled_items": 704, "blocked_samples": 4}
        times.add_samples(counters.record(Meter(), later), 32)
        assert (times.samples, times.blocked_samples) == (samples + 2, blocked + 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "innet-drl analyze breakdown shows runs"),
        (["nowhere"], "nowhere is no run: it has no config.yaml"),
        (["RUN", "--json", "/no/such/folder/b.json"], "choose another file with --json"),
    ],
)
def test_flags_that_cannot_be_used(
    trained: tuple[Path, Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    message: str,
) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    flags = [str(run) if flag == "RUN" else flag for flag in flags]
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "breakdown", *flags]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors or "there is no directory for /no/such/folder" in errors
    assert errors.count("\n") == 1
