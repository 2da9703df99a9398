"""`python -m benchmarks paper`: every system for a moment, and the tables, files and picture that it leaves."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from drawn import check_that_linear_axes_begin_at_zero, keep_axes

import innet_drl as innet
from benchmarks import recording, services
from benchmarks.__main__ import main
from benchmarks.paper import systems
from benchmarks.paper.cases import Workload
from benchmarks.paper.evaluation import _figures
from benchmarks.paper.figures import tables
from benchmarks.paper.roles import Measured
from benchmarks.services import KERNEL
from innet_drl.analysis import pictures
from innet_drl.redis.messages import views

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LATENCIES = {"actor push", "actor pull", "learner set", "learner sampling"}
SHORT = ["paper", "--repeats", "1", "--actors", "2", "--seconds", "0.3", "--actor-ms", "50", "--update-ms", "30"]
Lines = list[dict[str, Any]]
Measure = Callable[..., tuple[Lines, str, str]]


def medians(path: Path) -> Lines:
    lines: Lines = json.loads(path.read_text())["medians"]
    return lines


@pytest.fixture
def measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Measure:
    """Runs the command; returns its figures, the messages on standard error, and the tables."""

    def measure(*flags: str) -> tuple[Lines, str, str]:
        record, picture = tmp_path / "paper.json", tmp_path / "paper.svg"
        drawn = ["--plot", str(picture)] if pictures.can_draw() else []
        main([*SHORT, "--json", str(record), *drawn, *flags])
        told = capfd.readouterr()
        if drawn:
            assert "n = 1" in picture.read_text()
        return medians(record), told.err, told.out

    return measure


def workload(format_name: str = "frames", push: int = 200, every: int = 1, delay: float | None = None) -> Workload:
    return Workload(KERNEL, 1.0, 100.0, 10.0, 0.0, "sampling", format_name, 1, push, every, delay)


@pytest.mark.parametrize(("format_name", "push"), [("frames", 200), ("stacks", 50)])
def test_our_systems_give_every_figure(
    tmp_path: Path, measured: Measure, monkeypatch: pytest.MonkeyPatch, format_name: str, push: int
) -> None:
    axes = keep_axes(monkeypatch)
    flags = ["--push-transitions", str(push)]
    flags += ["--systems", "shared", "sampling", "ahead", "--stacks", "fstack", "kernel", "--formats", format_name]
    reason = "name its configurations with --fstack-server"
    if format_name == "frames":
        # A stack that is asked for and does not start keeps no other from being measured.
        flags += ["--fstack-server", str(tmp_path / "missing.ini"), "--fstack-client", str(tmp_path / "{index}.ini")]
        reason = "its server did not start, see its message above"
    lines, told, shown = measured(*flags)
    assert f"fstack is left out: {reason}" in told
    assert "up to 2 actors, the learner and the server share" in told
    assert f"system ahead, format {format_name}, actors 2, push transitions {push}" in told
    assert "windows were dropped" not in told
    assert {line["version"] for line in lines} == {f"innet-drl {innet.__version__}"}
    assert {(line["system"], line["stack"], line["link"], line["format"], line["actors"]) for line in lines} == {
        (system, "kernel", "loopback", format_name, 2) for system in ("shared", "sampling", "ahead")
    }
    for system in ("shared", "sampling", "ahead"):
        figures_of = {str(line["what"]): line for line in lines if line["system"] == system}
        assert LATENCIES | {"pushes", "pulls", "experiences", "communication"} <= figures_of.keys()
        for what in LATENCIES:
            assert figures_of[what]["unit"] == "ms"
            tail = "p99" if figures_of[what]["count"] >= 100 else "largest"
            assert 0 < figures_of[what]["value"] <= figures_of[what][tail] * 1.001
        for role in ("actors", "learner"):
            shares = [line["value"] for what, line in figures_of.items() if what.startswith(f"{role}: ")]
            assert len(shares) == 3
            assert sum(shares) == pytest.approx(1, abs=1e-3)
        # A push of 200 takes 50 ms to compute, one of 50 a quarter.
        assert figures_of["pushes"]["ideal"] == pytest.approx(40 * 200 / push)
        assert figures_of["experiences"]["value"] == pytest.approx(push * figures_of["pushes"]["value"], rel=1e-2)
    assert "| in-network sampling, kernel |" in shown
    if pictures.can_draw():
        picture = (tmp_path / "paper.svg").read_text()
        assert "ms, logarithmic" in picture
        assert "ideal: only computing" in picture
        rates = ("a second", "transitions a second", "share of the time")
        check_that_linear_axes_begin_at_zero(axes, *rates)


@pytest.mark.parametrize("system", ["edge", "redis"])
def test_throughput_and_bytes_against_the_delay(measured: Measure, tmp_path: Path, system: str) -> None:
    if system == "redis" and (reason := services.why_not_redis(None)):
        pytest.skip(reason)
    chosen = ["redis"] if system == "redis" else ["sampling", "edge"]
    flags = ["--delay-ms", "0.5", "5", "--link-mbit", "1000", "--stacks", "fstack", "kernel"]
    lines, told, shown = measured(*flags, "--systems", *chosen)
    assert "fstack is left out: --delay-ms relays the kernel's TCP" in told
    assert "delay ms 0.5" in told
    assert {(line["system"], line["link"], line["format"], line["delay_ms"]) for line in lines} == {
        (each, "relay", "frames", delay) for each in chosen for delay in (0.5, 5.0)
    }
    for line in lines:
        # The parameters have a version every 50 updates: none in this time.
        assert line["what"] not in ("actor pull", "learner set", "pulls")
        if line["what"] in ("updates", "experiences") or line["what"].endswith("link"):
            assert line["value"] > 0
    assert ("| edge server, sampled ahead, kernel |" in shown) == (system == "edge")
    if pictures.can_draw():
        assert "one-way delay" in (tmp_path / "paper.svg").read_text()


@pytest.mark.parametrize(
    ("flags", "heading"),
    [
        (["--push-transitions", "50", "400"], "by transitions of a push | 50 | 400 |"),
        (["--parameters-every", "1", "2"], "by pushes a pull, updates a set | 1 | 2 |"),
    ],
)
def test_sweeps(measured: Measure, flags: list[str], heading: str) -> None:
    lines, _, shown = measured("--systems", "shared", "--stacks", "kernel", "--formats", "frames", *flags)
    assert f"pushes of all actors, a second; n = 1; {heading}" in shown
    cases = {(line["push_transitions"], line["parameters_every"]) for line in lines}
    assert cases == ({(50, 1), (400, 1)} if "50" in flags else {(200, 1), (200, 2)})


def test_the_baseline(measured: Measure, capfd: pytest.CaptureFixture[str]) -> None:
    """Where there is no Redis the command says so."""
    flags = ["--systems", "redis", "--formats", "frames"]
    if services.why_not_redis(None):
        with pytest.raises(SystemExit, match="nothing is left to measure"):
            measured(*flags)
        assert "redis is left out" in capfd.readouterr().err
        return
    lines, _, _ = measured(*flags)
    assert {(line["system"], line["stack"]) for line in lines} == {("redis", "kernel")}
    assert {line["what"] for line in lines} >= LATENCIES
    release = subprocess.run(["redis-server", "--version"], capture_output=True, text=True, check=True).stdout
    assert f" v={lines[0]['version'].removeprefix('Redis ')} " in release


@pytest.mark.parametrize("push", [50, 200])
@pytest.mark.parametrize("format_name", ["frames", "stacks"])
def test_repeated_pushes_drop_no_window(format_name: str, push: int) -> None:
    recording.record()
    work = workload(format_name, push)
    messages, rows = work.messages(), systems.recorded_rows(work)
    made = systems._messages(messages, rows, 0)
    # Whole rows: a repetition starts after the end of the episodes.
    assert len(made) == systems.PUSHES if format_name == "frames" else len(made) >= 4
    with innet.Memory([messages.table]) as memory:
        reader, writers = messages.reader(memory), set()
        for message in 3 * made:
            for writer, row in reader.rows(views(messages.layout, message)):
                writer.append(**row)
                writers.add(writer)
        assert [writer.dropped_windows for writer in writers] == [0]


def test_pulls_count_over_whole_periods() -> None:
    actor = {"compute": [100.0] * 5, "push": [20.0] * 5, "pull": [10.0, 10.0]}
    learner = {"sample": [5.0], "train": [10.0], "priorities": [1.0]}
    rates = {each["what"]: each for each in _figures(workload(every=2), Measured([actor], learner, {}))}
    assert rates["pulls"]["value"] == pytest.approx(1 / 0.25, rel=1e-3)
    assert rates["pulls"]["ideal"] == pytest.approx(5)
    assert rates["pushes"]["value"] == pytest.approx(5 / 0.62, rel=1e-3)
    assert "pulls" not in {each["what"] for each in _figures(workload(every=8), Measured([actor], learner, {}))}


def test_a_figure_that_did_not_happen_has_no_number() -> None:
    about = {"system": "sampling", "stack": "kernel", "format": "frames", "actors": 2, "delay_ms": None}
    settings = {"push_transitions": 200, "low": 1.0, "high": 3.0, "n": 3}
    pushes = {"what": "pushes", "value": 2.0, "ideal": 4.0}
    lines = [
        {**about, **settings, "parameters_every": 1, **pushes},
        {**about, **settings, "parameters_every": 4, **pushes},
        {**about, **settings, "parameters_every": 1, "what": "actor pull", "value": 2.0, "largest": 9.0, "count": 6},
    ]
    shown = tables(lines)
    assert "| in-network sampling, kernel | 2.00 (1.00-3.00), largest 9.00 of 6 | - |" in shown
    assert "| 2.00 (1.00-3.00), 50% of the ideal | 2.00 (1.00-3.00), 50% of the ideal |" in shown


COMMAND = [*SHORT, "--systems", "sampling", "shared", "--stacks", "kernel", "--formats", "frames"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_prints_its_tables_and_is_continued(tmp_path: Path, number: signal.Signals) -> None:
    record = tmp_path / "paper.json"
    program = [sys.executable, "-m", "benchmarks", *COMMAND, "--json", str(record)]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        program,
        cwd=ROOT,
        stdout=pipe,
        stderr=pipe,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        said = ""
        while not said.splitlines()[-1:] or not said.splitlines()[-1].startswith("2 of 2: "):
            line = process.stderr.readline()
            assert line, said
            said += line
        if number == signal.SIGINT:
            # A terminal sends it to all processes.
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, rest = process.communicate()
    assert process.returncode == 128 + number
    assert "Traceback" not in said + rest
    assert "| actor push, ms; n = 1; by actors | 2 |" in out
    assert f"1 of 2 measurements: {record}" in out
    first = json.loads(record.read_text())["measurements"]
    main([*COMMAND, "--json", str(record)])
    assert json.loads(record.read_text())["measurements"][:1] == first
    assert {line["system"] for line in medians(record)} == {"sampling", "shared"}


def test_ctrl_c_during_imports() -> None:
    program = [sys.executable, "-X", "importtime", "-m", "benchmarks", "paper"]
    with subprocess.Popen(program, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while not (line := process.stderr.readline()).endswith(" numpy\n"):
            assert line
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--actors", "0"], "--actors and --parameters-every: numbers of at least 1"),
        (["--systems", "edge"], "--systems edge: it belongs beside --delay-ms"),
        (["--delay-ms", "-1"], "--delay-ms: numbers of at least 0"),
        (["--delay-ms", "nan"], "--delay-ms: numbers of at least 0"),
        (["--link-mbit", "100"], "beside --delay-ms"),
        (["--push-transitions", "200", "60"], "--push-transitions: multiples of 25, up to 400"),
        (["--parameters-every", "0"], "--parameters-every: numbers of at least 1"),
        (["--parameters-every", "20"], "--seconds 10: --parameters-every needs at least 16 for a pull"),
        (["--seconds", "0"], "--seconds, --actor-ms and --update-ms: numbers above 0"),
        (["--json", "missing/paper.json"], "--json missing/paper.json: there is no directory missing"),
        (["--plot", "paper.gif"], "--plot paper.gif: its name has to end in .svg, .png, .pdf"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(part)):
        main(["paper", *flags])


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--actors", "two"], "two"),
        (["--systems", "memcached"], "memcached"),
        (["--formats", "frames", "png"], "png"),
        (["--stacks", "rdma"], "rdma"),
        (["--delay-ms", "5", "five"], "five"),
    ],
)
def test_malformed_flags_are_named(capsys: pytest.CaptureFixture[str], flags: list[str], part: str) -> None:
    with pytest.raises(SystemExit):
        main(["paper", *flags])
    told = capsys.readouterr().err
    assert part in told
    assert flags[0] in told
