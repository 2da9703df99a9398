"""The page of a run: live in a terminal, with logs above it; plain lines elsewhere.

The package logs through `logging`, and the embedding program configures handlers; the command line uses
`logs_on_console`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Collection, Iterator
from typing import Any, Self

import rich
from loguru import logger
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from innet_drl.train.observe.background_stream import never_blocking
from innet_drl.train.observe.display import Display, shown
from innet_drl.train.observe.metrics import Metrics, parts
from innet_drl.train.observe.stopwatch import WAITING

SMALLEST_PAGE = (80, 22)
"""Smallest terminal, in columns and rows, for the page with log lines above it; smaller ones get plain lines."""
NAMES_WIDTH = 16
ACTOR_WIDTH = 9
"""Columns of a terminal for the names of an actor's numbers, and for each actor."""
TRAINING_LOGGERS = ("innet_drl.analysis", "innet_drl.launch", "innet_drl.train")
"""Loggers shown from level INFO on. The core, which logs to `innet_drl`, is shown from WARNING on."""
MOST_SHARES = 6
"""Number of the largest shares of time shown."""
REFRESH_SECONDS = 0.1
"""Seconds between updates of progress."""
LOG_FORMAT = "{time:HH:mm:ss} {level:<7} {message}"


class _ToLoguru(logging.Handler):
    """Forwards records of `logging` to loguru, for a common format."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.name != "innet_drl" or record.levelno >= logging.WARNING:
            logger.log(record.levelname, record.getMessage())


@contextlib.contextmanager
def logs_on_console(console: Console | None = None) -> Iterator[None]:
    """Prints the package's logs on the page's console, formatted by loguru; replaces loguru's sinks.

    A pipe that nobody reads holds nobody up.
    """
    to_loguru, package = _ToLoguru(), logging.getLogger("innet_drl")
    console = console or rich.get_console()
    logger.remove()
    logger.add(lambda message: _print(console, message), format=LOG_FORMAT, level="INFO", colorize=False)
    package.addHandler(to_loguru)
    # A module of an environment may add a handler to the root logger, which would repeat each line.
    package.propagate = False
    for name in TRAINING_LOGGERS:
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        with never_blocking(console):
            yield
    finally:
        package.propagate = True
        package.removeHandler(to_loguru)
        logger.remove()
        logger.add(sys.stderr, format=LOG_FORMAT, level="INFO")


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

    def line(self, metrics: Metrics, note: str) -> str:
        """The plain line, without the last numbers where a terminal would wrap them."""
        parts, width = super().line(metrics, note).split("  "), self._console.width
        while self._console.is_terminal and len(parts) > 1 and len("  ".join(parts)) > width:
            del parts[-1]
        return "  ".join(parts)

    def print(self, line: str) -> None:
        """Prints a plain line on the console."""
        _print(self._console, line)

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
        def text(name: str) -> str:
            return shown(name, metrics.get(name))

        left = f", {text('seconds_left')} left" if "seconds_left" in metrics else ""
        best = f", best {text('evaluation_best')}" if "evaluation_best" in metrics else ""
        numbers = Table.grid(padding=(0, 2))
        for _ in range(3):
            numbers.add_column()
        cells = [
            ("time", text("time_s") + left),
            ("steps/s", text("agent_steps_per_s")),
            ("frames", text("env_frames")),
            ("games", text("games")),
            ("updates/s", text("learner_updates_per_s")),
            ("updates", text("learner_updates")),
            ("score", f"{text('return_mean')}, best {text('return_best')}"),
            ("loss", text("td_loss")),
            ("Q", text("q_mean")),
            ("evaluation", text("evaluation_mean") + best),
            ("replay ratio", f"{text('samples_per_insert_now')} of {metrics['samples_per_insert_target']:g}"),
            ("lag", f"{text('parameter_lag')} updates"),
            ("replay", f"{text('replay_steps')} steps, {text('replay_bytes')}"),
            ("sample age", text("sample_age")),
            ("stale", text("stale_updates")),
        ]
        for row in range(0, len(cells), 3):
            numbers.add_row(*(Text.assemble((f"{name} ", "dim"), value) for name, value in cells[row : row + 3]))
        waits = {
            "learner for samples": metrics.get(f"learner_time/{WAITING}", 0.0),
            "actors for the learner": _mean(parts(metrics, "actor_waits").values()),
        }
        return Panel(
            Group(
                numbers,
                self._actors(metrics),
                Text.assemble(("who waits        ", "dim"), _shares(waits)),
                Text.assemble(("learner's time   ", "dim"), _shares(parts(metrics, "learner_time"))),
                Text.assemble(("actors' time     ", "dim"), _shares(parts(metrics, "actor_time"))),
                Text(note, style="italic"),
            ),
            title=self.title,
        )

    def _actors(self, metrics: Metrics) -> Table:
        """Returns a column for each actor, as many as fit."""
        fits = (self._console.width - 4 - NAMES_WIDTH) // ACTOR_WIDTH
        scores, rates, waits = (parts(metrics, name) for name in ("actor_scores", "actor_steps_per_s", "actor_waits"))
        actors = sorted(rates | scores, key=int)
        most = actors if len(actors) <= fits else actors[: fits - 1]
        table = Table.grid()
        table.add_column(width=NAMES_WIDTH, style="dim")
        for _ in range(fits):
            table.add_column(width=ACTOR_WIDTH, justify="right", no_wrap=True)
        more = [] if len(most) == len(actors) else [f"+{len(actors) - len(most)}"]
        table.add_row("actor", *most, *more, style="dim")
        table.add_row("score", *(shown("actor_scores", scores.get(actor)) for actor in most))
        table.add_row("steps/s", *(shown("actor_steps_per_s", rates.get(actor)) for actor in most))
        table.add_row("waits", *(_share(waits.get(actor)) for actor in most))
        return table


def page_of_command(title: str) -> Page:
    """Returns a page for a command's progress: on standard error, removed when the command has its result."""
    return Page(title, Console(stderr=True), transient=True)


def _print(console: Console, message: Any) -> None:
    console.print(str(message).rstrip("\n"), markup=False, highlight=False, soft_wrap=True)


def _shares(shares: dict[str, float]) -> str:
    ordered = sorted(shares.items(), key=lambda item: -item[1])
    largest, rest = ordered[:MOST_SHARES], sum(value for _, value in ordered[MOST_SHARES:])
    named = [*largest, ("rest", rest)] if rest else largest
    return "  ".join(f"{name} {_share(value)}" for name, value in named) or "-"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0
