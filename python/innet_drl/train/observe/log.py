"""The log of a command: records of `logging`, formatted by loguru, on the console of the page.

The package logs through `logging`; a program that embeds it configures handlers of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
from collections.abc import Iterator
from typing import IO, cast

import rich
from loguru import logger
from rich.console import Console

TRAINING_LOGGERS = ("innet_drl.analysis", "innet_drl.launch", "innet_drl.train")
"""Loggers shown from level INFO on. The core, which logs to `innet_drl`, is shown from WARNING on."""
LOG_FORMAT = "{time:HH:mm:ss} {level:<7} {message}"


class _ToLoguru(logging.Handler):
    """Forwards records of `logging` to loguru, for a common format."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "innet_drl" or record.levelno >= logging.WARNING:
            logger.log(record.levelname, record.getMessage())


class _UnblockedStream(io.TextIOBase):
    """Writes what a pipe takes without waiting. Texts for a full pipe are lost, and counted."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._lost = 0

    def write(self, text: str) -> int:
        lost = f"{self._lost} parts of the log are lost: nobody read it\n" if self._lost else ""
        data = (lost + text).encode(errors="backslashreplace")
        # A pipe that is ready takes `PIPE_BUF` bytes.
        for begin in range(0, len(data), select.PIPE_BUF):
            if not self._ready.poll(0):
                self._lost += 1
                return len(text)
            os.write(self._descriptor, data[begin : begin + select.PIPE_BUF])
        self._lost = 0
        return len(text)


@contextlib.contextmanager
def logs_on_console(console: Console | None = None) -> Iterator[None]:
    """Prints the package's logs on the page's console, formatted by loguru; replaces loguru's sinks.

    A pipe that nobody reads holds nobody up.
    """
    to_loguru, package = _ToLoguru(), logging.getLogger("innet_drl")
    console = console or rich.get_console()
    # Notebooks replace the standard streams by others, which have no descriptor.
    with contextlib.suppress(OSError, ValueError):
        if not console.is_terminal and console.file in (sys.stdout, sys.stderr):
            console.file = cast(IO[str], _UnblockedStream(console.file.fileno()))
    logger.remove()
    logger.add(lambda line: console.out(line, end="", highlight=False), format=LOG_FORMAT, level="INFO", colorize=False)
    package.addHandler(to_loguru)
    # A module of an environment may add a handler to the root logger, which would repeat each line.
    package.propagate = False
    for name in TRAINING_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        if isinstance(console.file, _UnblockedStream):
            # The console's default: the standard stream of the moment.
            console.file = cast(IO[str], None)
        package.propagate = True
        package.removeHandler(to_loguru)
        logger.remove()
        logger.add(sys.stderr, format=LOG_FORMAT, level="INFO")
