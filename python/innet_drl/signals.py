"""Signals that end a run: the command ends by the same signal, once everything is written.

So a shell's loop over seeds ends at Ctrl-C, and a scheduler sees that the run did not succeed.
"""

from __future__ import annotations

import atexit
import os
import signal
import stat
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that a terminal, its loss, or a supervisor sends to every process of a run."""


class Interrupted(KeyboardInterrupt):
    """A signal has ended a run, whose files are complete."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def handle(handler: Callable[[int, FrameType | None], None]) -> dict[signal.Signals, Any]:
    """Sets the handler of the signals that are not ignored, as by `nohup`, and returns the handlers before."""
    heard = [number for number in END_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in heard}


def leave_terminal(number: int) -> None:
    """After SIGHUP, which tells of a lost terminal, drops output to it, which would fail."""
    if number != signal.SIGHUP:
        return
    with open(os.devnull, "wb") as nothing:
        for file in (1, 2):
            if stat.S_ISCHR(os.fstat(file).st_mode):
                os.dup2(nothing.fileno(), file)


def status_of(error: KeyboardInterrupt) -> int:
    """Exit status of an interrupt, as shells show it: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + (error.number if isinstance(error, Interrupted) else signal.SIGINT)


def end_by(error: KeyboardInterrupt) -> int:
    """Ends this process by the signal of an interrupt, and returns the exit status if it survives it (as process 1)."""
    number = status_of(error) - 128
    # Another signal must not interrupt the end.
    signal.signal(number, signal.SIG_IGN)
    # A signal skips what the interpreter does at its end.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    return status_of(error)
