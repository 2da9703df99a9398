"""Definitions: tables and their columns, views and mixes, as values.

An object is checked when it is made: its fields become what JSON can say, and the core checks that JSON, as a server
does. In a type, `| Any` is for what a field is also made of: a dtype of `"uint8"`, a shape of an integer.
"""

from __future__ import annotations

import abc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from functools import partial
from typing import Any, ClassVar, Self, get_args

import numpy as np

from innet_drl import reading
from innet_drl._core import _Checked
from innet_drl.errors import TableError
from innet_drl.reading import Codec, Padding, Sampler
from innet_drl.spaces import columns_of_space

__all__ = ["Column", "Mix", "NStep", "Sequences", "Table", "Trajectory", "Window"]


def _columns(name: str, value: Any) -> dict[str, Column]:
    given = reading.typed(Mapping, "a mapping of names to columns", name, value).items()
    return {reading.text("a name of a column", name): _column(column) for name, column in given}


def _column(value: Any) -> Column:
    if isinstance(value, Column):
        return value
    return Column(*value) if isinstance(value, tuple) and len(value) == 2 else Column(value)


def _view(_name: str, value: Any) -> _View | None:
    if value is None or isinstance(value, _View):
        return value
    raise TypeError(f"a view is an NStep, Sequences, a Trajectory or a Window, got {type(value).__name__} {value!r}")


_READERS: dict[str, Callable[[str, Any], Any]] = {
    "str": reading.text,
    "str | None": lambda name, value: value if value is None else reading.text(name, value),
    "int": reading.integer,
    "int | Any": reading.integer,
    "float": reading.number,
    "bool": lambda name, value: bool(reading.typed(bool | np.bool_, "True or False", name, value)),
    "Padding": partial(reading.choice, get_args(Padding)),
    "Sampler": partial(reading.choice, get_args(Sampler)),
    "Codec | None": lambda name, value: value if value is None else reading.choice(get_args(Codec), name, value),
    "np.dtype[Any] | Any": reading.column_dtype,
    "tuple[int | None, ...] | Any": reading.column_shape,
    "int | Mapping[str, int]": reading.stack_sizes,
    "Sequence[str]": reading.column_names,
    "Mapping[str, Column | Any]": _columns,
    "Mapping[str, float]": reading.shares,
    "NStep | Sequences | Trajectory | Window | None": _view,
}
"""What reads a field, by its type."""


@dataclass(frozen=True, eq=False)
class _Definition:
    """Reads its fields when it is made, and has the core check them. Equal to another one that is the same JSON."""

    def __post_init__(self) -> None:
        kept = vars(self)
        for field in fields(self):
            kept[field.name] = _READERS[str(field.type)](field.name, kept[field.name])
        # What the core reads when a call takes this definition.
        kept["_checked"] = _Checked(json.dumps(self._json(), default=str))

    def _settings(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_checked"}

    @abc.abstractmethod
    def _json(self) -> dict[str, Any]:
        """What the core reads: the kind of the definition, and its settings."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Definition):
            return NotImplemented
        return bool(vars(self)["_checked"].json == vars(other)["_checked"].json)

    def __hash__(self) -> int:
        return hash(vars(self)["_checked"].json)


@dataclass(frozen=True, eq=False, repr=False)
class Column(_Definition):
    """A column of a table: one value for each step.

    Args:
        dtype: bool, an integer or a float, as NumPy writes it (`"uint8"`, `np.float32`, ...).
        shape: Shape of one value; `()` is a scalar. With `None` as its first dimension, `(None,)` or `(None, 3)`, the
            column is *ragged*: each value has a length of its own, which may be 0, and batches have `Ragged` arrays.
        codec: `"lz4"` compresses a value with LZ4, or its difference from an earlier step of the stream if that takes
            at most a third of the bytes; `"zstd"` does so with zstd: fewer bytes, more time. `"none"` stores raw
            values. `None` is `"lz4"` from 64 bytes on (vectors of floats: 1,024), `"none"` below, and for ragged
            columns, which are not stored as differences. It is chosen when the object is made: give it again with
            `dataclasses.replace`.
        finite: Whether `append` refuses NaN and infinities if the column is `reward`, or the observation of the
            writer's or the table's view. Integers and other columns are not checked.
        max_length: Largest length of a value of a ragged column; 0 sets no limit but the 256 MiB of a step.

    Raises:
        ConfigError: An unknown dtype or codec, or a shape of other than positive integers.
    """

    dtype: np.dtype[Any] | Any
    shape: tuple[int | None, ...] | Any = ()
    codec: Codec | None = None
    finite: bool = True
    max_length: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.codec is None:
            vars(self)["codec"] = json.loads(vars(self)["_checked"].json)["column"]["codec"]

    def __repr__(self) -> str:
        finite = "" if self.finite else ", finite=False"
        most = f", max_length={self.max_length}" if self.max_length else ""
        return f'Column("{self.dtype}", shape={self.shape}, codec="{self.codec}"{finite}{most})'

    @property
    def is_ragged(self) -> bool:
        """Whether each value has a length of its own."""
        return self.shape[:1] == (None,)

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "shape": [size or 0 for size in self.shape]}

    def _json(self) -> dict[str, Any]:
        return {"column": {"name": "", **self._settings()}}

    @classmethod
    def _from_json(cls, shape: list[int], **settings: Any) -> Self:
        return cls(shape=tuple(size or None for size in shape), **settings)


class _View(_Definition):
    _kind: ClassVar[str]

    def _json(self) -> dict[str, Any]:
        return {"view": {self._kind: self._settings()}}


@dataclass(frozen=True, eq=False)
class NStep(_View):
    """Transitions with n-step returns.

    Sutton & Barto (2018), equation 7.1; the observation stack is that of Mnih et al. (2013).
    For the anchor step t with m <= n steps to the end of the episode or life: `observation` is the stack
    that ends at t, `action` is a_t, `reward` is r_{t+1} + gamma r_{t+2} + ... + gamma^(m-1) r_{t+m},
    `next_observation` is the stack that ends at t+m, and `discount` is gamma^m: 0 where t+m terminated, and
    gamma^m where it was truncated, which bootstraps. If the observation after a termination never came, the stack ends
    with zeros; if that after a truncation never came, t+m is the truncated step itself.

    Args:
        stack: Observations in a stack, oldest first; with 1 the stack's dimension is left out. For an observation of
            several parts it may be given by part, `{"camera": 4}`; the other parts have no stack.
        n: Steps of the return.
        gamma: Discount of one step, 0 to 1.
        observation: The column that holds the observation, or the name before the slash of its parts' columns.
        padding: Before an episode's first observation: `"zero"`, or `"repeat"` of the first.

    Raises:
        ConfigError: A number out of range; the message has the range.
    """

    _kind = "n_step"
    stack: int | Mapping[str, int] = 1
    n: int = 1
    gamma: float = 0.99
    observation: str = "observation"
    padding: Padding = "zero"


@dataclass(frozen=True, eq=False)
class Sequences(_View):
    """Sequences for recurrent agents.

    As R2D2 has them (Kapturowski et al., 2019), with stored state and burn-in.
    An item covers `burn_in + length` steps and the observation after the last. A new item starts every
    `period` steps, counted from the start of the episode (or life). An item needs one step beyond its
    burn-in; where the episode ends earlier, the rest is padded with zeros and `mask` is false. The observation after
    the end is there, also after a termination, where it came. A truncated step without it has its values, but no
    `discount` and no `mask`.

    Args:
        length: Steps to learn from.
        burn_in: Steps before these, which only warm up the recurrent state.
        period: Steps from one item to the next; `None` is `length`, as given: `dataclasses.replace` keeps the number.
        stack: Observations in a stack, oldest first; with 1 the stack's dimension is left out. For an observation of
            several parts it may be given by part, `{"camera": 4}`; the other parts have no stack.
        observation: The column that holds the observation, or the name before the slash of its parts' columns.
        padding: Before an episode's first observation: `"zero"`, or `"repeat"` of the first.
        gamma: Discount of one step, 0 to 1.
        state: Columns of the stored recurrent state, or names before the slash of their parts, delivered for the first
            step only.

    Raises:
        ConfigError: A number out of range; the message has the range.
    """

    _kind = "sequences"
    length: int
    burn_in: int = 0
    period: int | Any = None
    stack: int | Mapping[str, int] = 1
    observation: str = "observation"
    padding: Padding = "zero"
    gamma: float = 0.99
    state: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.period is None:
            vars(self)["period"] = self.length
        super().__post_init__()


@dataclass(frozen=True, eq=False)
class Trajectory(_View):
    """Whole trajectories: one item for each finished episode (or life).

    An episode longer than `max_steps` is divided: each part is an item as soon as the step after it is there, the rest
    at the end. An episode that is reset without an end, or that its writer leaves unfinished, becomes no item beyond
    its parts, and `Writer.dropped_windows` counts it. The priority of an item is the one given last for a step of it. A
    group, such as the responses to one prompt, is written as the steps of one episode: only a complete one is an item.

    Every column comes as `Ragged` `[B][T, ...]`, the T steps of each item, all with the same offsets; a ragged column
    as `Ragged` of `Ragged`. `returns` (float32, `Ragged` `[B][T]`) is the sum of gamma^i r_{t+i+1} from each step to
    the end of the item, where the table has a scalar `reward`. `begins` and `ends` (bool `[B]`) tell whether the item
    has the first and the last step of its episode, `terminated` and `truncated` (bool `[B]`) how that ended.
    `next_observation` (`[B, ...]`) is the observation after the last step, zeros where it did not come, as `has_next`
    (bool `[B]`) tells; a table without an observation has neither.

    Args:
        max_steps: Most steps of an item, 1 to 65,534: the capacity of the table has to hold as many of each stream.
        gamma: Discount of one step in `returns`, 0 to 1.
        observation: The column that holds the observation, or the name before the slash of its parts' columns. A table
            may lack the default one: its steps are not those of an environment.

    Raises:
        ConfigError: A number out of range; the message has the range.
    """

    _kind = "trajectory"
    max_steps: int = 1000
    gamma: float = 1.0
    observation: str = "observation"


@dataclass(frozen=True, eq=False)
class Window(_View):
    """The raw rows around an anchor.

    For uses that `NStep` and `Sequences` do not cover. At the end of an episode or life the last row is the one with
    the observation after it, where it came: the final row, or the first of the next life.

    Args:
        before: Rows before the anchor.
        after: Rows after the anchor.
    """

    _kind = "window"
    before: int
    after: int


@dataclass(frozen=True, eq=False)
class Mix(_Definition):
    """Several tables, and the share of each in a batch: in place of a table's name in `sample`, `batches` and so on.

    For example half demonstrations and half of one's own steps, as in RLPD (Ball et al., 2023) and, with other shares,
    DQfD (Hester et al., 2018). The tables have the same columns. A batch has a number of items of each table that is
    its share, rounded, mixed at random. The probability of an item is the share of its table, as rounded, times its
    probability there, so the importance weights are exact. Batches have the array `tables` too: uint8 `(B,)`,
    the position of each item's table in the mix.

    A batch waits until each table has its items. A `sample` on a server that ends at its timeout has counted the items
    of the tables before the one that it waited for; iterators keep them for the next batch.

    Args:
        shares: Table names to shares: above 0, with a sum of 1.

    Raises:
        ConfigError: A share out of range, or a sum other than 1.
    """

    shares: Mapping[str, float]

    def _json(self) -> dict[str, Any]:
        return {"mix": list(self.shares.items())}


@dataclass(frozen=True, eq=False)
class Table(_Definition):
    """The definition of a replay memory: columns, capacity, sampler and limits.

    Args:
        name: 1 to 128 bytes.
        columns: Name to `Column`, to `(dtype, shape)`, or to a dtype alone. The order is the order of the
            row. `NStep` and `Sequences` read the columns `action` and `reward` beside the observation. A column with
            a slash in its name is a part of a structure: `observation/camera`.
        capacity: Steps held before the oldest are evicted; at most 2^24.
        capacity_bytes: Stored bytes, with 512 for each chunk, beyond which the oldest steps are evicted. 0 is enough
            for `capacity` uncompressed steps, each in a chunk of its own, where a value of a ragged column without
            `max_length` counts for 64 KiB.
        sampler: `"prioritized"` samples in proportion to priority^priority_exponent (Schaul et al., 2016),
            `"uniform"` all items with equal probability, `"rank_based"` in proportion to 1 / rank^priority_exponent
            (same paper): rank 1 has the highest priority, and items of priority 0 are sampled, too. A sample sorts
            the ranks once more than one in 16 items were inserted, updated or removed since the last sort; between two
            sorts the ranks of changed items are approximate, except rank 1. The others always sample the first
            item of an order, until it has been sampled `max_times_sampled` times: `"fifo"` the oldest (needs
            `max_times_sampled`), `"lifo"` the newest, `"max_heap"` and `"min_heap"` the highest and lowest priority.
            Among equal priorities the least recently inserted or updated item is first. `"fifo"`, `"lifo"` and the
            heaps take a lock for each item, `"rank_based"` for each batch; they have 32 bytes more for each step of
            `capacity`, `"rank_based"` 40.
        priority_exponent: Alpha, 0 to 4. It is applied once, where the priorities are stored.
        priority_unit_log2: Base-2 logarithm of the smallest difference of two stored priorities, after the
            exponent; -30 to 0. Positive ones are at least one unit and at most 2^39: by default 1.9e-6 to 1.0e6, with
            -30 9.3e-10 to 512.
        live_max_priority: New items without a priority get the largest priority of the live items. By default it is
            the largest since the table was created or emptied (Schaul et al.), so one outlier has a lasting effect.
            Costs a lock in pushes and updates, and 32 bytes for each step of `capacity`.
        max_times_sampled: Samples after which an item is removed, at least `samples_per_insert`; 0 keeps items.
        min_size: Items needed before the first sample.
        samples_per_insert: Items sampled for each item inserted, at most 1e9, held to within `slack`; 0 sets no limit.
        slack: Largest difference, in sampled items, between the samples and `samples_per_insert` times the inserts; at
            most 1e15. 0 derives it: `samples_per_insert` times the larger of 1,024 and `min_size / 10`, at least 4,096,
            and at most `samples_per_insert * (capacity - min_size)`. A sample has at most
            `2 * slack - samples_per_insert` items. With `max_times_sampled`, items that are evicted unsampled leave
            fewer samples than the ratio expects: writers then continue as soon as a sample waits.
        queue_size: Items for which a queue has room, see `queue`; 0 is no queue.
        max_version_lag: Versions by which the parameters of a writer may be behind the newest while its steps are
            stored; further steps wait until it gets newer ones by `Replay.get_parameters(writer=...)`. 0 sets no limit.
        parameters: Name of the parameters (`Replay.put_parameters`) that the steps come from. A step has the version
            of `append(version=...)`, or that of the last `Replay.get_parameters(writer=...)`; 0 is unknown. A batch has
            the array `versions`: the smallest version of the rows of each item.
        max_sample_lag: Versions by which a sampled item may be behind the newest of `parameters` at the server that
            samples it. An older one is removed and counted (`expired_items`), and another one sampled. An item with a
            row of an unknown version is never too old. 0 sets no limit.
        view: View of writers and samples that name none.

    Raises:
        TableError: An invalid argument; the message has the allowed values.
    """

    name: str
    columns: Mapping[str, Column | Any]
    capacity: int
    _: KW_ONLY
    capacity_bytes: int = 0
    sampler: Sampler = "prioritized"
    priority_exponent: float = 0.6
    priority_unit_log2: int = -19
    live_max_priority: bool = False
    max_times_sampled: int = 0
    min_size: int = 1
    samples_per_insert: float = 0.0
    slack: float = 0.0
    queue_size: int = 0
    max_version_lag: int = 0
    parameters: str | None = None
    max_sample_lag: int = 0
    view: NStep | Sequences | Trajectory | Window | None = None

    def _json(self) -> dict[str, Any]:
        columns = [{"name": name, **column._settings()} for name, column in self.columns.items()]
        view = self.view and self.view._json()["view"]
        return {"table": {**self._settings(), "columns": columns, "view": view}}

    @classmethod
    def _from_json(cls, text: str) -> Self:
        """The table that the core has as this JSON."""
        settings = json.loads(text)
        columns = {column.pop("name"): Column._from_json(**column) for column in settings.pop("columns")}
        views = {view._kind: view for view in (NStep, Sequences, Trajectory, Window)}
        for kind, view in (settings.pop("view", None) or {}).items():
            settings["view"] = views[kind](**view)
        return cls(columns=columns, **settings)

    @classmethod
    def queue(
        cls,
        name: str,
        columns: Mapping[str, Column | Any],
        size: int,
        *,
        capacity: int | None = None,
        max_times_sampled: int = 1,
        **settings: Any,
    ) -> Self:
        """A queue: first in, first out, each item once. It loses no item.

        A push waits while `size` items are unread, and nothing unread is evicted. A push is applied as a whole, so its
        other items may be more than that; a sample has at most `size` items. Steps take their room until all items of
        their chunk are read. Readers whose items must survive them acknowledge their batches: see `Replay.batches`.

        Args:
            name: As in `Table`.
            columns: As in `Table`.
            size: Items for which it has room, 1 to 2^24: `queue_size`.
            capacity: As in `Table`, but pushes wait while it is full. By default 16 steps for each item, at least 4,096
                and at most 2^24: give more for longer items.
            max_times_sampled: Batches that get each item.
            **settings: As in `Table`.

        Raises:
            TableError: As in `Table`.
        """
        if not 1 <= reading.integer("queue_size", size) <= 1 << 24:
            raise TableError(f"the size of a queue is 1 to 2^24 items, got {size}")
        steps = min(max(16 * size, 4096), 1 << 24) if capacity is None else capacity
        settings |= {"sampler": "fifo", "max_times_sampled": max_times_sampled, "queue_size": size}
        return cls(name, columns, steps, **settings)

    @classmethod
    def from_spaces(
        cls,
        name: str,
        observation_space: Any,
        action_space: Any,
        capacity: int,
        *,
        columns: Mapping[str, Column | Any] | None = None,
        **settings: Any,
    ) -> Self:
        """A table for the steps of a Gymnasium environment.

        The columns are `observation` and `action`, with dtypes and shapes of the spaces, and `reward` (float32). A
        `Dict` or `Tuple` space has a column for each of its parts: `observation/camera`, `observation/arm/joints`,
        `action/0`. Values of any length are ragged columns: the bytes of a text (UTF-8, uint8 `(None,)`), the elements
        of a `Sequence`, and `nodes`, `edges` and `edge_links` of a `Graph`, as `observation/nodes`.

        Args:
            name: As in `Table`.
            observation_space: Space of one observation: `env.observation_space`, or `single_observation_space` of a
                vector environment. Batches have its dtype, often float64; Gymnasium's wrapper `DtypeObservation`
                changes it.
            action_space: Space of one action: `env.action_space`, or `single_action_space`.
            capacity: As in `Table`.
            columns: Additional columns, or replacements of these by their names.
            **settings: As in `Table`.

        Raises:
            ConfigError: A `OneOf`, a `Sequence` of values of several parts or of any length, or a part whose name is a
                number or has a slash.
            TableError: As in `Table`.
        """
        spaces = {"observation": observation_space, "action": action_space}
        read = {part: Column(**of) for name, space in spaces.items() for part, of in columns_of_space(name, space)}
        return cls(name, {**read, "reward": "float32", **(columns or {})}, capacity, **settings)
