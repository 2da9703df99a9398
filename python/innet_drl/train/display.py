"""Progress of a run, as lines of a log. The command line's page is in `page.py`."""

from __future__ import annotations

import logging
import time
from typing import Self

from innet_drl.train.metrics import Metrics

logger = logging.getLogger(__name__)

PLAIN_SECONDS = 10.0
"""Seconds between plain lines, which a log keeps, unlike a page."""


class Display:
    """Logs the most important numbers now and then.

    Args:
        title: Environment and folder of the run.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self._last_line = -PLAIN_SECONDS

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the display."""

    def say(self, what: str) -> None:
        """Shows the current phase of the start."""

    def show(
        self, metrics: Metrics, scores_by_actor: dict[int, float], note: str, seconds_left: float | None = None
    ) -> None:
        """Shows a line of metrics, the recent mean score of each actor, and a note on the run's state."""
        if time.monotonic() - self._last_line >= PLAIN_SECONDS:
            self._last_line = time.monotonic()
            self.print(plain_line(metrics, note))

    def show_note(self, note: str, time_s: float) -> None:
        """Shows another note and time with the numbers of the last line; any thread may call it."""

    def print(self, line: str) -> None:
        """Prints a plain line."""
        logger.info("%s", line)


def plain_line(metrics: Metrics, note: str = "") -> str:
    """The most important numbers in one line, for logs."""
    return (
        f"{clock(metrics.time_s)}  {metrics.agent_steps:,} steps ({metrics.agent_steps_per_s:,.0f}/s)  "
        f"{metrics.learner_updates:,} updates ({metrics.learner_updates_per_s:,.1f}/s)  "
        f"score {number(metrics.return_mean)} (best {number(metrics.return_best)})  "
        f"loss {number(metrics.td_loss, 4)}  replay {metrics.replay_steps:,}" + (f"  {note}" if note else "")
    )


def clock(seconds: float) -> str:
    """Formats seconds as minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes:d}:{rest:02d}"


def number(value: float | None, digits: int = 1) -> str:
    """Formats a number that may not exist yet."""
    return "-" if value is None else f"{value:,.{digits}f}"
