"""Errors of training. Errors of the replay client, and the one of a missing extra, are in `innet_drl.errors`.

The user can correct the cause of a `TrainingError`: the command line prints its message without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

_IN_PYTHON = {"resume": "resume=True", "no_video": "video=False", "no_full_action_set": "full_action_set=False"}


class Message:
    """A sentence for errors and logs, which spells settings as Python arguments or as flags.

    Args:
        template: The sentence. `{batch_size}` is `--batch-size` on the command line and `batch_size` elsewhere,
            `{folder}` is `--out`, and `{no_video}` is `--no-video` or `video=False`, unless it names a value.
        values: Values by name, which may be messages and errors.
    """

    def __init__(self, template: str, /, **values: object) -> None:
        self.text = template.format_map(_Fields(values, lambda name: _IN_PYTHON.get(name, name)))
        self.with_flags = template.format_map(_Fields({name: with_flags(each) for name, each in values.items()}, flag))
        """The sentence for the command line."""

    def __str__(self) -> str:
        return self.text


class _Fields(dict[str, object]):
    """Fields of a message: its values, and the spelled names of settings."""

    def __init__(self, values: dict[str, object], spell: Callable[[str], str]) -> None:
        super().__init__(values)
        self._spell = spell

    def __missing__(self, name: str) -> str:
        return self._spell(name)


@dataclass(frozen=True)
class Resuming:
    """How to continue the run of a folder, for a message; with `further`, beyond its steps."""

    folder: str | PathLike[str]
    further: bool = False

    def __str__(self) -> str:
        config = "dataclasses.replace(config, steps=N)" if self.further else "config"
        return f"train.run({config}, folder={str(self.folder)!r}, resume=True)"

    @property
    def with_flags(self) -> str:
        """The flags."""
        return f"--resume {shlex.quote(str(self.folder))}" + " --steps N" * self.further


def flag(name: str) -> str:
    """Returns the flag of a setting: `learning_rate` is `--learning-rate`."""
    return f"--{'out' if name == 'folder' else name.replace('_', '-')}"


def with_flags(value: Any) -> Any:
    """Returns a message or an error with flags, and any other value unchanged."""
    return getattr(value, "with_flags", value)


def settings(names: Iterable[str]) -> Message:
    """Returns several settings, for a message."""
    return Message(" and ".join(f"{{{name}}}" for name in names))


class TrainingError(Exception):
    """Training cannot start or continue; the message has the remedy.

    Args:
        message: The text, a `Message`, or with `values` its template.
        values: See `Message`.
    """

    def __init__(self, message: str | Message, /, **values: object) -> None:
        super().__init__(Message(message, **values) if values and isinstance(message, str) else message)
        self.message: str | Message = self.args[0]
        self.shows_cause = False
        """Whether the traceback of the cause is shown even if none of the user's code is in it: it was guessed."""

    @property
    def with_flags(self) -> str:
        """The message for the command line."""
        return str(with_flags(self.message))


class ConfigurationError(TrainingError, ValueError):
    """An unusable setting."""


class UnavailableEnvironmentError(TrainingError):
    """An environment that does not exist, is not installed, is not supported, or returns NaN."""


class RunFolderError(TrainingError):
    """A run's folder cannot be made, read or written: no space, no permission, or no run in it."""


class ProcessError(TrainingError):
    """A process of a run cannot be started, or failed."""


class ActorError(ProcessError):
    """Actors died more often than `actor_restarts` allows."""


class LearnerError(ProcessError):
    """One of several learners failed, or its weights differ."""


class ReplayMemoryError(TrainingError):
    """A replay memory of another package cannot be reached or used, or was lost."""


class DivergedError(TrainingError):
    """The loss or the weights are infinite or NaN."""


def shortened(error: TrainingError) -> TrainingError:
    """Removes this package's frames from an error for the caller.

    Its cause is kept, from the first frame of the caller's code on, if that code raised it.
    """
    cause = error.__cause__
    if cause is not None:
        trace = cause.__traceback__
        while trace is not None and _is_internal(trace.tb_frame.f_globals["__name__"]):
            trace = trace.tb_next
        error.__cause__ = None if trace is None else cause.with_traceback(trace)
    return error.with_traceback(None)


def trace_of(error: TrainingError) -> str:
    """Returns the traceback of the user's code that caused an error, for terminals; empty if none did."""
    cause = error.__cause__
    # Messages on files and on memories of other packages say what failed.
    complete = isinstance(cause, OSError) or isinstance(error, ReplayMemoryError)
    if cause is None or (complete and not error.shows_cause):
        return ""
    # Before `shortened`, which changes the cause.
    whole = traceback.format_exception(cause)
    own = shortened(error).__cause__
    if own is not None:
        return "".join(traceback.format_exception(own))
    return "".join(whole) if error.shows_cause else ""


def _is_internal(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("innet_drl", "gymnasium", "numpy", "torch", "yaml") or package in sys.stdlib_module_names


@contextlib.contextmanager
def writing(what: str, advice: str | Message, afterwards: str | Message = "") -> Iterator[None]:
    """Converts an `OSError` of a write into an error with a remedy.

    Args:
        what: Name of the file or folder, for the message.
        advice: Remedy if it is not writable.
        afterwards: Next step once a full disk has free space.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason: str | Message = Message("the disk is full: free some space{afterwards}", afterwards=afterwards)
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = Message("it may not be written: {advice}", advice=advice)
        elif (file := _file_in_place_of_a_directory(error)) is not None:
            reason = Message("{file} is a file: {advice}", file=file, advice=advice)
        elif error.errno == errno.ENOENT and error.filename is not None:
            reason = f"there is no directory for {error.filename}: make it first"
        else:
            reason = f"{error.strerror or error}"
        raise RunFolderError("{what}: {reason}", what=what, reason=reason) from error


def _file_in_place_of_a_directory(error: OSError) -> Path | None:
    """The part of a failed path that is a file instead of a directory."""
    if error.errno not in (errno.EEXIST, errno.ENOTDIR) or error.filename is None:
        return None
    path = Path(error.filename)
    return next((part for part in (path, *path.parents) if part.is_file()), None)
