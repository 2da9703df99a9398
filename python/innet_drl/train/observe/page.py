"""The page of a run: live in a terminal, with logs above it; plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Self

import rich
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from innet_drl.train.observe.display import Display, shown
from innet_drl.train.observe.metrics import Metrics, parts

SMALLEST_PAGE = (80, 22)
"""Smallest terminal, in columns and rows, for the page with log lines above it; smaller ones get plain lines."""
NUMBERS = (
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
        for row in NUMBERS:
            numbers.add_row(*(_cell(name, shown(name, metrics.get(name))) for name in row))
        several = [_cell(name, _values(name, parts(metrics, name))) for name in SEVERAL]
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
