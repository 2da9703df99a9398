"""The processes of one case: actors and the learner, each with its clock.

A role says "ready", is told when to begin, and sends what its clock counted. Its computing is waited for
(`Case.actor_ms`, `Case.update_ms`), not done: in the paper actors, memory and learner are machines of their own, and
here they would take the cores from each other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Self

import numpy as np

import innet_drl as innet
from innet_drl.bench import scene, systems
from innet_drl.bench.settings import BATCH, Case, parameters
from innet_drl.bench.systems import Clock
from innet_drl.faults import TrainingError

START_SECONDS = 120.0
"""For a role to get ready, and for what it has under way at the end."""

Laps = dict[str, list[float]]


class BenchError(TrainingError):
    """A case could not be measured; the message says why."""


@dataclass(frozen=True)
class Failed:
    """The last word of a role that failed."""

    message: str


@dataclass(frozen=True)
class Measured:
    """What the clocks counted in one case."""

    actors: list[Laps]
    learner: Laps


def measure(case: Case, address: str) -> Measured:
    """Runs actors and learner against a server.

    Raises:
        BenchError: One of them failed.
    """
    with _Roles(case, address) as roles:
        # It makes the table, so it comes first.
        learner = roles.start(_learn)
        roles.hear(learner)
        actors = [roles.start(_act, index) for index in range(case.actors)]
        for each in actors:
            roles.hear(each)
        learner.send("the replay is full")
        roles.hear(learner)
        for each in (learner, *actors):
            each.send("begin")
        told = [roles.hear(each, case.seconds) for each in actors]
        return Measured(told, roles.hear(learner, case.seconds))


class _Roles:
    """The processes of a case, and what they say."""

    def __init__(self, case: Case, address: str) -> None:
        self._case, self._address = case, address
        self._context = multiprocessing.get_context("forkserver")
        self._processes: dict[Connection, Any] = {}
        self._said: dict[Connection, deque[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.kill()
            process.join()

    def start(self, role: Callable[..., None], *arguments: Any) -> Connection:
        """Starts a process, and returns the way to talk to it."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=_run, args=(role, theirs, self._case, self._address, *arguments), daemon=True
        )
        process.start()
        theirs.close()
        self._processes[ours], self._said[ours] = process, deque()
        return ours

    def hear(self, pipe: Connection, more: float = 0.0) -> Any:
        """The next word of one of them; where any of them fails, the others would wait for it."""
        give_up = time.monotonic() + START_SECONDS + more
        while not self._said[pipe]:
            ready = wait(list(self._processes), give_up - time.monotonic())
            if not ready:
                raise BenchError("a process of the benchmark does not answer")
            for each in ready:
                assert isinstance(each, Connection)
                self._said[each].append(self._receive(each))
        return self._said[pipe].popleft()

    def _receive(self, pipe: Connection) -> Any:
        try:
            word = pipe.recv()
        except (EOFError, OSError) as error:
            raise BenchError("a process of the benchmark ended, perhaps for want of memory") from error
        if isinstance(word, Failed):
            raise BenchError(word.message)
        return word


def _run(role: Callable[..., None], pipe: Connection, *arguments: Any) -> None:
    # Ctrl-C is the command's.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        # The command closes the pipe when it has what it wants.
        with contextlib.suppress(EOFError):
            role(pipe, *arguments)
    except (TrainingError, innet.ReplayError) as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}"))


def _act(pipe: Connection, case: Case, address: str, index: int) -> None:
    with systems.actor(case, address, index, scene.load(case.scene)) as actor:
        for number in range(case.warm_up):
            actor.push(number)
        actor.pull()
        pipe.send("ready")
        pipe.recv()
        # Actors that ran for a while push at different times.
        time.sleep(1e-3 * case.actor_ms * index / case.actors)
        clock, end, number = Clock(), time.perf_counter() + case.seconds, case.warm_up
        while time.perf_counter() < end:
            actor.pull()
            clock.lap("pull")
            time.sleep(1e-3 * case.actor_ms)
            clock.lap("compute")
            actor.push(number)
            clock.lap("push")
            number += 1
        pipe.send(clock.laps)
        pipe.recv()


def _learn(pipe: Connection, case: Case, address: str) -> None:
    tensors = parameters()
    random = np.random.default_rng(0)
    with systems.learner(case, address) as learner:
        learner.publish(tensors)
        pipe.send("ready")
        _receive_until_told(pipe, learner)
        for _ in range(3):
            learner.sample(Clock())
        pipe.send("ready")
        pipe.recv()
        clock, parts, end = Clock(), Clock(), time.perf_counter() + case.seconds
        while time.perf_counter() < end:
            parts.lap("other")
            batch = learner.sample(parts)
            clock.lap("sample")
            time.sleep(1e-3 * case.update_ms)
            clock.lap("train")
            learner.update(batch["key"], random.random(BATCH))
            clock.lap("priorities")
            learner.publish(tensors)
            clock.lap("set")
            del batch
        del parts.laps["other"]
        pipe.send(clock.laps | {f"sample: {name}": laps for name, laps in parts.laps.items()})
        _receive_until_told(pipe, learner)


def _receive_until_told(pipe: Connection, learner: systems.Learner) -> None:
    """Actors wait where nobody takes what they push."""
    while not pipe.poll(0.01):
        learner.receive(Clock())
    pipe.recv()
