"""Standard output for a log that must not hold up training: a pipe that nobody reads blocks whoever writes to it."""

from __future__ import annotations

import contextlib
import io
import os
import queue
import sys
import threading
from collections.abc import Iterator
from typing import IO, cast

from rich.console import Console

MOST_TEXTS = 4096
"""Most texts that wait."""
LAST_SECONDS = 1.0
"""Longest wait for the last texts."""


class BackgroundStream(io.TextIOBase):
    """Writes to a file descriptor by a thread of its own. Texts are lost, and counted, while too many wait."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        # Not `Queue`: a signal's handler may log while its thread does.
        self._texts: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lost = 0
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Takes a text, without blocking; raises an earlier error of the descriptor."""
        if self._error is not None:
            raise self._error
        if self._texts.qsize() < MOST_TEXTS:
            self._texts.put(text)
        else:
            self._lost += 1
        return len(text)

    def close(self) -> None:
        """Waits until all texts are written, at most for a second."""
        self._texts.put(None)
        self._thread.join(LAST_SECONDS)

    def _write_all(self) -> None:
        while (text := self._texts.get()) is not None:
            if self._lost:
                text, self._lost = f"{text}{self._lost} parts of the log are lost: nobody read it\n", 0
            rest = text.encode(errors="backslashreplace")
            try:
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:
                self._error = error
                return


@contextlib.contextmanager
def never_blocking(console: Console) -> Iterator[None]:
    """Lets a console of standard output or error write to a pipe, or a file, by a `BackgroundStream`."""
    file = console.file
    if console.is_terminal or file not in (sys.stdout, sys.stderr):
        yield
        return
    try:
        descriptor = file.fileno()
    except (OSError, ValueError):
        # It has none, as in a notebook.
        yield
        return
    file.flush()
    stream = BackgroundStream(descriptor)
    console.file = cast(IO[str], stream)
    try:
        yield
    finally:
        # The console's default: the standard stream of the moment.
        console.file = cast(IO[str], None)
        stream.close()
