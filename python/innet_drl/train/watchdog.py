"""Ends an actor whose environment hangs, and prints where."""

from __future__ import annotations

import faulthandler
import sys


class Watchdog:
    """Context of a call of an environment: after `seconds` the process prints the stacks of its threads and exits.

    `faulthandler` does both on a thread without the interpreter lock, which an environment in C++ may hold.

    Args:
        seconds: Limit of one call; `None` for none.
    """

    EXIT_CODE = 1
    """Exit code of the process, which `faulthandler` fixes."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        if self._seconds is not None:
            faulthandler.dump_traceback_later(self._seconds, exit=True, file=sys.stderr)

    def __exit__(self, *_: object) -> None:
        if self._seconds is not None:
            faulthandler.cancel_dump_traceback_later()
