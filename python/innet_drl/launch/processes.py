"""Processes of a run: how they start, report, and end with the learner's process.

Each child reports over a pipe of its own, so that one that dies leaves no lock held. It ends on SIGTERM, and when
the learner's process is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from innet_drl.launch.fork_server import END_SIGNALS, forking, start_fork_server
from innet_drl.train.errors import ProcessError

__all__ = [
    "END_SIGNALS",
    "MAIN_GUARD",
    "ProcessFailure",
    "await_end",
    "end_with_parent",
    "forbid_in_children",
    "forking",
    "silence_logs",
    "start",
    "start_fork_server",
]

MAIN_GUARD = "a script that trains does so under `if __name__ == '__main__':`, because actors import the script"

@dataclass(frozen=True)
class ProcessFailure:
    """The last message of a process that failed."""

    message: str
    fatal: bool
    """A replacement would fail in the same way."""
    by_memory: bool = False
    """The memory came back empty: a replacement counts as no restart."""


def forbid_in_children() -> None:
    """Refuses to train where a process of a run imports the caller's script.

    Raises:
        ProcessError: The script trains as soon as it is imported.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ProcessError(MAIN_GUARD)


def start(
    main: Callable[..., None], name: str, *arguments: Any, duplex: bool = True, daemon: bool = True
) -> tuple[Any, multiprocessing.connection.Connection]:
    """Calls `main(*arguments, pipe)` in a new process, and returns the process and the other end of the pipe.

    A daemon ends with this process at the latest, and may not start processes of its own.

    Raises:
        ProcessError: The process cannot be started.
    """
    ours, theirs = forking.Pipe(duplex)
    process = forking.Process(target=main, args=(*arguments, theirs), name=name, daemon=daemon)
    try:
        process.start()
    except (EOFError, OSError) as error:
        ours.close()
        raise ProcessError(
            f"{name} cannot be started: the process that it is forked from has ended ({type(error).__name__}); where "
            "that printed nothing, it was killed, perhaps for want of memory"
        ) from error
    finally:
        # With this copy closed, the pipe ends when the process ends.
        theirs.close()
    return process, ours


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
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def await_end(process: Any, seconds: float) -> None:
    """Waits for a process to end, and kills it if it has not."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
