"""Ends an actor whose environment hangs, and prints the stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import signal

EXIT_CODE = -signal.SIGALRM
"""Exit code of a hung process."""


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

    It takes the process's timer of SIGALRM. `None` is no limit.
    """
    return contextlib.nullcontext() if seconds is None else _Watchdog(seconds)
