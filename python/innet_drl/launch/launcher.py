"""Launchers, which start the processes of a run: the interface, and its implementation for this machine.

`innet_drl.launch.ray` is another implementation.
"""

from __future__ import annotations

import abc
import multiprocessing.connection
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from innet_drl.launch.processes import ProcessFailure, await_end, start, start_fork_server


@dataclass(frozen=True)
class Ended:
    """The last message of each process, sent when it has ended."""

    exit_code: int | None
    """`None` if the launcher does not know it."""
    failure: ProcessFailure | None = None
    """The failure that the process reported, if any."""


class Launcher(abc.ABC):
    """Starts processes of a run, forwards their messages, and ends them with the run. Use it as a context manager.

    A launcher restarts nothing; the caller decides about replacements.
    """

    listen: str | None = None
    """Address at which an embedded memory is served to the launcher's processes; `None` is a Unix socket."""
    stop_seconds = 10.0
    """Seconds that a process may take to end before it is killed."""

    @abc.abstractmethod
    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        """Calls `main(*arguments, pipe)` in a new process; `pipe.send` sends its messages to this one.

        Args:
            name: Unique among the processes that run.
            main: Main function. It ends soon after its process received SIGTERM.
            arguments: Its arguments, which can be pickled.

        Raises:
            ProcessError: The process cannot be started.
        """

    @abc.abstractmethod
    def messages(self) -> list[tuple[str, Any]]:
        """Returns the names and messages of processes since the last call, without waiting.

        The last message of a process is `Ended`; its name is free again.
        """

    def begin_end(self) -> None:  # noqa: B027 - a launcher may leave it to `close`
        """Asks every process to end, without waiting, so that processes of several launchers end in parallel."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends every process, and waits for it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalLauncher(Launcher):
    """Starts processes on this machine, as children of this process. Each has a pipe of its own."""

    def __init__(self) -> None:
        self._processes: dict[str, Any] = {}
        self._pipes: dict[multiprocessing.connection.Connection, str] = {}

    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        """Forks the process from one that has imported torch."""
        start_fork_server()
        process, pipe = start(main, name, *arguments)
        self._processes[name] = process
        self._pipes[pipe] = name

    def messages(self) -> list[tuple[str, Any]]:
        """Returns the messages since the last call; ends processes that reported a failure."""
        received: list[tuple[str, Any]] = []
        for pipe, name in list(self._pipes.items()):
            # Forked environments may keep the pipe of a dead process open.
            failure, ended = None, not self._processes[name].is_alive()
            try:
                while failure is None and pipe.poll():
                    message = pipe.recv()
                    if isinstance(message, ProcessFailure):
                        failure, ended = message, True
                    else:
                        received.append((name, message))
            except (EOFError, ConnectionResetError):
                ended = True
            if ended:
                received.append((name, Ended(self._end(pipe), failure)))
        return received

    def _end(self, pipe: multiprocessing.connection.Connection) -> int | None:
        process = self._processes.pop(self._pipes.pop(pipe))
        pipe.close()
        await_end(process, self.stop_seconds)
        code: int | None = process.exitcode
        process.close()
        return code

    def begin_end(self) -> None:
        """Sends SIGTERM to every process."""
        for process in self._processes.values():
            process.terminate()

    def close(self) -> None:
        """Ends every process; kills those that do not end."""
        self.begin_end()
        deadline = time.monotonic() + self.stop_seconds
        for process in self._processes.values():
            await_end(process, max(0.0, deadline - time.monotonic()))
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()
