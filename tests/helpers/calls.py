"""Calls that wait in threads of their own, and the lines of the log that name their reasons."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from serving import until
from steps import VIEW, step, table

import innet_drl as innet


class Lines(logging.Handler):
    """Collects the lines of the log, and lets a test wait for one."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.new = threading.Condition()

    def emit(self, record: logging.LogRecord) -> None:
        with self.new:
            self.lines.append(record.getMessage())
            self.new.notify_all()

    def wait_for(self, part: str) -> None:
        with self.new:
            assert self.new.wait_for(lambda: any(part in line for line in self.lines), 30), self.lines

    def wait_for_lines(self, count: int) -> None:
        with self.new:
            assert self.new.wait_for(lambda: len(self.lines) >= count, 30), self.lines


class Call(threading.Thread):
    """A call in a thread of its own, and its exception."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self.error = error

    def ended(self) -> BaseException | None:
        self.join()
        return self.error


def limited(name: str = "t") -> innet.Table:
    """A table that lets no step through after the first ten, and no sample before them."""
    return table(name, min_size=5, samples_per_insert=1.0, slack=10.0)


def write_until_blocked(replay: innet.Replay, name: str = "t") -> tuple[innet.Writer, Call]:
    writer = replay.writer(name, 1, VIEW, chunk_steps=1)

    def write() -> None:
        for t in range(10_000):
            writer.append(**step(t))
            writer.flush()

    writing = Call(write)
    until(lambda: replay.stats()["tables"][name]["blocked_pushes"] > 0)
    return writer, writing
