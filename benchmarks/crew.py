"""Processes of a benchmark, connected by pipes; the failure of one ends the measurement."""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, Self

from innet_drl.launch.processes import ProcessFailure, Stopped, await_end, start

START_SECONDS = 120.0
"""Timeout of a message, which covers the start of a process and its last operation."""


STOP_SECONDS = 20.0
"""Seconds that processes have to end before they are killed."""


class Crew:
    """The processes of a case and the messages received from them. They end with the context."""

    def __init__(self) -> None:
        self._processes: dict[Connection, Any] = {}
        self._received: dict[Connection, deque[Any]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe, process in self._processes.items():
            pipe.close()
            process.terminate()
        for process in self._processes.values():
            await_end(process, STOP_SECONDS)

    def start(self, role: Callable[..., None], *arguments: Any) -> Connection:
        """Calls `role(pipe, *arguments)` in a new process, and returns the other end of the pipe."""
        process, pipe = start(_run, "a process of the benchmark", role, arguments)
        self._processes[pipe], self._received[pipe] = process, deque()
        return pipe

    def receive(self, pipe: Connection, extra_seconds: float = 0.0) -> Any:
        """Returns the next message of one process. Receives from all processes, to detect the failure of any.

        Raises:
            SystemExit: A process failed or ended, or no message was received for `START_SECONDS + extra_seconds`.
        """
        give_up = time.monotonic() + START_SECONDS + extra_seconds
        while not self._received[pipe]:
            ready = wait(list(self._processes), give_up - time.monotonic())
            if not ready:
                raise SystemExit("a process of the benchmark does not answer")
            for each in ready:
                assert isinstance(each, Connection)
                self._received[each].append(self._next_message(each))
        return self._received[pipe].popleft()

    def _next_message(self, pipe: Connection) -> Any:
        try:
            message = pipe.recv()
        except (EOFError, OSError) as error:
            raise SystemExit("a process of the benchmark ended, perhaps for want of memory") from error
        if isinstance(message, ProcessFailure):
            raise SystemExit(str(message.whole))
        return message


def _run(role: Callable[..., None], arguments: tuple[Any, ...], pipe: Connection) -> None:
    # The command handles Ctrl-C, and ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM,))
    try:
        role(pipe, *arguments)
    except (Stopped, BrokenPipeError, EOFError):
        # The command closes the pipe once it has the results.
        pass
    except (Exception, SystemExit) as error:
        pipe.send(ProcessFailure.of(error, fatal=True))
