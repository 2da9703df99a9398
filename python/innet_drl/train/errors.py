"""Errors of training. Errors of the replay client, and the one of a missing extra, are in `innet_drl.errors`.

The user can correct the cause of a `TrainingError`: the command line prints its message without a traceback.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


class TrainingError(Exception):
    """Training cannot start or continue; the message says what to do."""


class ConfigurationError(TrainingError, ValueError):
    """An unusable setting."""


class UnavailableEnvironmentError(TrainingError):
    """An environment that does not exist, is not installed, or is not supported."""


class RunFolderError(TrainingError):
    """A run's folder cannot be made, read or written: no space, no permission, or no run in it."""


class ProcessError(TrainingError):
    """A process of a run cannot be started, or failed."""


class ActorError(ProcessError):
    """Actors died more often than they are replaced."""


class LearnerError(ProcessError):
    """One of several learners failed, or its weights differ."""


class RelayError(TrainingError):
    """The relay between actors and learner cannot be reached or used, or was lost."""


class DivergedError(TrainingError):
    """The loss or the weights are infinite or NaN."""


@contextlib.contextmanager
def writing(what: str, advice: str, afterwards: str = "") -> Iterator[None]:
    """Turns an `OSError` of a write into an error that says what to do.

    Args:
        what: Name of the file or folder, for the message.
        advice: What to do if it is not writable.
        afterwards: What to do once a full disk has free space.

    Raises:
        RunFolderError: In place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full: free some space{afterwards}"
        elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            reason = f"it may not be written: {advice}"
        elif error.errno in (errno.ENOENT, errno.ENOTDIR) and error.filename is not None:
            reason = f"there is no directory for {error.filename}: make it first"
        else:
            reason = f"{error.strerror or error}"
        raise RunFolderError(f"{what}: {reason}") from error
