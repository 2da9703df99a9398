"""Errors of training. Errors of the replay client, and the one of a missing extra, are in `innet_drl.errors`.

The user can correct the cause of a `TrainingError`: the command line prints its message without a traceback.
Messages are written with flags, whose form no other word has; in Python they name the settings (`in_python`).
"""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import sys
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

SETTINGS: set[str] = {"launcher"}
"""Names of settings, which `innet_drl.train.config` adds, and of an argument of `run`."""

_RESUME = re.compile(r"--resume ('[^']*'|[\w@%+=:,./-]*[\w@%+=/-])( --steps N)?")
# Flags of `innet-replay serve` have no other form.
_FLAG = re.compile(r"(?<![\w/-])(?<!serve )--(no-)?([a-z]+(?:-[a-z]+)*)")


def resuming(folder: str | PathLike[str], *, further: bool = False) -> str:
    """Returns the flag that continues the run of a folder, for a message; `further` for a run that has its steps."""
    return f"--resume {shlex.quote(str(folder))}" + " --steps N" * further


def in_python(message: str) -> str:
    """Returns a message with the names of settings, as a caller of `run` gives them, instead of flags."""

    def resume(found: re.Match[str]) -> str:
        (folder,) = shlex.split(found[1])
        config = "dataclasses.replace(config, steps=N)" if found[2] else "config"
        return f"train.run({config}, folder={folder!r}, resume=True)"

    def setting(found: re.Match[str]) -> str:
        name = found[2].replace("-", "_")
        if name in ("out", "resume"):
            return "folder" if name == "out" else "resume=True"
        if name not in SETTINGS:
            return found[0]
        return f"{name}=False" if found[1] else name

    return _FLAG.sub(setting, _RESUME.sub(resume, message))


class WithFlags:
    """Part of a log line that names settings: with flags on the command line, as in Python elsewhere."""

    def __init__(self, with_flags: str) -> None:
        self.with_flags = with_flags

    def __str__(self) -> str:
        return in_python(self.with_flags)


class TrainingError(Exception):
    """Training cannot start or continue; the message says what to do."""

    @property
    def with_flags(self) -> str:
        """The message for the command line."""
        return super().__str__()

    def __str__(self) -> str:
        return in_python(self.with_flags)


class ConfigurationError(TrainingError, ValueError):
    """An unusable setting."""


class UnavailableEnvironmentError(TrainingError):
    """An environment that does not exist, is not installed, is not supported, or returns NaN."""


class RunFolderError(TrainingError):
    """A run's folder cannot be made, read or written: no space, no permission, or no run in it."""


class ProcessError(TrainingError):
    """A process of a run cannot be started, or failed."""


class ActorError(ProcessError):
    """Actors died more often than they are replaced."""


class LearnerError(ProcessError):
    """One of several learners failed, or its weights differ."""


class ReplayMemoryError(TrainingError):
    """A replay memory of another package cannot be reached or used, or was lost."""


class DivergedError(TrainingError):
    """The loss or the weights are infinite or NaN."""


def shortened(error: TrainingError) -> TrainingError:
    """Returns an error for the caller of this package, without the package's frames.

    Its cause stays if the caller's code has raised it, with the frames from there on.
    """
    cause = error.__cause__
    if cause is not None:
        trace = cause.__traceback__
        while trace is not None and _is_internal(trace.tb_frame.f_globals["__name__"]):
            trace = trace.tb_next
        error.__cause__ = None if trace is None else cause.with_traceback(trace)
    return error.with_traceback(None)


def _is_internal(module: str) -> bool:
    package = module.partition(".")[0]
    return package in ("innet_drl", "gymnasium", "numpy", "torch", "yaml") or package in sys.stdlib_module_names


@contextlib.contextmanager
def writing(what: str, advice: str, afterwards: str = "") -> Iterator[None]:
    """Turns an `OSError` of a write into an error that says what to do.

    Args:
        what: Name of the file or folder, for the message.
        advice: What to do if it is not writable.
        afterwards: What to do once a full disk has free space.

    Raises:
        RunFolderError: Instead of an `OSError`.
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
    """The file of a path in which it names a directory."""
    if error.errno not in (errno.EEXIST, errno.ENOTDIR) or error.filename is None:
        return None
    path = Path(error.filename)
    return next((part for part in (path, *path.parents) if part.is_file()), None)
