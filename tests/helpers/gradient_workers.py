"""Processes for the tests of gradients: each runs a function with its number, and says what it returned or raised."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from serving import SERVE, until

from innet_drl.launch import learners
from innet_drl.launch.actors import run_actor
from innet_drl.launch.launcher import ProcessFailure, end_with_parent, forking, start_fork_server
from innet_drl.launch.playing import ActorAssignment
from innet_drl.train.errors import LearnerError
from innet_drl.train.learn.data_parallel import SharedGradients, TrainingEnded

SECONDS = 60.0
"""Longer than anything takes but what hangs."""


@dataclass(frozen=True)
class Raised:
    """What a worker raised."""

    kind: str
    message: str
    missing: tuple[int, ...] = ()
    trace: str = ""


@contextlib.contextmanager
def gradient_process(*flags: str, listen: str = "innet://127.0.0.1:0") -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A real `innet-replay serve --gradients`, which may be stopped by a signal; its address, and its process."""
    command = [*SERVE, listen, "--gradients", "127.0.0.1:0", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        line = server.stdout.readline()
        try:
            yield next(word for word in line.split() if "://" in word).rstrip(",;"), server
        finally:
            server.terminate()
            server.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def gradient_server() -> Iterator[str]:
    """The same; its address."""
    with gradient_process() as (address, _):
        yield address


@contextlib.contextmanager
def gradient_racks(racks: int, *flags: str, listen: str = "innet://127.0.0.1:0") -> Iterator[list[str]]:
    """Servers below one server; their addresses."""
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(gradient_server())
        below = [("--parent", parent, "--rack", str(rack), "--racks", str(racks), *flags) for rack in range(racks)]
        yield [stack.enter_context(gradient_process(*of_rack, listen=listen))[0] for of_rack in below]


def run_workers(function: Callable[..., Any], workers: int, *arguments: Any) -> list[Any]:
    """What `function(number, workers, *arguments)` returns in each process: `Raised`, or `None` where it died."""
    start_fork_server()
    started = []
    for number in range(workers):
        ours, theirs = forking.Pipe(duplex=False)
        process = forking.Process(target=_run, args=(theirs, function, number, workers, *arguments), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    results = []
    for _, pipe in started:
        try:
            assert pipe.poll(SECONDS), "a worker hangs"
            results.append(pipe.recv())
        except EOFError:
            results.append(None)
    for process, pipe in started:
        process.join(SECONDS)
        assert not process.is_alive(), "a worker does not end"
        pipe.close()
    return results


def returned(results: list[Any]) -> list[Any]:
    """The same, where every worker returned."""
    for result in results:
        assert not isinstance(result, Raised), result.trace
        assert result is not None, "a worker died"
    return results


def _run(pipe: Connection, function: Callable[..., Any], *arguments: Any) -> None:
    import torch

    end_with_parent()
    torch.set_num_threads(1)
    try:
        pipe.send(function(*arguments))
    except Exception as error:
        pipe.send(
            Raised(type(error).__name__, str(error), tuple(getattr(error, "missing", ())), traceback.format_exc())
        )
    pipe.close()


def die_while_learning(assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that is killed before its twentieth mean."""
    _before_a_mean(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    learners.run_learner(assignment, pipe)


def tell_process(folder: Path, assignment: ActorAssignment, pipe: Connection) -> None:
    """The main function of an actor whose process is in a file."""
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "actor")
    run_actor(assignment, pipe)


def kill_the_actor_and_await_the_next(folder: Path, assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that gets no batch, as the actor has died, until there is another."""

    def kill_and_await(_: SharedGradients) -> None:
        actor = (folder / "actor").read_text()
        os.kill(int(actor), signal.SIGKILL)
        until(lambda: (folder / "actor").read_text() != actor)

    _before_a_mean(kill_and_await)
    learners.run_learner(assignment, pipe)


def starve(folder: Path, assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that gets no batch any more."""

    def await_end(gradients: SharedGradients) -> None:
        told = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: told.set())
        (folder / "starved").touch()
        assert told.wait(SECONDS), "training does not end"
        gradients.end()
        raise TrainingEnded

    _before_a_mean(await_end)
    learners.run_learner(assignment, pipe)


def _before_a_mean(act: Callable[[SharedGradients], None]) -> None:
    """Calls `act` before the twentieth mean of this process."""
    mean = SharedGradients.mean
    left = 20

    def act_and_mean(gradients: SharedGradients) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            act(gradients)
        mean(gradients)

    SharedGradients.mean = act_and_mean  # type: ignore[assignment, method-assign]


def fail_to_begin(assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that fails at once."""
    pipe.send(ProcessFailure("no place here", fatal=True))


def name_gpus(assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that fails with the GPUs that it sees."""

    def fail(*_: object) -> None:
        raise LearnerError(f"it sees the GPUs {os.environ.get('CUDA_VISIBLE_DEVICES')}")

    learners._learn = fail  # type: ignore[assignment]
    learners.run_learner(assignment, pipe)


def fail_while_learning(assignment: learners.LearnerAssignment, pipe: Connection) -> None:
    """The main function of a learner that fails before its twentieth mean."""

    def fail(_: SharedGradients) -> None:
        raise RuntimeError("no gradient here")

    _before_a_mean(fail)
    learners.run_learner(assignment, pipe)
