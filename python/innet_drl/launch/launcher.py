"""Launchers, which start the processes of a run, and these processes: how they are forked, report and end.

`Launcher` is the interface; `innet_drl.launch.ray` is another implementation than the one for this machine.

A fork server imports torch once; the run's processes are forked from it. It is not the fork server of
`multiprocessing`, which belongs to the caller's program, whose processes need other modules and unblocked signals.
Each child has its own pipe for reports, so that a dying process leaves no lock held. It ends on SIGTERM, and with the
learner's process.
"""

from __future__ import annotations

import abc
import contextlib
import faulthandler
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from types import FrameType
from typing import Any, Self

import innet_drl as innet
from innet_drl.signals import END_SIGNALS
from innet_drl.train.errors import ProcessError, TrainingError, trace_of
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.values import importing

IMPORT_FAILED = 1
"""Exit code of a process that raised before its main function, or was ended by C code of its environment."""
HUNG = -signal.SIGALRM
"""Exit code of a process that a `watchdog` has ended."""
NO_MAIN_GUARD = 3
"""Exit code of a process whose import of the caller's script would train again."""
MAIN_GUARD = (
    "a script that trains does so under `if __name__ == '__main__':`, because actors and `train.load` import the script"
)
_IMPORTED_BY = os.getpid()

_server = forkserver.ForkServer()
_server.set_forkserver_preload(["innet_drl.launch.actors"])


class _Popen(popen_forkserver.Popen):
    """A process forked from `_server`; the base class forks it from the fork server of `multiprocessing`."""

    def _launch(self, process_obj: Any) -> None:
        buffer = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), buffer)
            reduction.dump(process_obj, buffer)
        finally:
            context.set_spawning_popen(None)
        self.sentinel, pipe = _server.connect_to_new_process(self._fds)  # type: ignore[attr-defined]
        # The child detects the end of this process by this end of the pipe.
        ours = os.dup(pipe)
        self.finalizer = util.Finalize(self, util.close_fds, (ours, self.sentinel))  # type: ignore[attr-defined]
        self.pid = forkserver.read_signed(self.sentinel)

        def write() -> None:
            # A process that has died is noticed by its end.
            with contextlib.suppress(BrokenPipeError), open(pipe, "wb") as file:
                file.write(buffer.getbuffer())

        # The process reads only after it has imported the program, which may take seconds.
        threading.Thread(target=write, daemon=True).start()


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 - the name of the base class
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


forking = _Context()
"""Context of processes forked from the fork server of `start_fork_server`."""


def is_forked() -> bool:
    """Whether this process was forked from the fork server, which imported this module."""
    return os.getpid() != _IMPORTED_BY


def start_fork_server() -> None:
    """Starts the fork server, unless it runs.

    Actors are not forked from this process, as they would inherit its locks in unknown states.
    """
    # Started before the signals are blocked: it unblocks signals of the process that starts it.
    resource_tracker.ensure_running()
    # A signal to the process group must not end the fork server before its actors. It inherits the blocked signals,
    # and ends when its pipe is closed by all processes. Actors unblock the signals that they handle.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        _server.ensure_running()
    except OSError as error:
        raise ProcessError(
            f"the process that actors are forked from cannot be started ({error}): its socket is in "
            f"{tempfile.gettempdir()}; where that path is long, set TMPDIR to a shorter one"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass(frozen=True)
class ProcessFailure:
    """The last message of a process that failed."""

    message: str
    fatal: bool
    """Whether a replacement would fail in the same way."""
    counts: bool = True
    """Whether a replacement counts as a restart: not after the loss of the memory or of the host."""
    trace: str = ""
    """Traceback of an unforeseen error, whose type and text are `message`, or of the user's code that caused it."""

    @classmethod
    def of(cls, error: BaseException, *, fatal: bool) -> ProcessFailure:
        """Returns the failure of an error; `fatal` applies to errors without a message for the user."""
        if isinstance(error, TrainingError):
            return cls(str(error), fatal=True, trace=trace_of(error))
        if isinstance(error, innet.ReplayError):
            return cls(str(error), fatal=True)
        return cls.unforeseen(error, fatal=fatal)

    @classmethod
    def unforeseen(cls, error: BaseException, *, fatal: bool) -> ProcessFailure:
        """Returns the failure of an unexpected error, for example of a user's environment."""
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
        trace = "".join(traceback.format_exception(error))
        return cls("; ".join(lines), fatal, trace=trace)

    @property
    def kind(self) -> str:
        """Key of failures with the same cause: the stack of the traceback, or the message."""
        return "\n".join(line for line in self.trace.splitlines() if line.startswith("  ")) or self.message

    @property
    def whole(self) -> str:
        """The message with the traceback."""
        return f"{self.message}\n{self.trace.rstrip()}" if self.trace else self.message


def forbid_in_children() -> None:
    """Refuses to train while a process of a run, or the loading of an agent, imports the caller's script."""
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if inheriting and is_forked():
        # The parent process prints the reason.
        sys.stdout.flush()
        os._exit(NO_MAIN_GUARD)
    if inheriting or importing.get():
        raise ProcessError(MAIN_GUARD)


def forbid_as_daemon(config: Config) -> None:
    """Refuses to train in a process that may start no processes, such as the workers of `multiprocessing.Pool`."""
    if multiprocessing.current_process().daemon and (config.async_environments or not config.serial):
        raise ProcessError(
            "a run starts processes, which multiprocessing forbids in daemons, such as the workers of "
            "multiprocessing.Pool: take concurrent.futures.ProcessPoolExecutor, or train in one process (serial)"
        )


def import_failure(exit_code: int | None) -> str | None:
    """Returns why an ended process of `start` did not reach its main function; `None` if it did."""
    if exit_code == NO_MAIN_GUARD:
        return MAIN_GUARD
    if exit_code == IMPORT_FAILED:
        return "its process could not import the program, and printed why"
    return None


def start(main: Callable[..., None], name: str, *arguments: Any) -> tuple[Any, multiprocessing.connection.Connection]:
    """Calls `main(*arguments, pipe)` in a new process, and returns the process and the other end of the pipe.

    It ends with this process at the latest.
    """
    ours, theirs = forking.Pipe()
    process = forking.Process(target=main, args=(*arguments, theirs), name=name, daemon=True)
    try:
        process.start()
    except (EOFError, OSError) as error:
        ours.close()
        raise ProcessError(
            f"{name} cannot be started: the process that it is forked from has ended ({type(error).__name__}); if it "
            "printed nothing, the system probably killed it: out of memory"
        ) from error
    finally:
        # With this copy closed, the end of the process closes the pipe.
        theirs.close()
    return process, ours


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable of this process in the context."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Stopped(BaseException):
    """SIGTERM was received. Raised by the signal's handler, so that it ends blocked calls too."""


class LeavesRun(BaseException):
    """The actor leaves its run, whose memory outlives it. Like `Stopped` it is not a failure."""


def prepare_to_play() -> None:
    """Prepares a process for environments, which it must close when SIGTERM raises `Stopped`."""
    # Ctrl-C, and the loss of the terminal, reach all of its processes, but the learner ends the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    silence_logs()
    end_with_parent()
    # Daemons may not start processes, such as environments, so that this flag is cleared here.
    multiprocessing.current_process().daemon = False
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # Processes of environments share the actor's process group, so that `await_end` can kill them.
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    # The end of a run closes environments during a step, of which Gymnasium warns.
    warnings.filterwarnings("ignore", message=".*Calling `close` while waiting")
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def _stop(number: int, frame: FrameType | None) -> None:
    # Only once: the process then closes its environments.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


class _Watchdog:
    """A timer of SIGALRM, for which `faulthandler` prints the stacks and leaves the process to the signal's default.

    It needs no GIL, which an environment in C++ may hold.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        faulthandler.register(signal.SIGALRM, chain=True)

    def __enter__(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def watchdog(seconds: float | None) -> contextlib.AbstractContextManager[None]:
    """Returns a context for calls of environments: after `seconds` in it the process prints its stacks and ends.

    `None` is no limit.
    """
    return contextlib.nullcontext() if seconds is None else _Watchdog(seconds)


def silence_logs() -> None:
    """Silences this process's logs: the terminal belongs to the learner, and core errors are raised as exceptions."""
    package = logging.getLogger("innet_drl")
    package.addHandler(logging.NullHandler())
    package.propagate = False


def end_with_parent() -> None:
    """Ends this process after the learner's process, even during a blocked call."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        # Kills the environments, which would wait for this process.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def await_end(process: Any, seconds: float) -> None:
    """Waits for a process to end, and kills it otherwise; kills leftover processes of its environments."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    # Only processes that called `prepare_to_play` have a process group.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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
