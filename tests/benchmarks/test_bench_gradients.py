"""`python -m benchmarks gradients`: every system for a moment; a wrong sum would be an error."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from drawn import check_that_linear_axes_begin_at_zero, keep_axes

from benchmarks.__main__ import main
from benchmarks.crew import Crew
from benchmarks.gradients import figures, parameter_server
from benchmarks.gradients.links import links
from benchmarks.gradients.losses import lose
from benchmarks.gradients.parameter_server import ParameterWorker

pytestmark = pytest.mark.slow

SUMMED = ["innet", "innet-fixed", "innet-racks", "gloo", "parameter-server"]
TRAINED = [*SUMMED[:3], "innet-async", *SUMMED[3:]]


def measure(path: Path, *flags: str) -> dict[str, dict[str, Any]]:
    """Measures, and returns for each figure the median of each case by its system, loss and task."""
    main(["gradients", f"--json={path}", *flags])
    found: dict[str, dict[str, Any]] = {}
    for line in json.loads(path.read_text())["medians"]:
        case = " ".join(str(line[name]) for name in ("task", "system", "loss") if line.get(name) is not None)
        found.setdefault(line["what"], {})[case] = line
    return found


@pytest.mark.timeout(300)
def test_every_system_sums_and_trains(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers=3", "--sizes=4003", "--repeats=1", "--seconds=0.05", "--loss=0.01", "--training-workers=3"]
    flags += ["--training-seconds=0.2", "--training-goal=12", f"--plot={tmp_path}/a.svg", f"--csv={tmp_path}/a.csv"]
    found = measure(tmp_path / "a.json", *flags)
    sums = [*(f"sum {system}" for system in SUMMED), "sum innet 0.0", "sum innet 0.01"]
    iterations = [f"iterations {system}" for system in (*TRAINED, "no-sum")]
    trainings = [f"training {system}" for system in TRAINED]
    assert list(found["sum"]) == list(found["processor"]) == sums
    assert list(found["datagrams"]) == ["sum innet"]
    for line in found["sum"].values():
        assert (line["workers"], line["bytes"], line["n"]) == (3, 4000, 1)
        # A 99th percentile needs a hundred values.
        assert ("p99" in line) == (line["count"] >= 100)
        assert 0 < line["value"] <= line.get("p99", line["largest"]) * 1.001
    assert list(found["iteration"]) == [*iterations, *trainings]
    for case, line in found["iteration"].items():
        parts = found["computing"][case]["value"], found["communication"][case]["value"]
        assert sum(parts) == pytest.approx(line["value"], rel=1e-3)
        assert min(parts) > 0
        assert found["share"][case]["value"] == pytest.approx(parts[1] / line["value"], rel=1e-3)
        assert found["updates"][case]["value"] > 0
    assert list(found["counted"]) == ["iterations innet-async", "training innet-async"]
    assert list(found["score"]) == trainings
    assert set(found["to the goal"]) == {case for case in trainings if found["score"][case]["value"] >= 12}
    out, err = capfd.readouterr()
    assert "| innet, one by one, 1.0% lost | 4,000 |" in out
    assert "20 of 20 measurements" in out
    assert "no parameters" not in err
    assert "loopback" in (tmp_path / "a.svg").read_text()


@pytest.mark.timeout(300)
def test_links_have_a_rate(tmp_path: Path) -> None:
    try:
        with links(1, 0, 100):
            pass
    except SystemExit as error:
        pytest.skip(str(error))
    systems = ["innet", "innet-racks", "gloo", "parameter-server"]
    flags = ["--workers=3", "--sizes=400000", "--repeats=1", "--seconds=0.1", "--loss", "--training-workers=0"]
    found = measure(tmp_path / "a.json", *flags, "--systems", *systems, "--link-mbit=100")
    assert list(found["sum"]) == [f"sum {system}" for system in systems]
    one_way = 400_000 * 8 / 100e6 * 1e3
    # No vector passes a link faster than that, and the parameter server's own carries all vectors in, and all sums out.
    assert all(line["value"] > one_way for line in found["sum"].values())
    assert found["sum"]["sum parameter-server"]["value"] > 3 * one_way
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"innet-{os.getpid()}")]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "2", "65"], "^--workers 65: 1 to 64, the limit of a job$"),
        (["--workers", "0"], "--workers 0: 1 to 64"),
        (["--sizes", "0"], "--sizes and --racks"),
        (["--loss", "1.5"], "--loss: shares below 1"),
        (["--systems", "no-sum", "--workers", "2"], "nothing is left to measure"),
        (["--json", "nodir/a.json"], "--json nodir/a.json: there is no directory nodir"),
        (["--plot", "a.xyz"], "--plot a.xyz: its name has to end in .svg"),
    ],
)
def test_unusable_flags_are_refused_before_a_measurement(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=told):
        main(["gradients", *flags])
    assert capsys.readouterr() == ("", "")


@pytest.mark.timeout(300)
def test_a_signal_ends_the_command_with_its_tables_and_the_next_one_continues(tmp_path: Path) -> None:
    flags = ["--workers=2", "--sizes=4000", "--systems=gloo", "--loss", "--seconds=0.05", "--training-workers=0"]
    command = [sys.executable, "-m", "benchmarks", "gradients", *flags, "--repeats=1000", f"--json={tmp_path}/a.json"]
    kept = 0
    for number, send in ((signal.SIGINT, os.killpg), (signal.SIGTERM, os.kill)):
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
        )
        assert process.stderr is not None
        # The terminal sends Ctrl-C to all processes.
        lines = iter(process.stderr.readline, "")
        first = next(line for line in lines if " of 1000: " in line)
        assert first.startswith(f"{kept + 1} of ")
        next(lines)
        started = psutil.Process(process.pid).children(recursive=True)
        assert started
        send(process.pid, number)
        out, err = process.communicate()
        psutil.wait_procs(started)
        assert process.returncode == 128 + number
        assert "Traceback" not in err
        kept = len(json.loads((tmp_path / "a.json").read_text())["measurements"])
        assert 0 < kept < 1000
        assert f"\n{kept} of 1000 measurements: {tmp_path}/a.json\n" in out
        assert out.startswith("| 2 workers, loopback: sum, n = ")


def line(what: str, system: str, size: int, workers: int, value: float, **more: Any) -> dict[str, Any]:
    """The median of a figure."""
    about = {"system": system, "workers": workers, "bytes": size, "what": what, "loss": None}
    return {**about, "value": value, "low": 0.9 * value, "high": 1.2 * value, "n": 3, **more}


@pytest.mark.parametrize(("workers", "sizes"), [((2, 4, 8), (6_410_000, 3_310_000, 157_520, 40_020)), ((2,), (4000,))])
def test_a_picture_names_its_scales_and_repeats(
    workers: tuple[int, ...], sizes: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    axes = keep_axes(monkeypatch)
    lines = [line("sum", each, size, n, size / 1e5, task="sum") for n in workers for size in sizes for each in SUMMED]
    lines += [
        line(what, system, size, workers[0], value, task="iterations")
        for size in sizes
        for system in TRAINED
        for what, value in (("iteration", 30), ("computing", 20), ("communication", 10))
    ]
    figures.draw(lines, tmp_path / "a.svg", "loopback")
    drawn = (tmp_path / "a.svg").read_text()
    for number in workers:
        assert f"{number} workers, n = 3" in drawn
    for size in sizes:
        assert f"{workers[0]} workers, {size:,} bytes, n = 3" in drawn
    for text in (
        "ms of a sum (logarithmic)",
        "bytes of a gradient (logarithmic)",
        "ms of a training iteration",
        *TRAINED,
    ):
        assert text in drawn
    check_that_linear_axes_begin_at_zero(axes, "ms of a training iteration")


def test_tables_say_how_often_a_goal_was_reached(tmp_path: Path) -> None:
    lines = [line("score", "gloo", 4000, 2, 200.0, task="training")]
    lines.append(line("to the goal", "gloo", 4000, 2, 10.0, task="training", n=2))
    assert figures.tables(lines, "links of 50 Mbit/s") == (
        "| 2 workers, links of 50 Mbit/s: training, n = 2 to 3 | bytes | score | s to the goal |\n"
        "| --- | --- | --- | --- |\n"
        "| gloo | 4,000 | 200.0 (180.0-240.0) | 10.0 (9.0-12.0), n = 2 |\n"
    )
    # Ctrl-C may come before a figure of the picture.
    figures.draw(lines, tmp_path / "a.svg", "loopback")


@contextmanager
def summing(workers: int, max_bytes: int) -> Iterator[tuple[Connection, str]]:
    """A parameter server, in a process whose pipe brings its failure, and its address."""
    with Crew() as crew:
        pipe = crew.start(parameter_server.serve, workers, max_bytes, "127.0.0.1")
        yield pipe, crew.receive(pipe)[0]


def fail(error: BaseException, pipe: Connection) -> None:
    """A role that fails."""
    raise error


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (SystemExit("a wrong sum"), "^a wrong sum$"),
        (ZeroDivisionError("of nothing"), r"^ZeroDivisionError: of nothing\nTraceback"),
    ],
)
def test_the_failure_of_a_process_ends_the_measurement(error: BaseException, told: str) -> None:
    with Crew() as crew, pytest.raises(SystemExit, match=told):
        crew.receive(crew.start(fail, error))


def end_at_once(pipe: Connection) -> None:
    """A role that ends at its start."""


def test_a_process_that_ends_at_its_start_ends_the_measurement() -> None:
    with Crew() as crew, pytest.raises(SystemExit, match="has ended too early"):
        crew.receive(crew.start(end_at_once))


def test_all_workers_get_the_sum_of_vectors_of_any_size() -> None:
    with summing(3, 1 << 20) as (_, address), ThreadPoolExecutor(3) as pool:

        def work(number: int) -> None:
            with closing(ParameterWorker(address)) as worker:
                for length in (1, 7, 100_003, 0, 50):
                    values = np.arange(length, dtype=np.float32) * (number + 1)
                    worker.sum(values)
                    assert (values == 6 * np.arange(length, dtype=np.float32)).all()

        list(pool.map(work, range(3)))


@pytest.mark.parametrize("lengths", [(3, 4), (26, 26)])
def test_vectors_that_cannot_be_summed_end_the_parameter_server(lengths: tuple[int, int]) -> None:
    with summing(2, 100) as (_, address), ThreadPoolExecutor(2) as pool:

        def work(length: int) -> None:
            with closing(ParameterWorker(address)) as worker, pytest.raises((EOFError, ConnectionResetError)):
                worker.sum(np.ones(length, np.float32))

        list(pool.map(work, lengths))


def test_a_share_of_datagrams_is_lost() -> None:
    with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as end:
        end.bind(("127.0.0.1", 0))
        end.setblocking(False)

        def arrived() -> int:
            """How many of a thousand datagrams arrive."""
            count = 0
            for _ in range(1000):
                end.sendto(b"x", end.getsockname())
                with suppress(BlockingIOError):
                    count += len(end.recv(10))
            return count

        assert arrived() == 1000
        lose(0.3, os.getpid())
        assert 600 < arrived() < 800
        lose(0.0, os.getpid())
        assert arrived() == 1000
        lose(0.3, os.getpid())
        lose(None, os.getpid())
        assert arrived() == 1000
