"""The compiled core of innet_drl: the replay memory in this process or on a server."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self, TypeAlias, final, overload, type_check_only

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from typing_extensions import disjoint_base

from innet_drl.definitions import Mix, NStep, Sequences, Table, Trajectory, Window
from innet_drl.torch_batches import TorchBatch, TorchBatches

__all__ = [
    "Batch",
    "Batches",
    "Episodes",
    "GradientUpdates",
    "GradientWorker",
    "Memory",
    "Parameters",
    "Replay",
    "SampledIndexes",
    "Server",
    "Station",
    "StoredTable",
    "SumTree",
    "UpdateReceipt",
    "Writer",
    "__version__",
    "connect",
    "fstack_release",
    "run_server_cli",
]

__version__: str
"""Release of the Python package and the Rust crates."""
fstack_release: str | None
"""F-Stack release of this build; `"unknown"` if `FF_PATH` named its folder, `None` without F-Stack."""

_Array: TypeAlias = NDArray[Any]

@type_check_only
class _ContextManager:
    """Closes its object at the end of a `with` block; private to the stub."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        _exception_type: type[BaseException] | None,
        _exception: BaseException | None,
        _traceback: TracebackType | None,
        /,
    ) -> None: ...

@final
class Batch:
    """The arrays of one sample, as attributes and as a mapping.

    `len(batch)` is the number of items B, the first dimension of every array. `batch["reward"]` is `batch.reward`, also
    where a column has the name of a method, `**batch` passes all arrays, `batch[:32]` is a batch of the first items on
    the same memory, and a batch can be pickled. Columns with a slash in their names are structures:
    `observation/camera` is `batch.observation["camera"]`, and parts that are numbered from 0 are a tuple.

    The arrays stay valid while one of them is referenced, even after the batch and the replay are gone. An array that
    shares memory with another one, as the stacks of an observation and of its next one do, is read-only: copy it.
    A ragged column comes as a `Ragged`, in which `(B, *shape)` is a part for each item, and `(B, T, *shape)` a `Ragged`
    of T parts. `NStep` delivers

    | array | dtype | shape | meaning |
    | --- | --- | --- | --- |
    | `observation` | the column's | `(B, stack, *shape)`, or `(B, *shape)` with a stack of 1 | at the anchor |
    | `reward` | float32 | `(B,)` | n-step return |
    | `discount` | float32 | `(B,)` | factor of the bootstrapped value; 0 where terminated |
    | `next_observation` | the column's | as `observation` | after the last step of the return |
    | every other column | the column's | `(B, *shape)` | the anchor's value |
    | `weights` | float32 | `(B,)` | importance weight (N P(i))^-beta, normalised (Schaul et al., 2016, 3.4) |
    | `probabilities` | float64 | `(B,)` | P(i) at the time of sampling |
    | `ids` | uint64 | `(B,)` | ids of the items, for `Replay.update_priorities` |
    | `ages` | uint32 | `(B,)` | steps inserted into the table after each item |
    | `versions` | uint64 | `(B,)` | of a table with `parameters`: the smallest version of the item's rows, or 0 |

    With T = burn_in + length, `Sequences` delivers `observation` as `(B, T + 1, ...)`, `reward`, `discount`
    (gamma, 0 where the step terminates), `mask` (bool: a step to learn from), `terminated`, `truncated`, `first`
    and every other column as `(B, T, ...)`, except the columns in `state`, which have the first step only.
    `Window` delivers every column as `(B, before + 1 + after, ...)` and the bool arrays `mask`, `terminated`,
    `truncated`, `first` and `final`. `Trajectory` delivers every column as `Ragged`, the steps of each item. Each adds
    `weights`, `probabilities`, `ids` and `ages`.
    """

    @property
    def observation(self) -> Any:
        """The observation, or its stack, at the anchor."""
    @property
    def action(self) -> Any:
        """The action at the anchor."""
    @property
    def reward(self) -> NDArray[np.float32]:
        """The n-step return; of `Sequences`, the reward of each step."""
    @property
    def discount(self) -> NDArray[np.float32]:
        """Factor of the bootstrapped value; 0 where terminated."""
    @property
    def next_observation(self) -> Any:
        """The observation, or its stack, after the last step of the return."""
    @property
    def weights(self) -> NDArray[np.float32]:
        """Importance weights."""
    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Probabilities of the items at the time of sampling."""
    @property
    def ids(self) -> NDArray[np.uint64]:
        """Ids of the items, for `Replay.update_priorities`."""
    @property
    def ages(self) -> NDArray[np.uint32]:
        """Steps inserted into the table after each item."""
    @property
    def versions(self) -> NDArray[np.uint64]:
        """Smallest version of the parameters of each item's rows, 0 where unknown; of a table that names them."""
    def __getattr__(self, name: str) -> Any: ...
    @overload
    def __getitem__(self, key: str, /) -> Any: ...
    @overload
    def __getitem__(self, key: slice, /) -> Batch: ...
    def __contains__(self, name: object, /) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...
    def acknowledge(self, timeout: float | None = 60.0) -> None:
        """Ends the lease of a batch whose items are processed (`acknowledge=True` in `Replay.batches`).

        They leave the table for good, once they have no samples left.

        Raises:
            LeaseError: The batch was acknowledged before; or its lease is over, since its iterator was closed, its
                connection broke or its `lease` seconds have passed, and its items come again. Nothing was changed.
            ConfigError: A batch without a lease, which parts of batches and unpickled ones are, too.
        """
    @property
    def _lease(self) -> _Lease | None: ...
    @property
    def _copied(self) -> Any: ...
    def keys(self) -> list[str]:
        """Names of the arrays and structures, so that `**batch` passes them."""
    def values(self) -> list[Any]:
        """The arrays and structures."""
    def items(self) -> list[tuple[str, Any]]:
        """Names and arrays or structures."""
    def get(self, name: str, default: Any = None) -> Any:
        """The array or structure of a name, or the default."""
    def as_dict(self) -> dict[str, Any]:
        """The arrays and structures by name, in a new dictionary."""
    def _wrapped(self, wrap: Callable[[_Array], Any]) -> dict[str, Any]: ...
    def _nested(self, values: dict[str, Any]) -> dict[str, Any]: ...
    def _memory(
        self,
    ) -> tuple[NDArray[np.uint8], list[tuple[str, np.dtype[Any], tuple[int, ...], tuple[int, ...], int, bool]]]: ...

@final
class Batches(_ContextManager):
    """An iterator over batches that ends only with an error or `close`.

    A background thread samples and decodes `prefetch` batches ahead, none with 0; `next` raises its errors. Close it,
    or use it as a context manager. Threads may share an iterator: each batch goes to one of them.

    A batch has at least one item. Items that fail to decode are skipped, removed from the memory and logged with the
    name of their writer; if none is left, `next` samples again within its timeout.

    A memory in this process counts a batch for `samples_per_insert` when `next` returns it; a server counts a
    batch when it is sent. With `max_times_sampled` an item is removed when the batch of its last sample counts.
    """

    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch: ...
    def close(self) -> None:
        """Stops sampling ahead, ends a blocked `next` of another thread, and waits for the background thread.

        Unreturned batches of a memory in this process do not count for `samples_per_insert`; up to `prefetch + 2`
        batches that a server has sent do, and with `prefetch=0` none. With `max_times_sampled`, the items of batches
        that do not count are sampled again; the items of batches that count are removed.
        """

@final
class Episodes:
    """An iterator over all episodes of a table, from `Replay.episodes`."""

    def __iter__(self) -> Self: ...
    def __next__(self) -> Batch: ...

@final
class UpdateReceipt:
    """Result of an update of priorities."""

    @property
    def applied(self) -> int:
        """Number of ids whose items have the new priority."""
    @property
    def stale(self) -> int:
        """Number of ignored ids, whose items are gone."""

@final
class Parameters:
    """One version of named parameters."""

    @property
    def version(self) -> int:
        """Rises by one with every put; the first is 1."""
    @property
    def tensors(self) -> dict[str, Any]:
        """The tensors by name; the reader may modify them.

        NumPy arrays, or torch tensors if `get_parameters` had a `device`. bfloat16 becomes float32.
        """

@final
class Writer(_ContextManager):
    """Writes the steps of `num_envs` environments, with one `append` for each step.

    Steps are packed into chunks of up to `chunk_steps` and sent when one is full, or when a call of the same replay
    waits for steps of the table. Use the writer as a context manager, or call `close`: unsent steps are lost with their
    writer. The end of a `with` block waits without limit until the table has accepted all steps, but only 5 seconds
    after an exception; `close(timeout)` sets a limit. A step is stored completely or, after an error, not at all, so it
    may be appended again. Calls of several threads run one at a time, and waiting
    for another thread counts towards the timeout. Counters may be read at any time.
    """

    def append(
        self,
        *,
        terminated: ArrayLike,
        truncated: ArrayLike,
        first: ArrayLike | None = None,
        final: ArrayLike | None = None,
        q: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        final_q: ArrayLike | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
        **columns: Any,
    ) -> None:
        """Appends one row of every environment.

        Every array has a leading dimension of `num_envs`.

        Args:
            terminated: bool `(num_envs,)`: the value after this step is 0. With `first` false in the next row it is a
                lost life: the return ends, the observation stack continues.
            truncated: bool `(num_envs,)`: the episode was cut off after this step; its final row bootstraps. Without
                one, the step counts as the final row.
            first: bool `(num_envs,)`: the observation starts a new episode and a new stack; `None` is true after every
                end. Needed at a lost life, and after a reset in the middle of an episode.
            final: bool `(num_envs,)`. Without `final_<observation>`: this row has only the last observation of an
                episode, as in NEXT_STEP environments; its action and reward are ignored. With it: this row's step
                ended the episode, and `final_<observation>` has its last observation; `None` is
                `terminated | truncated`.
            q: float32 `(num_envs, actions)`: the actor's Q-values of this observation. The initial priority is then
                |n-step TD error|, by the learner's formula.
            priority: float32 or float64 `(num_envs,)`: priorities of the anchors, before the exponent. Without
                `q` and `priority`, items start with the largest priority that the table has held since it was made
                or emptied; see `live_max_priority` of `Table`.
            final_q: float32 `(num_envs, actions)`: Q-values of `final_<observation>`; needed with `q` at a truncation.
            version: Version of the parameters that made the rows, for a table that names some (`parameters` of
                `Table`); 0 is unknown. `None` is the version of this writer's last `get_parameters`, or 0. A new
                version begins a new chunk.
            timeout: Seconds to wait until the table accepts the rows; `None` waits without limit, 0 not at all.
            **columns: Every column of the table, with its exact dtype and shape: an array, or a dictionary or tuple of
                arrays where the table has parts; and, for SAME_STEP environments, `final_<observation>`: the last
                observations of ended episodes. A ragged column takes a list with an array, or a list, for each
                environment, or a `Ragged`. A column of bytes also takes texts.

        Raises:
            SchemaError: A missing or unknown column, another dtype or shape than the table's, or NaN or infinity in
                `q`, a reward or an observation (`Column.finite`). No row is stored, and the writer stays usable.
            PriorityError: A priority that is NaN, infinite or negative, or beyond float32, with its position from 0.
            DeadlineError: No space within `timeout`; the message names the cause.
            FencedError: A newer connection of the same writer took over.
            ClosedError: The writer was closed.
        """
    def extend(
        self,
        *,
        terminated: ArrayLike,
        truncated: ArrayLike,
        first: ArrayLike | None = None,
        final: ArrayLike | None = None,
        q: ArrayLike | None = None,
        priority: ArrayLike | None = None,
        final_q: ArrayLike | None = None,
        version: int | None = None,
        timeout: float | None = 60.0,
        **columns: Any,
    ) -> None:
        """Appends a block of T consecutive steps, with the same rows, items and ids as T calls of `append`.

        The arguments are those of `append`, and every array has the leading dimensions `(T, num_envs)`. `terminated`
        sets T; 0 does nothing. An episode of a file is a block of one environment: `observation[:, None]`. `timeout` is
        for the steps before the block: it is then appended as a whole, and what the table does not accept at once is
        sent by the next call.

        Raises:
            ReplayError: As in `append`; after an error no step of the block is stored.
        """
    def flush(self, timeout: float | None = 60.0) -> None:
        """Sends all packed steps and waits until they are in the table; incomplete windows stay open.

        Items of a terminated episode may then be sampled without its last observation, until that comes.

        Raises:
            DeadlineError: Not done within `timeout` seconds.
        """
    def close(self, timeout: float | None = 60.0) -> None:
        """Flushes and ends the writer. Windows of unfinished episodes never become items.

        A blocked `append` or `flush` of another thread raises `ClosedError`. After an error the writer stays open:
        call `close` again to resend unacknowledged steps.
        """
    @property
    def _final_observation(self) -> str | None: ...
    @property
    def _parts(self) -> dict[str, Any]: ...
    @property
    def num_envs(self) -> int:
        """Environments of each `append`."""
    @property
    def steps(self) -> int:
        """Steps appended, over all environments, without final rows."""
    @property
    def items(self) -> int:
        """Number of items: windows completed by the steps appended so far.

        The last items may not be in the table yet: rows of an incomplete chunk are unsent, and pushes to a server may
        be in flight or wait for the rate limiter. `flush` waits until all items are inserted.
        """
    @property
    def dropped_windows(self) -> int:
        """Windows dropped after a reset without an end, and those of a truncated step without a final row alone.

        After `close` also trajectories whose episode had not ended.
        """

@final
class SumTree:
    """Samples indexes by priority, if another buffer holds the items.

    The sum tree of the tables alone, for example for your own replay buffer, a prioritized curriculum or a scheduler.
    `len(tree)` is the number of indexes with a priority above zero, which can be sampled. All methods are thread-safe,
    and threads do not wait for each other. Batches of 8,192 and more release the GIL.

    Args:
        capacity: Indexes: 0 to `capacity - 1`, at most 2^24. Each takes 8.5 bytes, and has no priority at first.
        priority_exponent: Alpha, 0 to 4. It is applied once, by `update`.
        priority_unit_log2: Base-2 logarithm of the smallest difference of two stored priorities, after the
            exponent; -30 to 0. Priorities are rounded to it, positive ones up to at least one unit, and are cut to
            2^39 units: by default 1.9e-6 to 1.0e6, with -30 9.3e-10 to 512.
        seed: Makes samples repeatable if one thread samples and updates. Without one, forked processes draw different
            samples, also from a tree that they inherit.

    Raises:
        ConfigError: A number out of range; the message has the range.
        OutOfMemoryError: More indexes than this process has memory for.
    """

    def __new__(
        cls, capacity: int, *, priority_exponent: float = 0.6, priority_unit_log2: int = -19, seed: int | None = None
    ) -> Self: ...
    def update(self, indexes: ArrayLike, priorities: ArrayLike) -> None:
        """Sets the priorities of indexes.

        Args:
            indexes: Integers `(n,)`, 0 to `capacity - 1`. If one appears twice, its last priority counts.
            priorities: float32 or float64 `(n,)`, before the exponent: finite and not negative. An index with 0 is
                never sampled; with the exponent 0 each index that was set is sampled with the same probability.

        Raises:
            PriorityError: A NaN, infinite or negative priority, with its position from 0; nothing was changed.
            ConfigError: An index out of range, or not as many priorities as indexes; nothing was changed.
        """
    def sample(self, batch_size: int, *, beta: float = 0.4) -> SampledIndexes:
        """Samples `batch_size` indexes, with replacement.

        One index comes from each of `batch_size` equal parts of the sum of priorities (Schaul et al., 2016, appendix
        B.2.1), in random order: every part of the batch is as good a sample as the whole.

        Args:
            batch_size: Indexes to sample, 1 to 65536.
            beta: Importance-sampling exponent of the weights (N P(i))^-beta, which are divided by the largest; 0 to 4.

        Raises:
            EmptyError: No index has a priority above zero.
            ConfigError: No samples, or a `beta` out of range.
            TooLargeError: Too many samples.
        """
    @property
    def total(self) -> float:
        """The sum of all priorities, after the exponent."""
    @property
    def capacity(self) -> int:
        """Number of indexes."""
    @property
    def priority_exponent(self) -> float:
        """Alpha."""
    @property
    def priority_unit_log2(self) -> int:
        """Base-2 logarithm of the smallest difference of two stored priorities."""
    @property
    def saturated_priorities(self) -> int:
        """Priorities that were cut to 2^39 units so far."""
    @property
    def rounded_up_priorities(self) -> int:
        """Priorities above 0 that were rounded up to one unit so far."""
    def __len__(self) -> int: ...

@final
class SampledIndexes:
    """The result of `SumTree.sample`: three arrays.

    One position has the index, probability and weight of one sample.
    """

    @property
    def indexes(self) -> NDArray[np.int64]:
        """The sampled indexes."""
    @property
    def probabilities(self) -> NDArray[np.float64]:
        """Their probabilities at the time of sampling."""
    @property
    def weights(self) -> NDArray[np.float32]:
        """Importance weights."""
    def __len__(self) -> int: ...

@final
class GradientUpdates(_ContextManager):
    """A worker of an asynchronous gradient job: contributes gradients and receives the means, as all other workers.

    `Replay.follow_gradients` makes it; `innet_drl.distributed.Replica` combines one with a model. Update `r` is the
    mean of the first gradients of round `r`, as many as the job's threshold. A thread sends and receives while the
    program computes. Use it as a context manager, or call `leave`.

    After a failure, `take` and `wait` first deliver the means already received, then raise `MissingWorkerError`,
    `SilentAggregatorError`, `HaltedError`, `ResetError` or `BehindError`. `restart` continues after `BehindError`.
    """

    @property
    def index(self) -> int:
        """Last update taken, or restarted from."""
    def offer(self, gradient: NDArray[np.float32], index: int) -> bool:
        """Contributes a gradient of the weights of update `index`; `False` while the previous one is in flight.

        Parts beyond the job's staleness bound are dropped and counted.

        Args:
            gradient: float32, C-contiguous, of the job's size.
            index: The update of its weights, at most the last one taken.

        Raises:
            ConfigError: An invalid `gradient` or `index`.
        """
    def take(self, mean: NDArray[np.float32]) -> int | None:
        """Copies the mean of the next update into `mean` and returns its number; `None` while it is incomplete.

        Raises:
            GradientError: The job failed, see above.
            ConfigError: `mean` is not C-contiguous float32 of the job's size.
        """
    def wait(self, deadline: float | None = None, *, for_gradient: bool = False) -> bool:
        """Waits for a mean or, with `for_gradient`, until a gradient may be contributed; `False` at the deadline.

        Args:
            deadline: Seconds to wait; `None` is the job's deadline, the longest.
            for_gradient: Also end when a gradient can be contributed.

        Raises:
            GradientError: The job failed, see above.
            DisconnectedError: The server has gone.
        """
    def restart(self, index: int) -> None:
        """Continues from the weights of update `index`."""
    def contributions(self) -> dict[str, int]:
        """Counters of this worker's gradients.

        Of the `offered` gradients, updates include `counted` completely, and `dropped` were too old, at least in part.
        `late_segments` missed their round and are in a later one, `dropped_segments` were dropped; `restarts` counts
        calls of `restart`.
        """
    def leave(self) -> None:
        """Leaves the job."""

@final
class GradientWorker(_ContextManager):
    """A worker of a gradient job: sums arrays over all workers, packet by packet, at the aggregator of a server.

    `Replay.join_gradients` makes it. Use it as a context manager, or call `leave`. Calls of several threads run one at
    a time, release the GIL and end on Ctrl-C. `deadline` is in seconds: `None` is the job's deadline, the longest.

    After any error except `ResetError`, the worker needs a `reset` before its next sum.
    """

    def sum(self, values: NDArray[np.float32], *, mean: bool = False, deadline: float | None = None) -> int:
        """Replaces `values` by their sum or mean over all workers, and returns the number of contributions.

        All workers sum the same number of values, in the same order of calls. An error may leave `values` partly
        replaced.

        Args:
            values: float32, C-contiguous, writable, of any shape; changed in place.
            mean: Divide by the number of workers in the sum.
            deadline: Seconds to wait.

        Raises:
            MissingWorkerError: Workers did not contribute in time, or have left; `missing` has their numbers.
            SilentAggregatorError: The aggregator did not answer.
            DisconnectedError: The server has gone.
            HaltedError: A worker or the aggregator suspended the job.
            ResetError: A worker reset the job: all workers repeat the sum.
            BehindError: The job has continued without this worker: pull the weights again.
            ConfigError: An invalid `values`.
        """
    def set_threshold(self, threshold: int, *, deadline: float | None = None) -> None:
        """Sets the number of contributions that make a sum.

        Later workers receive the sum of the first contributions. Not available in fixed point, nor below a parent.

        Raises:
            GradientError: The aggregator refused; the message says why.
        """
    def reset(self, *, deadline: float | None = None) -> None:
        """Drops segments in flight, and continues after a failure.

        Every worker of the job calls it after an error.
        """
    def force(self, *, deadline: float | None = None) -> None:
        """Sends all workers the incomplete sums of this worker's next round.

        Raises:
            GradientError: The aggregator refused; the message says why.
        """
    def halt(self, reason: str, *, deadline: float | None = None) -> None:
        """Suspends the job: every worker's sum fails with this reason until a reset."""
    def leave(self, *, deadline: float | None = None) -> None:
        """Leaves the job, and returns when the server has closed the connection.

        A sum that waits for this worker fails at once.
        """
    @property
    def round(self) -> int:
        """Number of the next round."""

@final
class Station:
    """DPDK device of a worker, and its IPv4 address.

    An argument of `Replay.join_gradients`, in packages built with the cargo feature `dpdk`; others raise
    `ConfigError`. The device is open until the worker leaves. A waiting worker polls, and occupies its core.

    Args:
        device: Argument of DPDK's `--vdev` (`net_memif0,role=client,id=0,socket=PATH`), or a card's PCI address.
        address: `ip:port` of the worker on the device's network: an IPv4 address that the kernel does not use.
        eal: Arguments of DPDK, separated by spaces (`--no-huge -m 64 --no-pci`); identical in a whole process.
        prefix: Prefix length of the network, 0 to 32.
        gateway: IPv4 address of the gateway to other networks.
        idle_sleep_us: Microseconds that an idle worker sleeps between polls, at most 1,000,000; 0 polls without
            sleeping.

    Raises:
        ConfigError: An invalid address.
    """

    def __new__(
        cls,
        device: str,
        address: str,
        *,
        eal: str = "",
        prefix: int = 24,
        gateway: str | None = None,
        idle_sleep_us: int = 0,
    ) -> Self: ...

@final
class Server(_ContextManager):
    """A server of a `Memory` in this process, until `close`, or until the memory is closed.

    It goes on without this object while the memory lives. Forked processes do not keep its sockets.
    """

    @property
    def addresses(self) -> list[str]:
        """Addresses for `connect`, with the actual ports."""
    @property
    def gradients(self) -> str | None:
        """UDP address of the gradient aggregator, `"ip:port"`; `None` without one."""
    @property
    def http(self) -> str | None:
        """URL of the statistics over HTTP, with the actual port; `None` without them."""
    def close(self) -> None:
        """Stops listening, finishes requests in progress, and closes the connections.

        Blocked calls of clients raise `ClosedError`. When a signal ends `innet-replay serve`, its clients reconnect
        instead (`reconnect_for` of `connect`).
        """

@final
class StoredTable:
    """A table of a replay, from `replay["name"]`; `len` is its number of items."""

    def __len__(self) -> int: ...
    @property
    def name(self) -> str:
        """The table's name."""
    @property
    def definition(self) -> Table:
        """The table's definition."""

@disjoint_base
class Replay(_ContextManager):
    """A replay memory: a `Memory` in this process, or a connection to a server (`connect`).

    All methods are thread-safe. `timeout` is in seconds, at most 1e9: 60 by default, `None` waits without limit, 0
    tries once. After the timeout a call raises `DeadlineError`, which names the cause; an unresponsive server delays
    it by up to `grace` of `connect`. Ctrl-C ends every wait. Waiting calls release the GIL. A replay must not be used
    in a forked child (`ForkError`): start processes with the method "spawn" or "forkserver", and connect there.
    """

    def __getitem__(self, name: str, /) -> StoredTable: ...
    def __contains__(self, name: str, /) -> bool: ...
    def create_table(self, table: Table, timeout: float | None = 60.0) -> None:
        """Creates a table, unless it exists with the same definition.

        Raises:
            TableDiffersError: It exists with another definition; the message shows the difference.
            TableError: It does not fit the memory's `max_bytes` beside other tables; the message says which of
                `capacity`, `capacity_bytes` and `max_bytes` to change.
        """
    def table(self, name: str, timeout: float | None = 60.0) -> Table:
        """The definition of a table.

        Raises:
            UnknownTableError: There is no table of this name.
        """
    def tables(self, timeout: float | None = 60.0) -> dict[str, Table]:
        """All tables by name, sorted."""
    def parameters(self, timeout: float | None = 60.0) -> dict[str, int]:
        """The newest version number of all parameters by name, sorted."""
    def empty_table(self, name: str, timeout: float | None = 60.0) -> None:
        """Removes every step and item of a table, and forgets its largest priority; its writers stay open."""
    def drop_table(self, name: str, timeout: float | None = 60.0) -> None:
        """Removes a table.

        Its iterators, writers and blocked `sample` calls raise `UnknownTableError`, even if a new table has its name.
        """
    def writer(
        self,
        table: str,
        num_envs: int,
        view: NStep | Sequences | Trajectory | Window | None = None,
        *,
        name: str = "",
        server: int | None = None,
        chunk_steps: int = 50,
        timeout: float | None = 60.0,
    ) -> Writer:
        """Opens a writer for `num_envs` environments.

        Args:
            table: The table's name.
            num_envs: Environments that are stepped together.
            view: The items' view, which fixes their windows; `None` is the table's view. Samples may use narrower
                views.
            name: Display name in errors, logs and statistics.
            server: Number of the writer's server, from 0, modulo the number of servers; the next server while that one
                is away. `None` selects the server with the fewest writers.
            chunk_steps: Steps of an environment that are packed and sent together, 1 to 65536:
                `num_envs * (chunk_steps + 1)` is at most the table's capacity. Fewer are sent when a call of this
                replay waits for steps of the table.
            timeout: Seconds to wait for the server.

        Raises:
            ConfigError: Numbers out of range, or pushes or windows too large for the table.
            SchemaError: A column that the view reads is missing, or of another shape.
        """
    @overload
    def sample(
        self,
        table: str | Mix,
        batch_size: int,
        view: NStep | Sequences | Trajectory | Window | None = None,
        *,
        beta: float = 0.4,
        device: None = None,
        normalize: Literal["batch", "memory"] = "batch",
        allow_short: bool = False,
        timeout: float | None = 60.0,
        writers_timeout: float | None = 60.0,
        threads: int | None = None,
    ) -> Batch:
        """Samples `batch_size` items, which the random samplers give in random order.

        Every part of a batch is then as good a sample as the whole, and a seed repeats the order. Items that fail to
        decode are skipped, removed from the memory and logged with the name of their writer; if none is left, others
        are sampled within the timeout.

        Args:
            table: The table's name, or a mix of tables.
            batch_size: Items to sample. The random samplers choose with replacement; see `Table` for the others.
            view: View that makes arrays of the items, at most as wide as the writer's; `None`: the table's view.
            beta: Importance-sampling exponent of the weights (N P(i))^-beta, 0 to 4; 1 corrects completely.
            device: `None` gives a NumPy batch (`Batch`); `"cpu"`, `"cuda"` or a torch device gives a batch of torch
                tensors (`innet_drl.torch_batches.TorchBatch`).
            normalize: Divides the weights by the largest of the batch, or of the whole memory.
            allow_short: At the deadline, return fewer items instead of raising an error.
            timeout: Seconds to wait for enough items, and for the rate limiter.
            writers_timeout: Seconds without a connected writer, 0 to 1e9, after which a call ends that has waited for
                writers as long; `None`, and `allow_short`, wait for `timeout`, with or without writers.
            threads: Decoding threads at most, 1 to 256; `None` is one for each core available to this process at its
                first sample. Batches of less than 256 KB take one.

        Raises:
            EmptyError: No item has a priority above zero.
            ViewError: The view reaches beyond the items' windows.
            DeadlineError: No sample within `timeout`; the message names the cause.
            NoWritersError: No writer of the table for `writers_timeout`; the message names the last one.
            ConfigError: Numbers out of range.
        """
    @overload
    def sample(
        self,
        table: str | Mix,
        batch_size: int,
        view: NStep | Sequences | Trajectory | Window | None = None,
        *,
        beta: float = 0.4,
        device: str | torch.device,
        normalize: Literal["batch", "memory"] = "batch",
        allow_short: bool = False,
        timeout: float | None = 60.0,
        writers_timeout: float | None = 60.0,
        threads: int | None = None,
    ) -> TorchBatch: ...
    @overload
    def batches(
        self,
        table: str | Mix,
        batch_size: int,
        view: NStep | Sequences | Trajectory | Window | None = None,
        *,
        beta: float | Callable[[], float] = 0.4,
        prefetch: int = 4,
        device: None = None,
        normalize: Literal["batch", "memory"] = "batch",
        allow_short: bool = False,
        acknowledge: bool = False,
        lease: float | None = None,
        timeout: float | None = 60.0,
        writers_timeout: float | None = 60.0,
        threads: int | None = None,
    ) -> Batches:
        """Samples batches repeatedly, decoding ahead of the reader.

        The arguments are those of `sample`, for each batch. A function `beta` is called before every batch, and applies
        to batches not decoded yet. Batches of torch tensors come from a `innet_drl.torch_batches.TorchBatches`; their
        copies to a CUDA device begin when they are decoded, in a thread of the core, so that `prefetch` batches are
        there. With `allow_short` they are sampled when `next` is called, not ahead. `timeout` is that of each `next`,
        and the wait of `writers_timeout` begins with the last batch, also over several calls of `next`.

        `prefetch` is the number of batches decoded ahead, 0 to 1024. With 0 `next` samples on demand, so that a batch
        follows every earlier update of priorities, and is repeatable with a seed. With 1, one batch is decoded ahead
        and one more request is in flight to a server. From 2 on two requests are in flight, and over a long link as
        many more as the round trip needs: at most 64, and 64 MiB of replies.

        With `acknowledge` the items of a batch belong to their reader from `next` until `Batch.acknowledge`: they stay
        in the table, which counts them as unread, and no other reader gets them. If the iterator is closed, its
        connection breaks, its process dies, or the batch is not acknowledged within `lease` seconds (`None`: no limit),
        they return to where they were. Batches sampled ahead return, too. So each item of a `Table.queue` is processed
        at least once, and exactly once where no reader dies or is late. For one table with `max_times_sampled`, in this
        process or on one server; tables that are no queues may evict such items.
        """
    @overload
    def batches(
        self,
        table: str | Mix,
        batch_size: int,
        view: NStep | Sequences | Trajectory | Window | None = None,
        *,
        beta: float | Callable[[], float] = 0.4,
        prefetch: int = 4,
        device: str | torch.device,
        normalize: Literal["batch", "memory"] = "batch",
        allow_short: bool = False,
        acknowledge: bool = False,
        lease: float | None = None,
        timeout: float | None = 60.0,
        writers_timeout: float | None = 60.0,
        threads: int | None = None,
    ) -> TorchBatches: ...
    def update_priorities(
        self,
        table: str | Mix,
        ids: ArrayLike,
        priorities: ArrayLike,
        timeout: float | None = 60.0,
        *,
        wait: bool = True,
    ) -> UpdateReceipt:
        """Sets the priorities of sampled items.

        Updates apply in the order of the calls. Batches requested before an update arrives may still be sampled by the
        earlier priorities.

        Args:
            table: The table's name, or the mix that was sampled.
            ids: uint64 `(B,)`, from a batch. Ids of items that are gone, and ids of other tables and memories, are
                counted and ignored. The log warns once of positions in a buffer, and of ids of another table that this
                replay has sampled.
            priorities: float `(B,)`, before the exponent: finite and not negative. If an id appears
                twice, its last value counts.
            timeout: Seconds to wait for the server.
            wait: Wait for the server's answer. `False` only sends, and saves the round trip: up to 64 updates are in
                flight, then the call waits for the first. The counts are of all updates answered since the last call;
                an error of an earlier update is raised by the next call, which then sends nothing. A call that waits,
                and `close`, wait for all earlier updates.

        Raises:
            PriorityError: A NaN, infinite or negative priority, with its position from 0; nothing was changed.
        """
    def episodes(self, table: str, timeout: float | None = 60.0) -> Episodes:
        """Reads all episodes of a table, whatever its sampler, while it is in use.

        An episode is a `Batch` whose first dimension is its steps in their order: the columns, and the bool arrays
        `terminated`, `truncated`, `first` and `final` (a final row: only its observation is set). Episodes come in the
        order in which they end, then those that have not ended. They are the steps that the table has when the first
        one is read, without those evicted meanwhile: an episode may lack its beginning. This replay's writers send
        their steps before. The reader keeps one episode unpacked, and those that were played at the same time packed.
        An episode of more than 256 MB comes in parts, whose `first` begins with false but for the first one.

        `writer.extend(**{name: array[:, None] for name, array in episode.items()})` writes an episode to another
        table; each part of a dictionary takes `[:, None]`, and a `Ragged` nothing. Files: `innet_drl.datasets`.

        Args:
            table: The table's name.
            timeout: Seconds that each `next` may wait for the server.

        Raises:
            UnknownTableError: There is no table of this name; by `next`, that it was dropped.
            CorruptError: By `next`, for steps that do not decode.
        """
    def put_parameters(
        self,
        name: str,
        tensors: Mapping[str, Any],
        *,
        dtype: Literal["bfloat16"] | None = None,
        timeout: float | None = 60.0,
    ) -> int:
        """Stores a new version of named parameters, and returns its number: 1, 2, 3, ...

        Args:
            name: Name by which readers ask for them.
            tensors: NumPy arrays or torch tensors by name, for example a `state_dict`.
            dtype: `"bfloat16"` rounds floats to half the bytes of float32 on the wire; `None` keeps them.
            timeout: Seconds to wait for the server.

        Raises:
            ParametersError: An array of a dtype that cannot be stored, or too many bytes.
        """
    def drop_parameters(self, name: str, timeout: float | None = 60.0) -> None:
        """Removes parameters, if there are any of this name, and frees their memory.

        The next `put_parameters` continues their version numbers, so that readers notice it.
        """
    def get_parameters(
        self,
        name: str,
        newer_than: int = 0,
        timeout: float | None = 60.0,
        *,
        device: str | torch.device | None = None,
        writer: Writer | None = None,
    ) -> Parameters | None:
        """The newest version of named parameters, or `None` when it is not newer than `newer_than`.

        A reader gets one whole version, never parts of two.

        Args:
            name: Their name in `put_parameters`. If it does not exist but others do, the log warns once.
            newer_than: The version that the caller has; 0 is none.
            timeout: Seconds to wait for the server; the call does not wait for newer parameters.
            device: `None` gives NumPy arrays; `"cpu"`, `"cuda"` or a torch device gives torch tensors, as
                `Module.load_state_dict` takes them.
            writer: Writer whose next steps are made with these parameters, for `max_version_lag` of its table, and
                for the versions of its steps if the table names them. Any thread may pass it, even while the writer
                waits.
        """
    def stats(self, timeout: float | None = 60.0) -> dict[str, Any]:
        """Counters and gauges of the memory: tables, bytes, writers, parameters.

        `docs/reference/statistics.md` explains every name.
        """
    def join_gradients(
        self,
        job: str,
        worker: int,
        workers: int,
        *,
        world: int | None = None,
        name: str = "",
        arithmetic: Literal["float32", "fixed"] = "float32",
        segment_values: int = 360,
        deadline: float = 30.0,
        via: str | None = None,
        station: Station | None = None,
    ) -> GradientWorker:
        """Joins a job that sums arrays over its workers, in the aggregator of this server.

        The first worker creates the job. All workers must pass identical arguments, except `worker`, `name`, `via` and
        `station`. The worker has its own connection, and membership ends with it. See `docs/how-to/gradients.md`.

        Args:
            job: The job's name, at most 64 bytes.
            worker: This worker's number, from 0. A worker that joins with a taken number replaces the earlier one.
            workers: Workers at this server, at most 64.
            world: Workers at all servers; more than `workers` if the server has a parent. `None` is `workers`.
            name: Display name in errors. `""` is the host's name and the process id.
            arithmetic: `"float32"` adds in the order of arrival. `"fixed"` is bit-identical in every order: integers
                scaled to the largest value of each segment, with 31 bits minus the bits for the number of workers.
            segment_values: Values of a datagram, 1 to 360; 360 fill an Ethernet frame.
            deadline: Longest time of any call in seconds, including this one; the error names missing workers.
            via: `ip:port` for datagrams instead of the server's own: a relay, or a translated (NAT) address.
            station: DPDK device for datagrams; the connection uses the kernel's network stack.

        Raises:
            ConfigError: The server has no aggregator; arguments are out of range, or differ from other workers'; the
                station's device is unusable, or the package was built without DPDK.
            TooLargeError: The server is at its limit of jobs.
            SilentAggregatorError: Datagrams do not get through.
            ConnectError: No server answers at the address.
        """
    def follow_gradients(
        self,
        job: str,
        worker: int,
        workers: int,
        *,
        values: int,
        threshold: int,
        staleness: int = 3,
        updates: int | None = None,
        name: str = "",
        segment_values: int = 360,
        deadline: float = 30.0,
    ) -> GradientUpdates:
        """Joins an asynchronous job, whose workers do not wait for each other.

        The first worker creates the job; all workers must pass identical arguments, except `worker` and `name`. The
        worker begins with the weights of update 0; late workers call `GradientUpdates.restart`.
        See `docs/how-to/data-parallel.md`.

        Args:
            job: The job's name, at most 64 bytes.
            worker: This worker's number, from 0. A worker that joins with a taken number replaces the earlier one.
            workers: Number of workers, at most 64.
            values: float32 values of a gradient.
            threshold: Gradients that make an update (H), from 1 to `workers`.
            staleness: Updates by which the weights of a gradient may be behind (S). The server keeps S + 1 sums.
            updates: Last update of the job; `None` for no end.
            name: Display name in errors. `""` is the host's name and the process id.
            segment_values: Values of a datagram, 1 to 360; 360 fill an Ethernet frame.
            deadline: Longest time of any call, and of a round's contributions, in seconds; then the job fails.

        Raises:
            ConfigError: The server has no aggregator; arguments are out of range, or differ from other workers'.
            TooLargeError: The server is at its limit of jobs, or the job needs more than `gradients_job_bytes`.
            SilentAggregatorError: Datagrams do not get through.
            ConnectError: No server answers at the address.
        """
    def close(self) -> None:
        """Closes the connections, or the memory with its servers.

        Blocked calls of other threads raise `ClosedError`, as do all calls of its writers and iterators of batches.
        Close those first: pending pushes are not stored. Servers end as by `Server.close`. `close` waits up to 0.25 s
        for answers to `update_priorities(wait=False)`.
        """

@final
class Memory(Replay):
    """A replay memory in this process, which can be saved, restored and served.

    Args:
        tables: One or more tables to create.
        max_bytes: Limit for all tables and parameters in bytes; `None` is 80 % of the machine's memory, or of what is
            left of the process's cgroup or address space (`ulimit -v`) if that is less. A table reserves its
            `capacity_bytes`, and about 100 bytes for each step of its `capacity`. A server adds a 16th of the memory
            that the process may have, up to 512 MiB, for received data.
        seed: Makes samples repeatable if one thread writes and samples.

    Raises:
        TableError: A table that cannot be made, or does not fit `max_bytes` or the process; the message has the
            numbers.
    """

    def __new__(
        cls, tables: Table | Sequence[Table] = (), *, max_bytes: int | None = None, seed: int | None = None
    ) -> Self: ...
    def save(self, path: str | PathLike[str]) -> None:
        """Writes all tables to a file, while they are in use. This replay's writers send their steps before.

        The file has steps, items with their priorities and numbers of samples, the rate limiter's counts and the
        statistics, but neither parameters nor writers. It shows each table between two pushes when the save began,
        one table right after the other. Steps evicted during the save are left out, and each item has its priority at
        the time of writing.

        An existing file is replaced once the new one is complete on disk. The target of a symbolic link is replaced,
        and the link stays. Folders, devices, pipes and sockets are refused.

        Args:
            path: The file. A step takes the same space as in memory.

        Raises:
            StorageError: The file cannot be written, or the path is not a file; `errno` has the system's reason.
        """
    def restore(self, path: str | PathLike[str]) -> None:
        """Restores the tables of a file that `save` wrote.

        Existing tables of these names must be empty, and keep their capacity and limits; a smaller table keeps the
        newest steps. Missing tables are created. Writers must be reopened and earlier ids are stale; priorities and
        the ratio of samples to inserts continue.

        Args:
            path: The file. It is checked as a whole before anything is stored.

        Raises:
            StorageError: The file cannot be read.
            CorruptError: The file is damaged, truncated, no snapshot, or a snapshot of another format.
            TableDiffersError: A table has other columns, another sampler, exponent or unit; the message shows it.
            ConfigError: A table has steps already.
            TableError: A new table does not fit `max_bytes`.
        """
    def serve(
        self,
        addresses: str | Sequence[str],
        *,
        token: str | None = None,
        learner_token: str | None = None,
        actor_token: str | None = None,
        tls_cert: str | PathLike[str] | None = None,
        tls_key: str | PathLike[str] | None = None,
        trusted_network: bool = False,
        io_threads: int = 0,
        spin: bool = False,
        gradients: str | None = None,
        http: str | None = None,
        snapshot: str | PathLike[str] | None = None,
        snapshot_every: float | None = None,
    ) -> Server:
        """Serves this memory to clients.

        Args:
            addresses: `"unix:///path"`, `"innet://host:port"` or `"innets://host:port"` (TLS); port 0 chooses a
                free one.
            token: Shared secret of at least 16 bytes, which is never sent: clients prove that they know it. It allows
                every request. Addresses beyond loopback need it, or one of the next two.
            learner_token: Secret of learners: it allows everything except emptying and dropping tables, dropping
                parameters, and snapshots on request.
            actor_token: Secret of actors: it allows writing with writers of their own, and reading definitions,
                parameters and statistics. Other requests raise `ForbiddenError`.
            tls_cert: PEM file with the certificate chain.
            tls_key: PEM file with its key.
            trusted_network: Allow addresses beyond loopback without token and TLS. Gradients there always need it:
                their datagrams are neither encrypted nor authenticated.
            io_threads: Threads that serve connections, at most 256; 0 is one for every two cores.
            spin: Poll without sleeping: lower latency, and each thread occupies a core.
            gradients: UDP address `"ip:port"` of the gradient aggregator; port 0 chooses a free one.
            http: `"host:port"` for statistics over HTTP: `/metrics`, `/healthz`, `/stats` and a live page; port 0
                chooses a free one. It needs a token and TLS, or `trusted_network`, where `addresses` do.
            snapshot: Folder for snapshots of the memory, created if missing; only this user can read its files. The
                newest intact one is restored into this memory, whose tables must be empty. Snapshots are saved at
                intervals and by `close`; the two newest are kept.
            snapshot_every: Seconds between two snapshots in `snapshot`, at most 1e9; 60 by default. 0 saves only on
                request and at `close`.

        Raises:
            ConfigError: A setting is invalid, or the newest snapshot does not fit this memory.
            StorageError: The snapshot folder cannot be written or is another server's, or an address cannot be bound.
        """

def connect(
    url: str,
    *,
    token: str | None = None,
    tables: Table | Sequence[Table] = (),
    timeout: float | None = 10.0,
    tls_ca: str | PathLike[str] | None = None,
    spin: bool = False,
    config: str | PathLike[str] | None = None,
    grace: float = 5.0,
    reconnect_for: float = 60.0,
    namespace: str | None = None,
) -> Replay:
    """Connects to a server, or to several servers that form one memory, and reconnects after failures.

    If a server restarts without its tables, the client recreates those that it made.

    Args:
        url: `"innet://host:port"`, `"innets://host:port"` (TLS), `"unix:///path"`, or, in a package built with F-Stack,
            `"innet+fstack://address:port"`. Several servers are `"innet://a:7710,b:7710"`: each keeps a part of every
            table, see `docs/how-to/shards.md`.
        token: The server's token; it is never sent. `None` is the environment variable INNET_TOKEN, if set and not
            empty; `""` is no token.
        tables: One or more tables to create. With an actor's token they must exist with these definitions.
        timeout: Seconds to retry until the server listens, accepts another connection and answers; after five the log
            (`innet_drl`) names the server. 0 is one attempt of at most `grace` seconds; `None` retries forever. A wrong
            token or certificate, and an answer in another protocol, raise at once.
        tls_ca: PEM file with the server's certificate, whose host and dates are not checked, or its authority's.
            Needed for `innets://`: the system's authorities are not used.
        spin: Poll for answers without sleeping: lower latency, and the calling thread occupies a core.
        config: F-Stack's configuration file, for `innet+fstack://`. F-Stack starts once in a process, so all such
            addresses of a process need the same file.
        grace: Seconds, at most 1e9, by which a call may exceed its `timeout` to receive the server's answer, which
            names the cause.
        reconnect_for: Seconds, at most 1e9, for which a call without a shorter `timeout` reconnects after a broken
            connection; then it raises `ConnectError` or `DisconnectedError`. The log names the server meanwhile.
        namespace: Name of the run, for programs that share a server: names of tables, writers, parameters and gradient
            jobs begin with it and a slash at the server; calls omit this prefix. Up to 40 ASCII letters, digits, `.`,
            `_` and `-`. `None` is the whole server, with full names.

    Raises:
        ConfigError: An invalid address, one that does not match `tls_ca`, or one without TLS of a server with TLS; a
            token of less than 16 bytes; an invalid namespace; an address that is named twice, servers of several
            releases or of different tables.
        TableDiffersError: Tables that exist with another definition, or with different ones at several servers.
        ConnectError: No server answers at the address, or it is at its limit of connections until `timeout`.
        DisconnectedError: The peer closed every connection until `timeout`.
        AuthenticationError: The token is missing or wrong, or the certificate is not trusted.
        VersionError: The server has another version of the protocol; the message names both releases.
    """

def run_server_cli(arguments: Sequence[str]) -> int:
    """Runs the command line of `innet-replay` and returns its exit status."""

def _restored_batch(len: int, memory: tuple[NDArray[np.uint8], list[Any]]) -> Batch:
    """The batch that was pickled."""

@final
class _Lease:
    """The lease of a batch, which a batch of tensors takes over."""

    def _acknowledge(self, timeout: float | None = 60.0) -> None: ...

@final
class _Checked:
    """A definition of `innet_drl.definitions`, checked."""

    def __new__(cls, json: str) -> Self: ...
    @property
    def json(self) -> str:
        """The definition with all defaults."""
