"""What can go wrong, as exceptions.

Every exception of the package is a `ReplayError`. Where Python has a word for the kind of fault
(`TimeoutError`, `ValueError`, `ConnectionError`, ...), the exception is one of those too, so code that
knows nothing of this package can handle it. Messages say what to do.

The compiled core raises these classes; `crates/replay_py/src/error.rs` maps each error code to one.
"""

__all__ = [
    "AuthenticationError",
    "BehindError",
    "ClosedError",
    "ConfigError",
    "ConnectError",
    "CorruptError",
    "DeadlineError",
    "DisconnectedError",
    "EmptyError",
    "ExpiredError",
    "FencedError",
    "ForkError",
    "GradientError",
    "HaltedError",
    "InternalError",
    "MissingWorkerError",
    "ParametersError",
    "PriorityError",
    "ProtocolError",
    "ReplayError",
    "ReplicaError",
    "ResetError",
    "SchemaError",
    "SilentAggregatorError",
    "StorageError",
    "TableDiffersError",
    "TableError",
    "TooLargeError",
    "UnknownTableError",
    "VersionError",
    "ViewError",
]


class ReplayError(Exception):
    """Anything that goes wrong in a replay memory, its server or the way there."""


class DeadlineError(ReplayError, TimeoutError):
    """The timeout passed; the message says who was waited for, and by how much."""


class UnknownTableError(ReplayError, KeyError):
    """There is no table of this name; the message lists the names there are."""

    def __str__(self) -> str:
        # KeyError shows the repr of its argument: right for a key, unreadable for a sentence.
        return ReplayError.__str__(self)


class TableError(ReplayError, ValueError):
    """A table definition that cannot be made."""


class TableDiffersError(TableError):
    """The table exists with another definition; the message shows each difference."""


class SchemaError(ReplayError, ValueError):
    """Data that does not fit the table's columns; the message says what was expected and what came."""


class TooLargeError(ReplayError, ValueError):
    """A length beyond a limit."""


class PriorityError(ReplayError, ValueError):
    """A priority that is NaN, infinite or negative."""


class EmptyError(ReplayError, LookupError):
    """A draw from a table, or a `SumTree`, in which nothing has a priority above zero."""


class ViewError(ReplayError, ValueError):
    """A view that the columns cannot serve, or that reaches beyond the window the items were written with."""


class FencedError(ReplayError):
    """A newer connection of the same writer took over."""


class ExpiredError(ReplayError):
    """The server no longer knows the writer: open a new one."""


class ProtocolError(ReplayError):
    """The other end does not follow the protocol."""


class VersionError(ReplayError):
    """The other end is of another release: install the same one at both ends."""


class AuthenticationError(ReplayError, PermissionError):
    """A missing or wrong token, or a TLS handshake that failed."""


class ConnectError(ReplayError, ConnectionError):
    """Nobody answers at the address."""


class DisconnectedError(ReplayError, ConnectionError):
    """The connection broke."""


class CorruptError(ReplayError):
    """Stored data does not decode, or a snapshot is damaged or of another release."""


class ConfigError(ReplayError, ValueError):
    """A configuration, or an argument, that cannot be used."""


class ParametersError(ReplayError, ValueError):
    """Parameters that cannot be stored: not a safetensors file, an unknown dtype, or too large."""


class ClosedError(ReplayError):
    """The replay, the writer or the iterator was closed."""


class ForkError(ReplayError, RuntimeError):
    """A replay was used in a forked child process, which has none of its threads and connections."""


class StorageError(ReplayError, OSError):
    """The operating system refused something: a full disk, a missing permission, too many open files."""


class ReplicaError(ReplayError, RuntimeError):
    """Replicas of a model that take the same updates have different weights; the message names two and the update."""


class GradientError(ReplayError):
    """A sum of gradients came to nothing: refused by the aggregator, or by a worker that has failed before."""


class MissingWorkerError(GradientError):
    """Workers did not contribute in time, or have gone; the message names them.

    Attributes:
        missing: Their numbers: of those of one rack, which the message names where it is another one. Empty where a
            whole rack is missing.
    """

    missing: list[int]


class SilentAggregatorError(GradientError, DeadlineError):
    """The aggregator did not answer before the deadline: it is gone, or its datagrams do not arrive here."""


class HaltedError(GradientError):
    """The job is suspended; the message says by whom and why. Every worker resets it to go on."""


class ResetError(GradientError):
    """The job was reset in the middle of a sum, which is lost: every worker sums again."""


class BehindError(GradientError):
    """The other workers have gone on without this one, and the sum is no longer kept: pull the weights again."""


class InternalError(ReplayError, RuntimeError):
    """A fault of this package; please report it."""
