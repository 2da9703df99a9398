"""What can go wrong in training, beside the errors of the replay memory (`innet_drl.errors`).

A `TrainingError` is a fault that a user can do something about: the command line prints its message alone.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator


class TrainingError(Exception):
    """Training cannot start or go on; the message says what to do."""


class ConfigurationError(TrainingError, ValueError):
    """A setting that cannot be used."""


class UnavailableEnvironmentError(TrainingError):
    """An environment that does not exist, is not installed, or behaves in a way that is not supported."""


class RunFolderError(TrainingError):
    """The run's folder cannot be made, read or written: no space, no permission, or no run in it."""


class ActorError(TrainingError):
    """Actors died more often than they are replaced."""


class LearnerError(TrainingError):
    """One of several learners failed, or has other weights than the others."""


class RedisError(TrainingError):
    """The Redis of a run cannot be reached or used, or was lost."""


class DivergedError(TrainingError):
    """The loss or the weights are no numbers any more."""


@contextlib.contextmanager
def writing(what: str, advice: str, afterwards: str = "") -> Iterator[None]:
    """Turns what the operating system says about a write into an error that says what to do.

    Args:
        what: Names what is written.
        advice: What to do where it cannot be written.
        afterwards: What to do once there is room on a full disk.

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
