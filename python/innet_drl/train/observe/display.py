"""What a command shows: lines of metrics, in a terminal a live page of them, and logs above it.

The package logs through `logging`; a program that embeds it configures handlers of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Self, cast

import loguru
import rich
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from innet_drl.train.observe.metrics import METRICS, Metrics, values_of

logger = logging.getLogger(__name__)

PLAIN_SECONDS = 10.0
"""Seconds between plain lines."""
PROGRESS_SECONDS = 2.0
"""Seconds of an activity before its first plain line."""
DIGITS = {"": 4, "return": 3, "ratio": 2, "updates/s": 1}
"""Digits after the point, by unit; others have none."""

Progress = Callable[[str, str], None]
"""Shows the progress of a long activity: called often with its name and the completed part."""


def silent(activity: str, done: str) -> None:
    """A `Progress` that shows nothing."""


class Display:
    """Logs the most important numbers periodically."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._last_line = -PLAIN_SECONDS
        self._activity = ""
        self._next_progress = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the display."""

    def say(self, what: str) -> None:
        """Shows the current phase of the start."""

    def show(self, metrics: Metrics, note: str) -> None:
        """Shows a line of metrics and a note on the run's state."""
        if time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._last_line = time.monotonic()
            self.print(plain_line(metrics, note))

    def show_note(self, note: str, time_s: float | None = None) -> None:
        """Updates note and time, with the numbers of the last line; any thread may call it."""

    def progress(self, activity: str, done: str) -> None:
        """Shows the progress of a long activity (`Progress`); any thread may call it."""
        now = time.monotonic()
        if activity != self._activity:
            self._activity, self._next_progress = activity, now + PROGRESS_SECONDS
        elif now >= self._next_progress:
            self._next_progress = now + PLAIN_SECONDS
            self.print(f"{activity}: {done}")

    def print(self, line: str) -> None:
        """Prints a plain line."""
        logger.info("%s", line)


def plain_line(metrics: Metrics, note: str = "") -> str:
    """The most important numbers in one line, for logs."""

    def text(name: str) -> str:
        return shown(name, metrics.get(name))

    left = f" ({text('seconds_left')} left)" if "seconds_left" in metrics else ""
    return (
        f"{text('time_s')}{left}  {text('agent_steps')} steps ({text('agent_steps_per_s')}/s)  "
        f"{text('learner_updates')} updates ({text('learner_updates_per_s')}/s)  "
        f"score {text('return_mean')} (best {text('return_best')})  "
        f"loss {text('td_loss')}  replay {text('replay_steps')}" + (f"  {note}" if note else "")
    )


def shown(name: str, value: float | None) -> str:
    """Formats the value of a metric, which may not exist yet, by its unit."""
    unit = METRICS[name].unit
    if unit == "score":
        return score(value)
    if value is None:
        return "-"
    if unit == "share of 1":
        return f"{value:.0%}"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB"
    return clock(value) if unit == "seconds" else number(value, DIGITS.get(unit, 0))


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> str:
    """Returns rows of cells as a table with aligned columns; the first `left` columns are left-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            text.ljust(width) if number < left else text.rjust(width)
            for number, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def clock(seconds: float) -> str:
    """Formats seconds as minutes and seconds, from an hour on as hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:d}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:d}:{rest:02d}"


def number(value: float | None, digits: int) -> str:
    """Formats a number that may not exist yet."""
    return "-" if value is None else f"{value:,.{digits}f}"


def score(value: float | None) -> str:
    """Formats a score that may not exist yet, with at least three significant digits."""
    return f"{value:#.3g}" if value is not None and abs(value) < 10 else number(value, 1)


TRAINING_LOGGERS = ("innet_drl.analysis", "innet_drl.launch", "innet_drl.train")
"""Loggers shown from level INFO on. The core, which logs to `innet_drl`, is shown from WARNING on."""
LAST_MILLISECONDS = 1000
"""Longest wait at the end for a reader who has missed parts of the log."""
LOG_FORMAT = "{time:HH:mm:ss} {level:<7} {message}"


class _ToLoguru(logging.Handler):
    """Forwards records of `logging` to loguru, for a common format."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "innet_drl" or record.levelno >= logging.WARNING:
            loguru.logger.log(record.levelname, record.getMessage())


class _UnblockedStream(io.TextIOBase):
    """Writes what a pipe takes without waiting. Texts for a full pipe are lost, and counted."""

    encoding = "utf-8"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._ready = select.poll()
        self._ready.register(descriptor, select.POLLOUT)
        self._lost = 0

    def write(self, text: str, milliseconds: int = 0) -> int:
        """Writes a text, after what was lost before it; waits up to `milliseconds` for a full pipe."""
        lost = f"\n{self._lost} parts of the log are lost: nobody read it\n" if self._lost else ""
        data = (lost + text).encode(errors="backslashreplace")
        # A pipe that is ready takes `PIPE_BUF` bytes.
        for begin in range(0, len(data), select.PIPE_BUF):
            if not self._ready.poll(milliseconds):
                self._lost += 1
                return len(text)
            os.write(self._descriptor, data[begin : begin + select.PIPE_BUF])
        self._lost = 0
        return len(text)

    def close(self) -> None:
        """Says how much was lost, if somebody reads it within a second."""
        if self._lost:
            self.write("", LAST_MILLISECONDS)


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
            console.file.flush()
            console.file = cast(IO[str], _UnblockedStream(console.file.fileno()))
    loguru.logger.remove()
    loguru.logger.add(
        lambda line: console.out(line, end="", highlight=False), format=LOG_FORMAT, level="INFO", colorize=False
    )
    package.addHandler(to_loguru)
    # A module of an environment may add a handler to the root logger, which would repeat each line.
    package.propagate = False
    for name in TRAINING_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        yield
    finally:
        if isinstance(console.file, _UnblockedStream):
            console.file.close()
            # The console's default: the standard stream of the moment.
            console.file = cast(IO[str], None)
        package.propagate = True
        package.removeHandler(to_loguru)
        loguru.logger.remove()
        loguru.logger.add(sys.stderr, format=LOG_FORMAT, level="INFO")


SMALLEST_PAGE = (80, 22)
"""Smallest terminal, in columns and rows, for the page with log lines above it; smaller ones get plain lines."""
SHOWN = (
    ("time_s", "seconds_left"),
    ("agent_steps", "agent_steps_per_s"),
    ("learner_updates", "learner_updates_per_s"),
    ("return_mean", "return_best"),
    ("evaluation_mean", "evaluation_best"),
    ("td_loss", "q_mean"),
    ("samples_per_insert_now", "samples_per_insert_target"),
    ("replay_steps", "replay_bytes"),
)
"""Metrics of the page, row by row."""
SEVERAL = ("actor_scores", "actor_steps_per_s", "actor_waits", "learner_time", "actor_time")
"""Metrics of several values, each with a row of its own."""
REFRESH_SECONDS = 0.1
"""Seconds between updates of progress."""


class Page(Display):
    """The page of one run or command, or plain lines where it does not fit."""

    def __init__(self, title: str, console: Console | None = None, *, transient: bool = False) -> None:
        super().__init__(title)
        self._console = console or rich.get_console()
        fits = all(has >= needs for has, needs in zip(self._console.size, SMALLEST_PAGE, strict=True))
        has_page = self._console.is_terminal and fits
        self._live = Live(console=self._console, auto_refresh=False, transient=transient) if has_page else None
        self._shown: Metrics | None = None
        self._next_picture = 0.0

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self.say("starting")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, what: str) -> None:
        """Shows the current phase of the start."""
        if self._live is not None:
            self._live.update(Panel(Text(what, style="italic"), title=self.title), refresh=True)

    def show(self, metrics: Metrics, note: str) -> None:
        """Shows a line of metrics and a note on the run's state."""
        self._shown = metrics
        if self._live is not None:
            self._live.update(self._render(metrics, note), refresh=True)
        else:
            super().show(metrics, note)

    def print(self, line: str) -> None:
        """Prints a plain line on the console."""
        self._console.out(line, highlight=False)

    def show_note(self, note: str, time_s: float | None = None) -> None:
        """Updates note and time, with the numbers of the last line; any thread may call it."""
        if self._live is None:
            return
        if self._shown is None:
            self.say(note)
        else:
            metrics = self._shown if time_s is None else {**self._shown, "time_s": time_s}
            self._live.update(self._render(metrics, note), refresh=True)

    def progress(self, activity: str, done: str) -> None:
        """Shows the progress of a long activity (`Progress`); any thread may call it."""
        if self._live is None:
            super().progress(activity, done)
        elif time.monotonic() >= self._next_picture:
            self._next_picture = time.monotonic() + REFRESH_SECONDS
            self.show_note(f"{activity}: {done}")

    def _render(self, metrics: Metrics, note: str) -> Panel:
        numbers = Table.grid(padding=(0, 4))
        for row in SHOWN:
            numbers.add_row(*(_cell(name, shown(name, metrics.get(name))) for name in row))
        several = [_cell(name, _values(name, values_of(metrics, name))) for name in SEVERAL]
        return Panel(Group(numbers, *several, Text(note, style="italic")), title=self.title)


def page_of_command(title: str) -> Page:
    """Returns a page for a command's progress: on standard error, removed when the command has its result."""
    return Page(title, Console(stderr=True), transient=True)


def _cell(name: str, value: str) -> Text:
    return Text.assemble((f"{name} ", "dim"), value, no_wrap=True, overflow="ellipsis")


def _values(name: str, values: dict[str, float]) -> str:
    """Values of actors by their numbers, others with the largest first."""
    ordered = sorted(values, key=lambda key: int(key) if key.isdecimal() else -values[key])
    return "  ".join(f"{key}: {shown(name, values[key])}" for key in ordered) or "-"
