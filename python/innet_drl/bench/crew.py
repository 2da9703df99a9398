"""Processes that a benchmark talks to over pipes, and whose failures it hears."""

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

import innet_drl as innet
from innet_drl.train.errors import TrainingError

START_SECONDS = 120.0
"""For a role to get ready, and for what it has under way at the end."""


class BenchError(TrainingError):
    """A case could not be measured; the message says why."""


@dataclass(frozen=True)
class Failed:
    """The last word of a role that failed."""

    message: str


class Crew:
    """The processes of a case, and what they say. They end with it."""

    def __init__(self) -> None:
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
        """Calls `role(pipe, *arguments)` in a process of its own, and returns the other end of the pipe."""
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_run, args=(role, theirs, *arguments), daemon=True)
        process.start()
        theirs.close()
        self._processes[ours], self._said[ours] = process, deque()
        return ours

    def hear(self, pipe: Connection, more: float = 0.0) -> Any:
        """The next word of one of them; where any of them fails, the others would wait for it.

        Raises:
            BenchError: One of them failed or ended, or nobody spoke for `START_SECONDS` and `more`.
        """
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
