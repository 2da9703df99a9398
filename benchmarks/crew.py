"""Processes of a benchmark, each with a pipe; the failure of one ends the measurement.

It needs only the standard library, because workers in the environments of peers use it, too.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Self

START_SECONDS = 120.0
"""Timeout of a message, which covers the start of a process and its last operation."""
STOP_SECONDS = 20.0
"""Seconds that processes have to end before they are killed."""
_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class _End:
    """The last message of a process."""

    failure: str | None = None


class Crew:
    """Processes and the messages received from them. They end with the context."""

    def __init__(self) -> None:
        self._processes: dict[Connection, BaseProcess] = {}
        self._running: list[Connection] = []
        self._received: dict[Connection, deque[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            process.join(STOP_SECONDS)
            process.kill()
            process.join()

    def start(self, role: Callable[..., None], *arguments: Any) -> Connection:
        """Calls `role(*arguments, pipe)` in a new process, and returns the other end of the pipe."""
        pipe, theirs = _SPAWN.Pipe()
        process = _SPAWN.Process(target=_run, args=(role, arguments, theirs), daemon=True)
        with _uninterrupted():
            process.start()
        # With this copy closed, the end of the process closes the pipe.
        theirs.close()
        self._running.append(pipe)
        self._processes[pipe], self._received[pipe] = process, deque()
        return pipe

    def receive(self, pipe: Connection, extra_seconds: float = 0.0) -> Any:
        """Returns the next message of one process. Receives from all that run, to detect the failure of any.

        Raises:
            SystemExit: A process failed or ended too early, or no message was received for `START_SECONDS +
                extra_seconds`.
        """
        give_up = time.monotonic() + START_SECONDS + extra_seconds
        while not self._received[pipe]:
            if pipe not in self._running:
                raise SystemExit("a process of the benchmark has ended too early")
            self._receive_all(give_up - time.monotonic())
        return self._received[pipe].popleft()

    def _receive_all(self, timeout: float) -> None:
        ready = wait(self._running, timeout)
        if not ready:
            raise SystemExit("a process of the benchmark does not answer")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                message = pipe.recv()
            except (EOFError, OSError) as error:
                raise SystemExit("a process of the benchmark was ended, perhaps for want of memory") from error
            if not isinstance(message, _End):
                self._received[pipe].append(message)
            elif message.failure is None:
                self._running.remove(pipe)
            else:
                raise SystemExit(message.failure)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Postpones Ctrl-C and SIGTERM. Processes that start in the context never get Ctrl-C: the command ends them."""
    received: list[int] = []
    ends = (signal.SIGINT, signal.SIGTERM)
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in ends}
    # Its own start would unblock Ctrl-C.
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for each in received:
            signal.raise_signal(each)


def _run(role: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    failure = None
    try:
        role(*arguments, pipe)
    except (BrokenPipeError, EOFError):
        # The command closes the pipe once it has the results.
        pass
    except SystemExit as error:
        failure = str(error)
    except BaseException as error:
        lines = traceback.format_exception(error)
        failure = f"{lines[-1]}{''.join(lines)}"
    with contextlib.suppress(OSError):
        pipe.send(_End(failure))
