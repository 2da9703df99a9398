"""What can go wrong in training, beside the errors of the replay memory (`innet_drl.errors`).

A `TrainingError` is a fault that a user can do something about: the command line prints its message alone.
"""

from __future__ import annotations


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
