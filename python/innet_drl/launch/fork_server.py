"""The process that the processes of a run are forked from: it has imported torch once for all of them.

It belongs to this package alone. The fork server of `multiprocessing` belongs to the caller's program, whose processes
need other modules, and receive signals.
"""

from __future__ import annotations

import io
import os
import signal
import tempfile
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from typing import Any

from innet_drl.train.errors import ProcessError

END_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Signals that a terminal or a supervisor sends to every process of a run."""

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
        # With this copy the child sees the end of this process.
        ours = os.dup(pipe)
        self.finalizer = util.Finalize(self, util.close_fds, (ours, self.sentinel))  # type: ignore[attr-defined]
        with open(pipe, "wb") as file:
            file.write(buffer.getbuffer())
        self.pid = forkserver.read_signed(self.sentinel)


class _Process(context.ForkServerProcess):
    @staticmethod
    def _Popen(process_obj: Any) -> _Popen:  # noqa: N802 - the name of the base class
        return _Popen(process_obj)


class _Context(context.ForkServerContext):
    Process = _Process


forking = _Context()
"""Context of processes that are forked from one that has imported torch (`start_fork_server`)."""


def is_forked() -> bool:
    """Whether this process was forked from the process of `start_fork_server`, which imported this module."""
    return os.getpid() != _IMPORTED_BY


def start_fork_server() -> None:
    """Starts the process that actors are forked from, unless it runs.

    Actors are not forked from this process, whose threads and locks they would inherit in unknown states.
    """
    # It unblocks the signals of the process that starts it.
    resource_tracker.ensure_running()
    # A signal to the process group must not end the fork server before its last actor has ended. It inherits the
    # mask, and ends when no process holds its pipe any more; an actor unblocks the signals that it handles.
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
