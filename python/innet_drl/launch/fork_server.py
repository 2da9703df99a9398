"""The fork server of a run: it imports torch once, and the run's processes are forked from it.

It is separate from the fork server of `multiprocessing`, which belongs to the caller's program: that program's
processes need other modules and unblocked signals.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import tempfile
import threading
from multiprocessing import context, forkserver, popen_forkserver, reduction, resource_tracker, spawn, util
from typing import Any

from innet_drl.signals import END_SIGNALS
from innet_drl.train.errors import ProcessError

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
