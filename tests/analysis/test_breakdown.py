"""The time of each process of a run: shares that sum to 1, nothing left out, and a trace on one clock."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from processes import Command
from serving import Server, until
from training import BothHavePlayed, lines, newest, small

import innet_drl as innet
from innet_drl.analysis.bars import KINDS, START, read, together
from innet_drl.analysis.pictures import can_draw
from innet_drl.cli import main
from innet_drl.launch import local
from innet_drl.train.callbacks import Result
from innet_drl.train.observe.metrics import Meter, parts
from innet_drl.train.observe.times import CORE_THREADS, NUMBER, TASKS, Times, read_times
from innet_drl.train.observe.totals import MemoryCounters

Slice = tuple[float, float, str]
"""Begin and end in microseconds, name."""

# Runs with processes of their own.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """A traced run of two actors, and a learner with a second thread."""
    run = tmp_path_factory.mktemp("runs") / "apart"
    config = small(actors=2, targets_ahead="on", evaluation_period=60, trace_seconds=600.0, steps=1_000_000)
    return run, local.train(config, run, callbacks=[BothHavePlayed(evaluated=True)])


def shares(tmp_path: Path, *runs: Path) -> dict[str, dict[str, Any]]:
    """The bars of the command by name: its process, and its thread."""
    out = tmp_path / "breakdown.json"
    assert main(["analyze", "breakdown", *map(str, runs), "--json", str(out)]) == 0
    found = json.loads(out.read_text())["runs"]
    return {f"{bar['process']} {bar['thread'] or ''}".strip(): bar for run in found for bar in run["bars"]}


def trace(tmp_path: Path, *runs: Path) -> dict[str, list[Slice]]:
    """The slices of the command's trace by process and thread, in the order of their begins, the outer one first."""
    out = tmp_path / "trace.json"
    assert main(["analyze", "breakdown", *map(str, runs), "--trace", str(out)]) == 0
    events = json.loads(out.read_text())["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Slice]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            name = f"{processes[event['pid']]}: {threads[event['pid'], event['tid']]}"
            found[name].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        else:
            assert event["ph"] == "M"
    return {name: sorted(slices, key=lambda each: (each[0], -each[1])) for name, slices in found.items()}


def check_nested(slices: list[Slice]) -> None:
    """Any two slices are apart, or one is within the other."""
    around: list[float] = []
    for begin, end, name in slices:
        while around and around[-1] <= begin + 1e-6:
            around.pop()
        assert not around or end <= around[-1] + 1e-6, name
        around.append(end)


def check_whole(run: Path, process: str, result: Result) -> None:
    """The activities of the first learner's process add up to the time of training."""
    seconds = read_times(run)[process].seconds
    # The meter begins within the start.
    assert 0 <= sum(seconds.values()) - result.seconds <= seconds[START]


def test_shares_of_each_process_sum_to_1(trained: tuple[Path, Result], tmp_path: Path, capfd: Any) -> None:
    run, result = trained
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "learner 0 targets", "evaluator", "actor 0", "actor 1"]
    known = {activity for activities in KINDS.values() for activity in activities}
    for bar in bars.values():
        assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
        assert sum(bar["kinds"].values()) == pytest.approx(1, abs=1e-9)
        assert bar["shares"].keys() <= known
        assert min(bar["shares"].values()) >= 0
    assert bars["learner 0"]["shares"].keys() >= {"wait for a batch", "forward", "backward", "optimizer", "priorities"}
    assert bars["learner 0 targets"]["shares"].keys() == {
        "wait for a batch",
        "upload",
        "targets",
        "wait for the learner",
    }
    assert bars["learner 0 targets"]["overlaps"] == "learner 0"
    assert bars["evaluator"]["shares"].keys() == {"evaluate"}
    for number in (0, 1):
        assert bars[f"actor {number}"]["shares"].keys() >= {"inference", "environment", "write", "parameters", "send"}
        assert bars[f"actor {number}"]["shares"]["wait for the replay ratio"] > 0
    check_whole(run, "learner 0", result)
    printed = capfd.readouterr().out
    assert "learner 0: targets" in printed
    assert "overlapped time" in printed
    assert "100.0%              100.0%     100.0%   100.0%   100.0%" in printed


def test_a_trace_is_nested_and_on_one_clock(trained: tuple[Path, Result], tmp_path: Path) -> None:
    run, result = trained
    slices = trace(tmp_path, run)
    assert slices.keys() == {
        *("learner 0: main", "learner 0: targets", "evaluator: main", "actor 0: main", "actor 1: main"),
    }
    for each in slices.values():
        check_nested(each)
    names = {name: {name for _, _, name in each} for name, each in slices.items()}
    assert names["learner 0: main"] >= {"update", "forward", "backward", "optimizer"}
    assert names["actor 0: main"] >= {"step", "inference", "environment", "write"}
    updates = [each for each in slices["learner 0: main"] if each[2] == "update"]
    # The first one is before the trace.
    assert len(updates) == result.learner_updates - 1
    # An actor records from the parameters of an update on, and ends before the learner.
    publications = [each for each in slices["learner 0: main"] if each[2] == "publish"]
    last = slices["learner 0: main"][-1][1]
    for number in (0, 1):
        steps = slices[f"actor {number}: main"]
        assert publications[0][0] < steps[0][0]
        assert max(end for _, end, _ in steps) < last
    # Leaves fill the time of a thread. Evaluations are processes of their own, with time between them.
    del slices["evaluator: main"]
    for each in slices.values():
        leaves = [(begin, end) for begin, end, name in each if name not in ("update", "step")]
        assert sum(end - begin for begin, end in leaves) == pytest.approx(each[-1][1] - each[0][0], abs=0.1)


def test_a_picture_of_several_runs(trained: tuple[Path, Result], tmp_path: Path) -> None:
    if not can_draw():
        pytest.skip("matplotlib is not installed")
    out, other = tmp_path / "bars.svg", Path(shutil.copytree(trained[0], tmp_path / "other"))
    assert main(["analyze", "breakdown", str(trained[0]), str(other), "--plot", str(out)]) == 0
    text = out.read_text()
    assert "<svg" in text
    for label in (
        "apart: learner 0: targets (overlapped)",
        "other: learner 0",
        "wait for the replay ratio",
        "optimizer",
    ):
        assert label in text


def test_a_serial_run_is_one_process(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = local.train(small(serial=True, trace_seconds=600.0), run)
    (bar,) = shares(tmp_path, run).values()
    assert (bar["process"], bar["thread"]) == ("serial", None)
    assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
    assert bar["shares"].keys() >= {"inference", "environment", "write", "sample", "targets", "forward", "backward"}
    check_whole(run, "serial", result)
    (slices,) = trace(tmp_path, run).values()
    check_nested(slices)
    assert {"step", "update"} <= {name for _, _, name in slices}
    # Lines of metrics have the actor's part of the time apart.
    last = lines(run)[-1]
    assert parts(last, "actor_time").keys() == {"inference", "environment", "write", "parameters"}
    assert last["learner_time/act"] > 0
    assert sum(parts(last, "learner_time").values()) == pytest.approx(1, abs=0.01)


def test_every_learner_has_a_bar(tmp_path: Path) -> None:
    run = tmp_path / "run"
    local.train(small(learners=2, steps=600, trace_seconds=600.0), run)
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "learner 1", "actor 0"]
    for number in (0, 1):
        assert sum(bars[f"learner {number}"]["shares"].values()) == pytest.approx(1, abs=1e-9)
        assert bars[f"learner {number}"]["shares"].keys() >= {"average gradients", "forward", "priorities", "upload"}
    slices = trace(tmp_path, run)
    for each in slices.values():
        check_nested(each)
    # A sum of gradients ends in no learner before it has begun in the other.
    sums = [[each for each in slices[f"learner {n}: main"] if each[2] == "average gradients"] for n in (0, 1)]
    assert len(sums[0]) == len(sums[1]) > 10
    for ours, theirs in zip(*sums, strict=True):
        assert max(ours[0], theirs[0]) < min(ours[1], theirs[1])


def test_actors_that_join_report_their_times(tmp_path: Path) -> None:
    run = tmp_path / "cart"
    flags = ["--preset=cartpole", "--environments=4", "--min-size=128", "--batch-size=32", "--layers=32", "--hidden=32"]
    flags += ["--actors=2", "--steps=1000000000", "--evaluation-games=1", "--evaluation-period=0", "--no-video"]
    flags += ["--report-seconds=0.2"]
    with Server(f"unix://{tmp_path}/replay") as server, ExitStack() as stack:
        commands = [
            ["learner", f"--replay={server.address}", "--out=cart", "--trace-seconds=600", *flags],
            *(["actor", f"--replay={server.address}", f"--index={index}"] for index in (0, 1)),
        ]
        running = [stack.enter_context(Command(*command, folder=tmp_path)) for command in commands]
        learner = running[0]
        until(lambda: parts(newest(run), "actor_scores").keys() == {"0", "1"} or not learner.runs)
        begun = newest(run)["agent_steps"]
        until(lambda: newest(run)["agent_steps"] > begun + 3_000 or not learner.runs)
        assert [process.interrupt() for process in running] == [-signal.SIGINT] * 3
    bars = shares(tmp_path, run)
    assert list(bars) == ["learner 0", "actor 0", "actor 1"]
    slices = trace(tmp_path, run)
    first = slices["learner 0: main"][0][0]
    for number in (0, 1):
        bar = bars[f"actor {number}"]
        assert sum(bar["shares"].values()) == pytest.approx(1, abs=1e-9)
        assert bar["shares"].keys() >= {"inference", "environment", "write", "wait for the replay ratio"}
        steps = slices[f"actor {number}: main"]
        check_nested(steps)
        assert first < steps[0][0]
        # Its laps came in several rows of the queue, and are whole.
        leaves = [(begin, end) for begin, end, name in steps if name != "step"]
        assert len(leaves) > 480
        assert all(abs(end - begin) < 1e-2 for (_, end), (begin, _) in itertools.pairwise(leaves))


def test_a_resumed_run_adds_its_times(tmp_path: Path) -> None:
    run, config = tmp_path / "run", small(serial=True, steps=300)
    first = local.train(config, run)
    assert not (run / "trace.jsonl").exists()
    before = sum(read_times(run)["serial"].seconds.values())
    second = local.train(dataclasses.replace(config, steps=600), run, resume=True)
    after = sum(read_times(run)["serial"].seconds.values())
    assert after - before >= second.seconds - first.seconds


def test_many_actors_share_a_bar(trained: tuple[Path, Result]) -> None:
    found = read(trained[0])
    actors = [bar for bar in found.bars if bar.process.startswith("actor ")]
    many = [dataclasses.replace(actors[n % 2], process=f"actor {n}") for n in range(8)]
    shown = dataclasses.replace(found, bars=[*found.bars[:3], *many]).shown
    assert [bar.name for bar in shown] == ["learner 0", "learner 0: targets", "evaluator", "actors"]
    assert shown[-1].seconds == pytest.approx(sum(bar.seconds for bar in many))
    assert sum(together(many).shares.values()) == pytest.approx(1)


def test_a_run_without_times_is_named(trained: tuple[Path, Result], tmp_path: Path, capsys: Any) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    (run / "times.json").unlink()
    assert main(["analyze", "breakdown", str(run)]) == 1
    assert f"{run} has recorded no times" in capsys.readouterr().err


def test_hosts_without_a_common_clock_are_placed_by_wall_clock(trained: tuple[Path, Result], tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    file = run / "trace.jsonl"
    first = json.loads(file.read_text().partition("\n")[0])
    # A host that was started 1000 s later, whose first lap begins 2 ms after the learner's.
    other = first | {"process": "actor 9", "host": "another", "offset_s": first["offset_s"] + 1000.0}
    other["begin_ns"] -= 1_000_000_000_000 - 2_000_000
    file.write_text(f"{json.dumps(first)}\n{json.dumps(other)}\n")
    slices = trace(tmp_path, run)
    begin = {name: each[0][0] for name, each in slices.items()}
    assert begin["actor 9: main"] - begin[f"{first['process']}: main"] == pytest.approx(2000, abs=1)


def test_threads_of_the_core_are_found_by_their_names() -> None:
    """`times.json` has their processor time by these names."""
    table = innet.Table("t", {"x": "float32"}, 100, sampler="uniform")
    view = innet.Window(0, 0)
    with innet.Memory([table]) as memory, memory.batches("t", 1, view, prefetch=2) as batches:
        with memory.writer("t", 1, view, chunk_steps=1) as writer:
            writer.append(x=[0.0], terminated=[True], truncated=[False])
        # The thread has its name once it has run.
        next(batches)
        names = {file.read_text().strip() for file in TASKS.glob("*/comm")}
    assert CORE_THREADS.keys() & names == {"innet-batches"}


def test_every_thread_of_a_server_has_its_work(tmp_path: Path) -> None:
    def names() -> set[str]:
        found = {NUMBER.sub("", file.read_text().strip()) for file in TASKS.glob("*/comm")}
        return {name for name in found if name.startswith("innet")}

    serving = {"innet-io", "innet-http", "innet-gradients"}
    local = "127.0.0.1:0"
    with innet.Memory() as memory, memory.serve(f"unix://{tmp_path}/s", http=local, gradients=local):
        until(lambda: names() >= serving)
        assert names() <= CORE_THREADS.keys()


def test_threads_of_a_command_are_not_of_the_core() -> None:
    """A command's first thread has its name, `innet-drl`, which the threads of torch inherit."""
    program = (
        "from pathlib import Path; from innet_drl.train.observe.times import CoreThreads\n"
        "Path('/proc/self/comm').write_text('innet-drl')\nprint(CoreThreads().take())"
    )
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "{}\n"


def test_samples_of_a_new_run_count_from_its_first_line(tmp_path: Path) -> None:
    table = {"sampled_items": 640, "blocked_samples": 3, "steps": 9, "bytes": 9, "stale_updates": 0}
    for resumed, samples, blocked in ((False, 20, 3), (True, 0, 0)):
        times, counters = Times(tmp_path, resumed=resumed), MemoryCounters(resumed=resumed)
        times.add_samples("learner 0", counters.record(Meter(), table), 32)
        counted = times.process("learner 0")
        assert (counted.samples, counted.blocked_samples) == (samples, blocked)
        later = {**table, "sampled_items": 704, "blocked_samples": 4}
        times.add_samples("learner 0", counters.record(Meter(), later), 32)
        assert (counted.samples, counted.blocked_samples) == (samples + 2, blocked + 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "innet-drl analyze breakdown shows runs"),
        (["nowhere"], "nowhere is no run: it has no config.yaml"),
        (["RUN", "--trace", "t.json"], "has recorded no trace: train with trace_seconds 10"),
        (["RUN", "--json", "/no/such/folder/b.json"], "choose another file with --json"),
        (["RUN", "--plot", "/no/such/folder/b.svg"], "/no/such/folder"),
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
    (run / "trace.jsonl").unlink()
    flags = [str(run) if flag == "RUN" else flag for flag in flags]
    if "--plot" in flags and not can_draw():
        pytest.skip("matplotlib is not installed")
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "breakdown", *flags]) == 1
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert message in errors or "there is no directory for /no/such/folder" in errors
    assert errors.count("\n") == 1


def test_a_damaged_trace_is_named(
    trained: tuple[Path, Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(trained[0], tmp_path / "run"))
    empty = json.dumps({"process": "a", "thread": "", "host": "h", "offset_s": 0.0, "begin_ns": 0, "laps": []})
    for text in ("", "half a li", "no json\n", "{}\n", "5\n", f"{empty}\n", empty.replace("[]", "[[1]]") + "\n"):
        (run / "trace.jsonl").write_text(text)
        assert main(["analyze", "breakdown", str(run), "--trace", str(tmp_path / "t.json")]) == 1
        assert f"{run / 'trace.jsonl'} is damaged" in capsys.readouterr().err
