"""Shared state of a training session: settings, folder, display, callbacks, and the signals that end it."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Self

import psutil

from innet_drl.signals import Interrupted, handle, leave_terminal
from innet_drl.train.callbacks import Callback, StopTraining
from innet_drl.train.observe.display import Display
from innet_drl.train.observe.metrics import Meter, Totals
from innet_drl.train.observe.stopwatch import Stopwatch
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)

SILENT_SECONDS = 0.5
"""Seconds after which the page shows that the run waits for a call of the memory."""


class _Interrupted(BaseException):
    """A signal during a call of the memory. The signal handler raises it to end the call."""


class Session:
    """One session of a run. In its context, SIGINT, SIGTERM and SIGHUP end it, and the page shows long activities."""

    meter: Meter
    """Set by the trainer once the learner is made, when training begins."""
    totals: Totals
    """Set by the trainer once the environment is known."""

    def __init__(
        self, config: Config, folder: RunFolder, display: Display, callbacks: Sequence[Callback], *, signals: bool
    ) -> None:
        self.config = config
        self.folder = folder
        self.display = display
        self.stopwatch = Stopwatch()
        """Stopwatch of the learner's thread."""
        self.note = "starting"
        """Note on the run's state for the page."""
        self.ended_by: int | None = None
        """The signal that has ended training."""
        self.stopped = False
        """Whether a callback has ended training."""
        self._callbacks = callbacks
        self._signals = signals
        self._handlers: dict[signal.Signals, Any] = {}
        # Time from which the activity is shown repeatedly, the function that shows it, and whether a signal ends it.
        self._activity: tuple[float, Callable[[], None], bool] | None = None
        self._ended = threading.Event()
        self._watch = threading.Thread(target=self._show_activity, name="watch", daemon=True)

    def __enter__(self) -> Self:
        # Only the main thread can set signal handlers.
        if self._signals and threading.current_thread() is threading.main_thread():
            self._handlers = handle(self._interrupt)
        self._watch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._handlers.items():
            signal.signal(name, handler)
        self._ended.set()
        self._watch.join()

    @property
    def interrupted(self) -> bool:
        """Whether a signal has ended training."""
        return self.ended_by is not None

    def call(self, method: str, *arguments: object) -> None:
        """Calls a method of every callback, which may end training."""
        for callback in self._callbacks:
            try:
                getattr(callback, method)(*arguments)
            except StopTraining as stop:
                logger.info("training is ended by %s: %s", type(callback).__name__, str(stop) or "no reason given")
                self.stopped = True

    def say(self, note: str) -> None:
        """Shows a note on the run's state on the page."""
        self.note = note
        self.display.show_note(note, self.meter.time_s)

    def ask(self, call: Callable[[], object]) -> None:
        """Calls the memory, unless the run is interrupted. A signal ends the call; the page shows long waits."""
        try:
            try:
                self._activity = time.monotonic() + SILENT_SECONDS, self._say_waiting, True
                if not self.interrupted:
                    call()
            finally:
                self._activity = None
        except _Interrupted:
            self._activity = None

    @contextlib.contextmanager
    def copying(self, activity: str, file: Path, size: int) -> Iterator[None]:
        """Shows the progress of reading or writing a file in the context."""

        def show() -> None:
            self.display.progress(activity, f"{file_position(file) / 2**20:,.0f} of {size / 2**20:,.0f} MiB")

        self._activity = 0.0, show, False
        try:
            yield
        finally:
            self._activity = None

    def _say_waiting(self) -> None:
        self.say(f"waiting for the replay memory at {self.config.replay}")

    def _show_activity(self) -> None:
        while not self._ended.wait(SILENT_SECONDS / 2):
            activity = self._activity
            if activity is not None and time.monotonic() >= activity[0]:
                activity[1]()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        leave_terminal(number)
        if self.interrupted:
            # The second signal ends the run at once.
            raise Interrupted(number)
        self.ended_by = number
        logger.warning("%s: ending with a checkpoint; once more to end at once", signal.Signals(number).name)
        if self._activity is not None and self._activity[2]:
            raise _Interrupted


def file_position(path: Path) -> int:
    """Returns this process's position in an open file; 0 while it is not open."""
    wanted = str(path.resolve())
    return next((int(file.position) for file in psutil.Process().open_files() if file.path == wanted), 0)
