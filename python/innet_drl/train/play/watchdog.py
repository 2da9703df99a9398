"""Ends an actor whose environment hangs, and prints the stacks."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Iterator

EXIT_CODE = 1
"""Exit code of a hung process, determined by `faulthandler`."""


@contextlib.contextmanager
def watched(seconds: float | None) -> Iterator[None]:
    """Guards a call of an environment: after `seconds` the process prints the stacks of its threads and exits.

    `faulthandler` does both on a thread without the GIL, which an environment in C++ may hold.
    """
    if seconds is None:
        yield
        return
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
