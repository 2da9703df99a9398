"""Progress of a run, as lines of a log. The command line's page is in `page.py`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Self

from innet_drl.train.observe.metrics import METRICS, Metrics

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
            self.print(self.line(metrics, note))

    def line(self, metrics: Metrics, note: str) -> str:
        """The plain line of metrics."""
        return plain_line(metrics, note)

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
