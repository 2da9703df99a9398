"""Processes of a run: forked from one that has imported torch, ended with the learner's.

A child tells the learner what it did over a pipe of its own, so that one that dies takes no lock with it. It
ends on SIGTERM, and when the learner's process is gone.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
import tempfile
import threading
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from typing import Any

from innet_drl.train.errors import ActorError

ENDING = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a supervisor sends to every process of the run."""

forking = multiprocessing.get_context("forkserver")
"""Processes that come from one that has imported torch (`prepare`)."""


@dataclass(frozen=True)
class Failure:
    """The last word of an actor that failed."""

    message: str
    fatal: bool
    """Another actor would fail in the same way."""


def prepare() -> None:
    """Starts the process that actors are forked from, unless there is one: it imports torch, once for all of them.

    They are not forked from this one, whose threads and locks they would inherit in unknown states.

    Raises:
        ActorError: It cannot be started.
    """
    forking.set_forkserver_preload(["innet_drl.train.actor", "innet_drl.launch.actors"])
    # It unblocks the signals of whoever starts it.
    resource_tracker.ensure_running()
    # A signal to the group must end it neither while it imports nor before its last actor has ended. It keeps the
    # mask, and ends when nobody is left who could ask it for an actor; an actor unblocks what it has handlers for.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        forkserver.ensure_running()
    except OSError as error:
        raise ActorError(
            f"the process that actors are forked from cannot be started ({error}): its socket is in "
            f"{tempfile.gettempdir()}; where that path is long, set TMPDIR to a shorter one"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    """Waits for a process to end, and kills it when it has not."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
