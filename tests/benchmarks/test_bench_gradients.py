"""`python -m benchmarks gradients`: every system for a moment; a wrong sum would be an error."""

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.crew import Crew
from benchmarks.gradients import parameter_server
from benchmarks.gradients.links import links
from benchmarks.gradients.losses import lose
from benchmarks.gradients.parameter_server import ParameterWorker

pytestmark = pytest.mark.slow

SYSTEMS = ["innet", "innet-fixed", "gloo", "gather", "parameter-server"]


@pytest.mark.timeout(300)
def test_every_system_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "2", "--sizes", "4000", "100000", "--rounds", "1", "--seconds", "0.05", "--loss", "0.01"]
    flags += ["--training-workers", "2", "--training-seconds", "0.2", "--training-goal", "12"]
    main(["gradients", *flags])
    out = capsys.readouterr().out
    rows = [json.loads(line) for line in out.splitlines()]
    trainings = [row for row in rows if "training" in row]
    assert [row["system"] for row in trainings] == SYSTEMS
    for row in trainings:
        assert row["bytes"] > 3_000_000
        assert 0 < row["communication"] < 1
        assert row["value"] > 0
        assert (row["seconds_to_goal"] is None) == (row["score"] < 12)
    capacities = [row for row in rows if "sent_per_s" in row]
    assert [(row["system"], row["bytes"]) for row in capacities] == [("kernel UDP", 4000), ("kernel UDP", 100_000)]
    for row in capacities:
        # Every contribution is answered by a sum.
        assert row["sent_per_s"] == pytest.approx(row["received_per_s"], rel=0.05)
        assert row["value"] == pytest.approx(row["received_per_s"] + row["sent_per_s"], rel=1e-3)
    rows = [row for row in rows if "path" in row]
    for size in (4000, 100_000):
        told = {(row["system"], row["path"], row["loss"]) for row in rows if row["bytes"] == size}
        straight = {(system, "loopback", 0.0) for system in SYSTEMS}
        assert told == straight | {("innet", "loopback, one by one", loss) for loss in (0.0, 0.01)}
    for row in rows:
        assert row["workers"] == 2
        assert 0 < row["value"] <= row["p99_ms"] * 1.001
        assert row["count"] >= 8
        assert row["cpu_ms"] > 0
        assert row["cpu_ns_per_byte"] == pytest.approx(row["cpu_ms"] * 1e6 / (2 * row["bytes"]), rel=0.01)
    record = tmp_path / "out.jsonl"
    record.write_text(out)
    main(["figures", str(record)])
    assert "| innet, one by one, 1.0% lost |" in capsys.readouterr().out


@pytest.mark.timeout(300)
def test_links_have_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        with links(1, 100):
            pass
    except SystemExit as error:
        pytest.skip(str(error))
    systems = ["innet", "gloo", "parameter-server"]
    flags = [
        "--workers",
        "2",
        "--sizes",
        "400000",
        "--rounds",
        "1",
        "--seconds",
        "0.1",
        "--loss",
        "--systems",
        *systems,
    ]
    main(["gradients", *flags, "--training-workers", "0", "--link-mbit", "100"])
    rows = {row["system"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert list(rows) == systems
    one_way = 400_000 * 8 / 100e6 * 1e3
    for row in rows.values():
        assert row["path"] == "100 Mbit/s"
        # No vector passes a link faster than that.
        assert row["value"] > one_way
    # Its own link carries both workers' vectors in, and both sums out.
    assert rows["parameter-server"]["value"] > 2 * one_way
    assert not [name for name in os.listdir("/run/netns") if name.startswith(f"innet-{os.getpid()}")]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "0"], "--workers and --sizes"),
        (["--sizes", "0"], "--workers and --sizes"),
        (["--loss", "1.5"], "--loss: shares below 1"),
        (["--link-mbit", "100", "--systems", "innet-memif"], "leave out innet-memif"),
    ],
)
def test_flags_that_cannot_be_used(flags: list[str], told: str) -> None:
    with pytest.raises(SystemExit, match=told):
        main(["gradients", *flags])


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
