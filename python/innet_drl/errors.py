"""Errors of the replay client. Errors of training are in `innet_drl.train.errors`.

Every error is a `ReplayError`. If Python has a class for the kind of error (`TimeoutError`, `ValueError`,
`ConnectionError`, ...), the error derives from it too, so that code without knowledge of this package can handle it.
Messages say what to do.

The compiled core raises these classes; `crates/replay_py/src/error.rs` maps each error code to one. The error of a
missing optional dependency names the extra of the package that installs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator


class ReplayError(Exception):
    """Base class of all errors of a replay memory, its server and the connection."""


class MissingExtraError(ReplayError, ImportError):
    """An optional dependency is not installed; the message names the extra that installs it."""


class DeadlineError(ReplayError, TimeoutError):
    """The timeout passed; the message names the cause."""


class NoWritersError(DeadlineError):
    """No writer of the table has been connected for `writers_timeout`; the message names the last one."""


class UnknownTableError(ReplayError, KeyError):
    """There is no table of this name; the message lists the existing names."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument, which is unreadable for a sentence.
        return ReplayError.__str__(self)


class TableError(ReplayError, ValueError):
    """An invalid table definition."""


class TableDiffersError(TableError):
    """The table exists with another definition; the message shows each difference."""


class SchemaError(ReplayError, ValueError):
    """Data that does not fit the table's columns; the message compares both."""


class TooLargeError(ReplayError, ValueError):
    """A size or number above a limit."""


class OutOfMemoryError(ReplayError, MemoryError):
    """A size for which this process, or its server, has no memory; the message has the numbers."""


class PriorityError(ReplayError, ValueError):
    """A priority that is NaN, infinite or negative."""


class EmptyError(ReplayError, LookupError):
    """Sampling from a table, or a `SumTree`, without any priority above zero."""


class ViewError(ReplayError, ValueError):
    """A view that does not fit the columns, or that exceeds the windows with which items were written."""


class FencedError(ReplayError):
    """A newer connection of the same writer took over."""


class ExpiredError(ReplayError):
    """The server has no state of this writer: open a new one."""


class LeaseError(ReplayError):
    """A batch was acknowledged a second time, or after its lease: its items are back in the table, and come again."""


class ProtocolError(ReplayError):
    """The peer does not follow the protocol."""


class VersionError(ReplayError):
    """The peer has another version of the protocol: install the same release at both ends."""


class AuthenticationError(ReplayError, PermissionError):
    """A missing or wrong token, or a TLS handshake that failed."""


class ForbiddenError(ReplayError, PermissionError):
    """A request that the token's role, actor or learner, does not allow."""


class ConnectError(ReplayError, ConnectionError):
    """The address does not answer."""


class DisconnectedError(ReplayError, ConnectionError):
    """The connection broke."""


class CorruptError(ReplayError):
    """Stored data does not decode, or a snapshot is damaged or of another format."""


class ConfigError(ReplayError, ValueError):
    """An invalid configuration or argument."""


class ParametersError(ReplayError, ValueError):
    """Parameters that cannot be stored: not a safetensors file, an unknown dtype, or too large."""


class ClosedError(ReplayError):
    """The replay, the writer or the iterator was closed."""


class ForkError(ReplayError, RuntimeError):
    """A replay was used in a forked child process, which lacks its threads and connections."""


class StorageError(ReplayError, OSError):
    """An error of the operating system: a full disk, a missing permission, too many open files."""


class ReplicaError(ReplayError, RuntimeError):
    """Replicas of a model have diverged after the same updates; the message names two replicas and the update."""


class GradientError(ReplayError):
    """A gradient sum failed: the aggregator refused it, or this worker failed earlier."""


class MissingWorkerError(GradientError):
    """Workers did not contribute in time, or have left; the message names them.

    Attributes:
        missing: Numbers of the missing workers of one rack; the message names the rack if it is another one. Empty if
            a whole rack is missing.
    """

    missing: list[int]


class SilentAggregatorError(GradientError, DeadlineError):
    """The aggregator did not answer before the deadline: it has ended, or datagrams are lost."""


class HaltedError(GradientError):
    """The job is suspended; the message names the worker and the reason. All workers reset it to continue."""


class ResetError(GradientError):
    """The job was reset during a sum, which is lost: all workers must repeat it."""


class BehindError(GradientError):
    """This worker missed sums that the server has dropped: pull the weights again."""


class InternalError(ReplayError, RuntimeError):
    """A bug of this package; please report it."""


def closest(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Returns the last part of a message about an unknown name: the closest known name, or else `otherwise`."""
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]}?" if close else otherwise
    return f": {hint}" if hint else ""


_MODULES = {
    "train": (
        "ale_py",
        "cloudpickle",
        "gymnasium",
        "imageio_ffmpeg",
        "jinja2",
        "loguru",
        "psutil",
        "pydantic",
        "rich",
        "safetensors",
        "scipy",
        "tensorboard",
        "torch",
        "tyro",
        "yaml",
    ),
    "data": ("h5py", "minari", "PIL", "pyarrow"),
    "sb3": ("stable_baselines3",),
    "torchrl": ("tensordict", "torchrl"),
    "tianshou": ("tianshou",),
    "redis": ("lz4", "redis"),
    "wandb": ("wandb",),
    "bench": ("matplotlib",),
    "nvml": ("pynvml",),
    "ray": ("ray",),
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules}
"""Extra of the package that installs a module."""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turns the error of a missing optional dependency into one that names the extra.

    Raises:
        MissingExtraError: Instead of a `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = None if error.name is None else EXTRAS.get(error.name.partition(".")[0])
        if extra is None:
            raise
        message = f"{error.name} is not installed: pip install 'innet-drl[{extra}]'"
        raise MissingExtraError(message, name=error.name) from error
