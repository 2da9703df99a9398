"""Processes of a run: forked from one that has imported torch, and ended with the learner's process.

Each child reports over a pipe of its own, so that one that dies leaves no lock held. It ends on SIGTERM, and when
the learner's process is gone.
"""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

from innet_drl.train.errors import ProcessError

MAIN_GUARD = "a script that trains does so under `if __name__ == '__main__':`, because actors import the script"

END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a supervisor sends to every process of a run."""

forking = multiprocessing.get_context("forkserver")
"""Context of processes that are forked from one that has imported torch (`start_fork_server`)."""


@dataclass(frozen=True)
class ProcessFailure:
    """The last message of a process that failed."""

    message: str
    fatal: bool
    """A replacement would fail in the same way."""
    by_memory: bool = False
    """The memory came back empty: a replacement counts as no restart."""


def start_fork_server() -> None:
    """Starts the process that actors are forked from, unless it runs: it imports torch once for all of them.

    Actors are not forked from this process, whose threads and locks they would inherit in unknown states.

    Raises:
        ProcessError: The process cannot be started.
    """
    forking.set_forkserver_preload(["innet_drl.launch.actors"])
    # It unblocks the signals of the process that starts it.
    resource_tracker.ensure_running()
    # A signal to the process group must not end the fork server before its last actor has ended. It inherits the
    # mask, and ends when no process holds its pipe any more; an actor unblocks the signals that it handles.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, END_SIGNALS)
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise ProcessError(
            f"the process that actors are forked from cannot be started ({error}): its socket is in "
            f"{tempfile.gettempdir()}; where that path is long, set TMPDIR to a shorter one"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
