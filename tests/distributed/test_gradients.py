"""Sums over the workers of a gradient job, from Python: arrays, errors, processes that die."""

from __future__ import annotations

import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import pytest
from gradient_worker import expected, vector
from numpy.typing import NDArray
from places import HELPERS, ROOT
from steps import table

import innet_drl as innet
from innet_drl import errors
from innet_drl.gradients import GradientWorker

WORKER = HELPERS / "gradient_worker.py"
DOCUMENT = ROOT / "docs" / "reference" / "statistics.md"
T = TypeVar("T")


@pytest.fixture
def server() -> Iterator[innet.Server]:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        yield server


@pytest.fixture
def replay(server: innet.Server) -> Iterator[innet.Replay]:
    with innet.connect(server.addresses[0]) as replay:
        yield replay


def join_all(replay: innet.Replay, workers: int, job: str = "job", **options: Any) -> list[GradientWorker]:
    return [replay.join_gradients(job, worker, workers, name=f"host-{worker}", **options) for worker in range(workers)]


def together(calls: list[Callable[[], T]]) -> list[T]:
    """What calls return that wait for each other, in one process: the interpreter is free meanwhile."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.result() for future in [threads.submit(call) for call in calls]]


def sum_all(workers: list[GradientWorker], values: list[NDArray[np.float32]], **options: Any) -> list[int]:
    def call(worker: GradientWorker, mine: NDArray[np.float32]) -> Callable[[], int]:
        return lambda: worker.sum(mine, **options)

    return together([call(worker, mine) for worker, mine in zip(workers, values, strict=True)])


def test_arrays_of_any_shape_are_summed_in_place(replay: innet.Replay) -> None:
    workers = join_all(replay, 3)
    for seed, shape in enumerate([(5000,), (20, 3, 77), (1,), ()]):
        length = int(np.prod(shape))
        values = [vector(worker, length, seed).reshape(shape) for worker in range(3)]
        assert sum_all(workers, values) == [3, 3, 3]
        for mine in values:
            np.testing.assert_array_equal(mine, expected(3, length, seed).reshape(shape))
        assert [worker.round for worker in workers] == [seed + 2] * 3
    empty = [np.zeros((0, 4), np.float32)] * 3
    assert [worker.sum(mine) for worker, mine in zip(workers, empty, strict=True)] == [3, 3, 3]


def test_the_mean_and_the_threshold(replay: innet.Replay) -> None:
    workers = join_all(replay, 3)
    values = [np.full(1000, value, np.float32) for value in (1, 2, 6)]
    sum_all(workers, values, mean=True)
    assert all((mine == 3).all() for mine in values)
    workers[0].set_threshold(2)
    values = [np.full(10, value, np.float32) for value in (1, 2)]
    assert sum_all(workers[:2], values, mean=True) == [2, 2]
    assert (values[0] == 1.5).all()
    with pytest.raises(errors.GradientError, match="from 1 to the number of workers"):
        workers[0].set_threshold(4)


def test_fixed_point_gives_the_same_bits_in_every_order(replay: innet.Replay) -> None:
    workers = join_all(replay, 3, arithmetic="fixed")
    original = [np.random.default_rng(worker).normal(size=3000).astype(np.float32) for worker in range(3)]
    sums = []
    for order in range(3):
        values = [mine.copy() for mine in original[order:] + original[:order]]
        sum_all(workers, values)
        sums += [mine.tobytes() for mine in values]
    assert len(set(sums)) == 1
    np.testing.assert_allclose(
        np.frombuffer(sums[0], np.float32), np.sum(original, axis=0, dtype=np.float64), atol=1e-6
    )


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (np.zeros(3), "float64"),
        (np.zeros((4, 4), np.float32).T[1:], "gaps or in another order"),
        (np.zeros(8, np.float32)[::2], "gaps"),
        (np.frombuffer(bytes(12), np.float32), "write"),
        (np.frombuffer(bytearray(13), np.uint8)[1:].view(np.float32), "not aligned"),
        ([1.0, 2.0], "list"),
    ],
)
def test_what_is_no_such_array_is_refused(replay: innet.Replay, values: Any, said: str) -> None:
    with replay.join_gradients("job", 0, 1) as worker:
        with pytest.raises(errors.ConfigError, match=said):
            worker.sum(values)
        # Nothing was sent.
        assert worker.sum(np.ones(3, np.float32)) == 1


def test_arguments_are_checked(replay: innet.Replay) -> None:
    for arguments, said in [
        ({"arithmetic": "bfloat16"}, "float32"),
        ({"deadline": -1.0}, "deadline"),
        ({"deadline": 0.0}, "deadline"),
        ({"segment_values": 361}, "360"),
        ({"world": 2}, "--parent"),
    ]:
        with pytest.raises(errors.ConfigError, match=said):
            replay.join_gradients("job", 0, 1, **arguments)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigError, match="numbers begin with 0"):
        replay.join_gradients("job", 1, 1)
    with innet.Memory() as memory, pytest.raises(errors.ConfigError, match="need a server that sums gradients"):
        memory.join_gradients("job", 0, 1)
    with innet.Memory() as memory, pytest.raises(errors.ConfigError, match=r"127\.0\.0\.1:7711"):
        memory.serve("innet://127.0.0.1:0", gradients="everywhere")


def test_a_server_that_sums_nothing_says_so() -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
        assert server.gradients is None
        with innet.connect(server.addresses[0]) as replay, pytest.raises(errors.ConfigError, match="--gradients"):
            replay.join_gradients("job", 0, 1)


def test_who_is_missing_is_named(replay: innet.Replay) -> None:
    worker = replay.join_gradients("job", 0, 3, deadline=1.0)
    other = replay.join_gradients("job", 2, 3, name="host-2", deadline=1.0)
    with pytest.raises(errors.MissingWorkerError, match=r"worker 1, which never joined, worker 2 \(host-2\)") as caught:
        worker.sum(np.ones(1000, np.float32))
    assert list(caught.value.missing) == [1, 2]
    # Not before a reset, which the others hear of too.
    with pytest.raises(errors.GradientError, match="reset the job"):
        worker.sum(np.ones(1000, np.float32))
    worker.reset()
    other.reset()
    third = replay.join_gradients("job", 1, 3, deadline=1.0)
    assert sum_all([worker, third, other], [np.ones(1000, np.float32) for _ in range(3)]) == [3, 3, 3]


def test_a_shorter_deadline_is_for_one_call(replay: innet.Replay) -> None:
    worker = replay.join_gradients("job", 0, 2)
    with pytest.raises(errors.MissingWorkerError, match="worker 1, which never joined") as caught:
        worker.sum(np.ones(5, np.float32), deadline=0.3)
    assert list(caught.value.missing) == [1]


def test_a_worker_that_leaves_and_one_that_suspends(replay: innet.Replay) -> None:
    first, second = join_all(replay, 2)
    first.halt("the disk is full")
    with pytest.raises(errors.HaltedError, match="worker 0 suspended the job: the disk is full"):
        second.sum(np.ones(5, np.float32))
    first.reset()
    second.reset()
    second.leave()
    second.leave()
    assert "left" in repr(second)
    with pytest.raises(errors.ClosedError):
        second.sum(np.ones(5, np.float32))
    with pytest.raises(errors.MissingWorkerError, match=r"worker 1 \(host-1\), which left"):
        first.sum(np.ones(5, np.float32), deadline=0.3)
    assert replay.stats()["gradients"]["jobs"]["job"]["joined"] == 1


def test_who_falls_behind_pulls_the_weights(replay: innet.Replay) -> None:
    workers = join_all(replay, 3)
    workers[0].set_threshold(2)
    # More than waits at a socket for a worker that does not look.
    ahead = 30
    for _ in range(ahead):
        sum_all(workers[:2], [np.ones(100_000, np.float32) for _ in range(2)])
    with pytest.raises(errors.BehindError, match="pull the weights again"):
        for _ in range(ahead):
            assert workers[2].sum(np.ones(100_000, np.float32)) == 2


def test_a_forced_sum_has_those_who_came(replay: innet.Replay) -> None:
    first, second = join_all(replay, 2)
    with ThreadPoolExecutor(1) as threads:
        sum_of_one = threads.submit(first.sum, np.ones(5, np.float32))
        while replay.stats()["gradients"]["counted"] == 0:
            pass
        second.force()
        assert sum_of_one.result() == 1


def test_a_reset_in_the_middle_loses_the_sum_and_nothing_else(replay: innet.Replay) -> None:
    workers = join_all(replay, 2)
    values = [np.ones(5, np.float32) for _ in range(2)]
    assert sum_all(workers, values) == [2, 2]
    values = [np.ones(5, np.float32) for _ in range(2)]
    with ThreadPoolExecutor(1) as threads:
        lost = threads.submit(workers[0].sum, values[0])
        while replay.stats()["gradients"]["counted"] < 3:
            pass
        workers[1].reset()
        with pytest.raises(errors.ResetError, match="sum again, all workers together"):
            lost.result()
    values[0][:] = 1
    assert sum_all(workers, values) == [2, 2]
    assert (values[0] == 2).all()


def test_a_server_that_closes_ends_the_call() -> None:
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0", gradients="127.0.0.1:0") as server:
        with innet.connect(server.addresses[0]) as replay, ThreadPoolExecutor(1) as threads:
            worker = replay.join_gradients("job", 0, 2)
            waits = threads.submit(worker.sum, np.ones(5, np.float32))
            while replay.stats()["gradients"]["counted"] == 0:
                pass
            server.close()
            with pytest.raises(errors.DisconnectedError, match="join again"):
                waits.result()


def test_ctrl_c_ends_a_sum(replay: innet.Replay) -> None:
    with replay.join_gradients("job", 0, 2) as worker:
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            while replay.stats()["gradients"]["counted"] == 0:
                pass
            signal.pthread_kill(main, signal.SIGINT)

        # A shell's background job ignores it.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        thread = threading.Thread(target=interrupt)
        try:
            thread.start()
            with pytest.raises(KeyboardInterrupt):
                worker.sum(np.ones(5, np.float32))
            thread.join()
        finally:
            signal.signal(signal.SIGINT, before)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_place_is_of_this_process(replay: innet.Replay) -> None:
    worker = replay.join_gradients("job", 0, 1)
    with pytest.raises(TypeError, match="join in the other process"):
        pickle.dumps(worker)
    # It does not need the connection it was made by.
    replay.close()
    assert worker.sum(np.ones(5, np.float32)) == 1
    child = os.fork()
    if child == 0:
        try:
            worker.sum(np.ones(5, np.float32))
        except errors.ForkError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_process_that_is_killed_in_the_middle_of_a_round_is_named(server: innet.Server, replay: innet.Replay) -> None:
    mine = replay.join_gradients("job", 0, 2, name="host-0", deadline=100.0)
    work = [sys.executable, str(WORKER), server.addresses[0], "1", "2", "5000", "1"]
    with subprocess.Popen(work, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        values = vector(0, 5000, 0)
        assert mine.sum(values) == 2
        np.testing.assert_array_equal(values, expected(2, 5000, 0))
        assert other.stdout.readline() == "round 0\n"
        with ThreadPoolExecutor(1) as threads:
            counted = replay.stats()["gradients"]["counted"]
            waits = threads.submit(mine.sum, np.ones(5000, np.float32))
            while replay.stats()["gradients"]["counted"] == counted:
                pass
            other.kill()
            with pytest.raises(
                errors.MissingWorkerError, match=r"worker 1 \(host-1\) left in the middle of round 2"
            ) as caught:
                waits.result()
        assert list(caught.value.missing) == [1]


def test_every_statistic_is_explained(replay: innet.Replay) -> None:
    _place = replay.join_gradients("job", 0, 1)
    chapter = DOCUMENT.read_text().split("## Gradient sums\n")[1].split("\n## ")[0]
    rows = re.findall(r"(?m)^\| (`.*?) \|", chapter)
    explained = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    stats = replay.stats()["gradients"]
    assert explained == stats.keys() | stats["jobs"]["job"].keys()


def test_gradients_and_a_memory_are_served_together(server: innet.Server) -> None:
    with innet.connect(server.addresses[0], tables=[table()]) as replay:
        assert server.gradients is not None
        assert replay.stats()["gradients"]["address"] == server.gradients
        assert replay.stats()["tables"].keys() == {"t"}
