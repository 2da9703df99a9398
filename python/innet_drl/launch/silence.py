"""Logs actors that stop reporting, for example because an environment hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

SILENT_SECONDS = 60.0
"""Seconds without a report after which an actor is logged."""
LONGEST_GAP = 1.0
"""Largest counted time between two checks: while the learner is busy, its actors may wait for it."""


class Silence:
    """Time since each actor's last report, while the learner samples or waits for samples.

    Such a learner lets each actor write within seconds, so that the actor's environment causes a long silence.
    """

    def __init__(self, cause: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._cause = cause
        self._clock = clock
        self._checked = clock()
        self._heard: dict[int, float] = {}
        self._silent: dict[int, float] = {}
        self._named: set[int] = set()

    def begin(self, actor: int) -> None:
        """Expects reports of an actor from now on."""
        self._heard[actor], self._silent[actor] = self._clock(), 0.0
        self._named.discard(actor)

    def check(self, reported: Iterable[int]) -> None:
        """Resets actors that have `reported` since the last check, and logs each silent actor once."""
        now = self._clock()
        elapsed, self._checked = min(now - self._checked, LONGEST_GAP), now
        for actor in self._silent:
            self._silent[actor] += elapsed
        for actor in reported:
            if actor in self._named:
                logger.info("actor %d steps again", actor)
            self.begin(actor)
        for actor, seconds in self._silent.items():
            if seconds >= SILENT_SECONDS and actor not in self._named:
                self._named.add(actor)
                logger.warning("%s", self._line([actor]))

    def seconds(self, actor: int) -> float:
        """All seconds since the actor's last report or its start, without the limit of `check`."""
        return self._clock() - self._heard[actor]

    def note(self) -> str:
        """Note on silent actors for the page; may be empty."""
        return self._line(sorted(self._named)) if self._named else ""

    def _line(self, actors: list[int]) -> str:
        names = f"actor {actors[0]} has" if len(actors) == 1 else f"actors {', '.join(map(str, actors))} have"
        seconds = min(self._silent[actor] for actor in actors)
        return f"{names} not stepped for {seconds:.0f} s: {self._cause}"
