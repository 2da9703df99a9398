"""Processes of a run: how they start, report, and end with the learner's process.

Each child reports over a pipe of its own, so that one that dies leaves no lock held. It ends on SIGTERM, and when
the learner's process is gone.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import innet_drl as innet
from innet_drl.launch.fork_server import END_SIGNALS, forking, is_forked, start_fork_server
from innet_drl.train.errors import Message, ProcessError, TrainingError
from innet_drl.train.importing import importing

__all__ = [
    "END_SIGNALS",
    "LeavesRun",
    "ProcessFailure",
    "Stopped",
    "await_end",
    "end_with_parent",
    "environment_variable",
    "forbid_in_children",
    "forking",
    "import_failure",
    "prepare_to_play",
    "silence_logs",
    "start",
    "start_fork_server",
]

IMPORT_FAILED = 1
"""Exit code of a process of a run that raised before its main function, which sends every error."""
NO_MAIN_GUARD = 3
"""Exit code of a process of a run that ends since the script trains when it is imported."""
MAIN_GUARD = (
    "a script that trains does so under `if __name__ == '__main__':`, because actors and `train.load` import the script"
)


@dataclass(frozen=True)
class ProcessFailure:
    """The last message of a process that failed."""

    message: str | Message
    fatal: bool
    """A replacement would fail in the same way."""
    counts: bool = True
    """A replacement counts as a restart: not where the memory came back empty, or the host was lost."""
    trace: str = ""
    """Traceback of an unforeseen error, whose type and text are `message`."""

    @classmethod
    def of(cls, error: Exception, *, fatal: bool) -> ProcessFailure:
        """The failure by an error; `fatal` concerns those that have no message for the user."""
        if isinstance(error, TrainingError | innet.ReplayError):
            return cls(error.message if isinstance(error, TrainingError) else str(error), fatal=True)
        return cls.unforeseen(error, fatal=fatal)

    @classmethod
    def unforeseen(cls, error: Exception, *, fatal: bool) -> ProcessFailure:
        """The failure by an error of any kind, such as one of a user's environment."""
        lines = "".join(traceback.format_exception_only(error)).strip().splitlines()
        trace = "".join(traceback.format_exception(error))
        return cls("; ".join(lines), fatal, trace=trace)

    @property
    def kind(self) -> str:
        """The stack of the traceback, which failures of one cause share, or the message."""
        return "\n".join(line for line in self.trace.splitlines() if line.startswith("  ")) or str(self.message)

    @property
    def whole(self) -> str | Message:
        """The message with the traceback."""
        return (
            Message("{message}\n{trace}", message=self.message, trace=self.trace.rstrip())
            if self.trace
            else self.message
        )


def forbid_in_children() -> None:
    """Refuses to train where a process of a run, or the loading of its agent, imports the caller's script."""
    inheriting = getattr(multiprocessing.current_process(), "_inheriting", False)
    if inheriting and is_forked():
        # The process that started this one says why.
        sys.stdout.flush()
        os._exit(NO_MAIN_GUARD)
    if inheriting or importing.get():
        raise ProcessError(MAIN_GUARD)


def import_failure(exit_code: int | None) -> str | None:
    """Returns why a process of `start` that ended did not reach its main function; `None` if it did."""
    if exit_code == NO_MAIN_GUARD:
        return MAIN_GUARD
    if exit_code == IMPORT_FAILED:
        return "its process could not import the program, and printed why"
    return None


def start(
    main: Callable[..., None], name: str, *arguments: Any, duplex: bool = True
) -> tuple[Any, multiprocessing.connection.Connection]:
    """Calls `main(*arguments, pipe)` in a new process, and returns the process and the other end of the pipe.

    It ends with this process at the latest.
    """
    ours, theirs = forking.Pipe(duplex)
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
        # With this copy closed, the pipe ends when the process ends.
        theirs.close()
    return process, ours


@contextlib.contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets a variable of this process's environment meanwhile."""
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
    """The actor leaves its run, whose memory outlives it. As `Stopped` it is no failure."""


def prepare_to_play() -> None:
    """Prepares a process of the run for environments, which it has to close when SIGTERM raises `Stopped`."""
    # Ctrl-C reaches every process of the terminal; the learner ends the run.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    silence_logs()
    end_with_parent()
    # To its parent it is a daemon, which ends with the parent. Daemons may not start processes, such as environments.
    multiprocessing.current_process().daemon = False
    os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # Environments that are processes are of the actor's group, by which `await_end` kills those that hang.
    with contextlib.suppress(PermissionError):
        os.setpgid(0, 0)
    # Gymnasium's warning about environments that are closed during a step: the end of a run does that.
    warnings.filterwarnings("ignore", message=".*Calling `close` while waiting")
    signal.signal(signal.SIGTERM, _stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, END_SIGNALS)


def _stop(number: int, frame: FrameType | None) -> None:
    # Once: the process then closes its environments.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise Stopped


def silence_logs() -> None:
    """Drops the logs of this process: the page is the learner's, and errors of the core reach it as exceptions."""
    package = logging.getLogger("innet_drl")
    package.addHandler(logging.NullHandler())
    package.propagate = False


def end_with_parent() -> None:
    """Ends this process when the learner's is gone, even while a call is blocked."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        # Environments, which would wait for this process.
        for child in multiprocessing.active_children():
            child.kill()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def await_end(process: Any, seconds: float) -> None:
    """Waits for a process to end and kills it if it has not; kills processes that its environments have left."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
    # The group is that of a process which has prepared to play. Others have none.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
