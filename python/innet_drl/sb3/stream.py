"""The steps of a buffer on their way into its table."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl import errors

logger = logging.getLogger(__name__)

Observation = NDArray[Any] | dict[str, NDArray[Any]]

_CHUNK_STEPS = 8
"""Steps in a chunk: a compromise of bytes, and of the time until a step can be sampled."""
_UNCONFIRMED_STEPS = 32
"""Steps of an environment that a server may not have confirmed: with the newest one, what a blocked collector loses."""
_LAST_S = 5.0
"""Seconds in which a process that ends sends its newest steps."""


class Stream:
    """The writer, and the newest step, which is kept until the next one shows whether the episodes go on."""

    def __init__(self, replay: innet.Replay, table: innet.Table, environments: int, timeout: float) -> None:
        self._replay, self._table, self._environments, self._timeout = replay, table, environments, timeout
        self.sampled = False
        self._pending: dict[str, Any] | None = None
        self._unconfirmed = 0
        self._waits = False
        self._writer = self._open()

    def _open(self) -> innet.Writer:
        # Whole chunks are evicted: a chunk is a small part of an environment's steps.
        chunk_steps = max(1, min(_CHUNK_STEPS, self._table.capacity // self._environments // 16))
        return self._replay.writer(
            self._table.name,
            self._environments,
            self._table.view,
            name=f"collector {socket.gethostname()} {os.getpid()}",
            chunk_steps=chunk_steps,
            timeout=self._timeout,
        )

    def _retried(self, call: Callable[[], None]) -> None:
        """Calls, and once more with a new writer where the server was restarted."""
        self._waits = True
        try:
            call()
        except (errors.ExpiredError, errors.UnknownTableError) as error:
            logger.warning("the server has lost this writer's newest steps, and collecting goes on: %s", error)
            self._replay.create_table(self._table, self._timeout)
            self._writer = self._open()
            call()
        self._waits = False

    def put(self, row: dict[str, Any]) -> None:
        """Takes the row of a step, with the next observation as its last; the step before it is appended."""
        # A memory of this process takes steps at once: a flush would only make chunks shorter.
        if self._unconfirmed >= _UNCONFIRMED_STEPS and not isinstance(self._replay, innet.Memory):
            self._confirm()
        self._complete(row["observation"])
        self._pending = row

    def flush(self) -> None:
        """Appends and sends everything; episodes end with it."""
        self._complete(None)
        self._confirm()

    def _confirm(self) -> None:
        self._retried(lambda: self._writer.flush(self._timeout))
        self._unconfirmed = 0

    def close(self) -> None:
        """Appends and sends everything, if the writer is still open.

        It waits for at most `_LAST_S` seconds, and not at all after a wait that failed or was interrupted.
        """
        lost = self._unconfirmed + (self._pending is not None)
        self._timeout = 0.0 if self._waits else min(self._timeout, _LAST_S)
        try:
            self._complete(None)
            self._writer.close(self._timeout)
        except errors.ReplayError as error:
            if lost:
                logger.warning("the newest steps of each environment are lost, at most %d: %s", lost, error)

    def _complete(self, following: Observation | None) -> None:
        """Appends the pending step. Episodes that `following` does not continue end with it, truncated."""
        if self._pending is None:
            return
        row = dict(self._pending)
        ended = row["terminated"] | row["truncated"]
        continues = np.zeros_like(ended) if following is None else _equal(row["final_observation"], following)
        # Where the episode continues and has not ended. A reduction takes half of the time of `all`.
        if not np.logical_and.reduce(continues > ended):
            row["truncated"] = row["truncated"] | ~(ended | continues)
        else:
            del row["final_observation"]
        self._retried(lambda: self._writer.append(timeout=self._timeout, **row))
        # Only now: after an error the step is tried again.
        self._pending = None
        self._unconfirmed += 1


def _equal(last: Any, following: Any) -> Any:
    """Whether the observations are equal, by environment."""
    if isinstance(last, dict):
        return np.all([_equal(last[key], following[key]) for key in last], axis=0)
    return np.logical_and.reduce((last == following).reshape(len(last), -1), axis=1)
