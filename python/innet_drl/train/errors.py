"""Errors of training. Errors of the replay client, and the one of a missing extra, are in `innet_drl.errors`.

The user can correct the cause of a `TrainingError`: the command line prints its message without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import sys
import traceback
from collections.abc import Iterator
from os import PathLike
from pathlib import Path


def resuming(folder: str | PathLike[str], *, further: bool = False) -> str:
    """Returns how to continue the run of a folder, for a message; with `further`, beyond its steps."""
    return f"--resume {shlex.quote(str(folder))}{' --steps N' if further else ''} (in Python resume=True)"


class TrainingError(Exception):
    """Training cannot start or continue; the message has the remedy, and names settings as `Config` does."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.shows_cause = False
        """Whether the traceback of the cause is shown even if none of the user's code is in it: it was guessed."""


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
def writing(what: str, advice: str, afterwards: str = "") -> Iterator[None]:
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
            reason = f"the disk is full: free some space{afterwards}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"it may not be written: {advice}"
        elif (file := _file_in_place_of_a_directory(error)) is not None:
            reason = f"{file} is a file: {advice}"
        elif error.errno == errno.ENOENT and error.filename is not None:
            reason = f"there is no directory for {error.filename}: make it first"
        else:
            reason = f"{error.strerror or error}"
        raise RunFolderError(f"{what}: {reason}") from error


def _file_in_place_of_a_directory(error: OSError) -> Path | None:
    """The part of a failed path that is a file instead of a directory."""
    if error.errno not in (errno.EEXIST, errno.ENOTDIR) or error.filename is None:
        return None
    path = Path(error.filename)
    return next((part for part in (path, *path.parents) if part.is_file()), None)
