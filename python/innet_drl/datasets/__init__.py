"""Episodes in files: a table as a data set, and a data set as the content of a table.

    from innet_drl import datasets

    datasets.export_table(replay, "apex", "apex.parquet")
    datasets.import_table(replay, "demonstrations", "apex.parquet")
    for episode in datasets.read("apex.parquet"):
        behaviour_cloning(episode["observation"], episode["action"])

| name of a data set | format | |
| --- | --- | --- |
| `*.parquet` | Parquet | a row for each step; compressed; needs `pyarrow` |
| `minari:NAME` | Minari | a data set of this machine, by its id; needs `minari` |

Rows are as a table stores them: its columns, `terminated`, `truncated`, `final` (a row with only the last observation
of an episode) and `episode` (a number). Columns of any length are `Ragged`, which Minari does not take. Reading and
writing hold a few episodes in memory, never the data set. The columns of an observation of several parts are
`observation/camera` and so on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import os
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl import errors, structures
from innet_drl.datasets import rows
from innet_drl.errors import naming_extras

__all__ = ["Counts", "check", "export_table", "import_table", "read", "write"]

View: TypeAlias = innet.NStep | innet.Sequences | innet.Trajectory | innet.Window
Convert: TypeAlias = Callable[[Iterator[rows.Block]], Iterator[rows.Block]]

logger = logging.getLogger(__name__)

_PIECE = 1024
"""Steps of one `Writer.extend` of an import."""
_ASKED_S = 5.0
"""Seconds to wait for the statistics that the log has."""
_SCRATCH = 1 << 16
_SCRATCH_BYTES = 256 << 20
"""Steps and bytes that the trial of an import keeps."""


@dataclasses.dataclass
class Counts:
    """What was read, written or stored."""

    episodes: int = 0
    steps: int = 0
    """Rows without final rows."""
    rows: int = 0
    """Steps and final rows, which take a part of a table's capacity."""
    items: int = dataclasses.field(default=0, repr=False, compare=False)
    """Items that an import made of them."""
    longest: int = dataclasses.field(default=0, repr=False, compare=False)
    """Rows of the longest episode."""
    _open: int = dataclasses.field(default=0, repr=False, compare=False)

    def capacity(self, servers: int = 1) -> int:
        """Capacity of a table that holds all rows, with its episodes on several servers."""
        return servers * (-(-self.rows // servers) + (self.longest if servers > 1 else 0))

    def add(self, block: Mapping[str, NDArray[Any]]) -> None:
        """Counts the rows of a block."""
        begins = np.flatnonzero(block["first"])
        cuts = np.diff([-self._open, *begins, len(block["first"])])
        self.longest = max(self.longest, int(cuts.max()))
        self._open = int(cuts[-1])
        self.episodes += len(begins)
        self.steps += int(np.count_nonzero(~block["final"]))
        self.rows += len(block["final"])


def read(source: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The episodes of a data set, one after the other.

    An episode is a dictionary of arrays with an element for each of its steps: its columns, and bool `terminated`,
    `truncated` and `final`. Parts of an observation are in a dictionary or tuple.

    Raises:
        ConfigError: A name without a known format, or a file that does not exist.
        CorruptError: A damaged file, or one of another format.
        MissingExtraError: The package of the format is not installed.
    """
    for episode in rows.regroup(_blocks(source)):
        yield structures.unflatten({name: array for name, array in episode.items() if name not in ("first", "episode")})


def write(target: str | os.PathLike[str], episodes: Iterable[Mapping[str, Any]], **options: Any) -> Counts:
    """Writes episodes to a new data set; an existing file is replaced once all are written, through a symbolic link.

    Args:
        target: Name of the data set.
        episodes: Dictionaries as from `read`, or batches of `Replay.episodes`. All have the same columns.
        **options: Of `minari.create_dataset_from_buffers`, for Minari: `env` or `observation_space` and `action_space`,
            `author` and so on. By default the spaces are boxes of the columns' dtypes and shapes.

    Raises:
        ConfigError: No episode, a name without a known format, or a Minari data set that exists.
        SchemaError: An episode of other columns than the first.
        StorageError: The file cannot be written.
    """
    name = os.fspath(target)
    counts = Counts()
    of_caller: list[OSError] = []

    def given() -> Iterator[Mapping[str, Any]]:
        try:
            yield from episodes
        except OSError as error:
            of_caller.append(error)
            raise

    def counted(blocks: Iterable[rows.Block]) -> Iterator[rows.Block]:
        for block in blocks:
            counts.add(block | {"first": np.arange(len(block["final"])) == 0})
            yield block

    blocks = (rows.of_episode(name, number, episode) for number, episode in enumerate(given()))
    checked = rows.of_same_columns(name, blocks)
    if options and not name.startswith("minari:"):
        raise errors.ConfigError(f"{name}: a data set of Minari alone has the options {', '.join(options)}")
    with naming_extras(), rows.storage_errors(name, of_caller):
        module, there = _format(name)
        if there != name:
            checked = module.storable(there, checked)
        elif os.path.islink(name):
            there = os.path.realpath(name, strict=True)
        module.write(there, counted(checked), **options)
    return counts


def export_table(
    replay: innet.Replay, table: str, target: str | os.PathLike[str], *, timeout: float | None = 60.0, **options: Any
) -> Counts:
    """Writes all steps of a table to a data set, while the table is in use, without priorities.

    Args:
        replay: The memory.
        table: Name of the table.
        target: Name of the data set.
        timeout: Seconds that each part may wait for a server.
        **options: As in `write`.

    Raises:
        ReplayError: As in `Replay.episodes` and `write`.
    """
    if "episode" in replay.table(table, timeout).columns:
        raise errors.SchemaError(
            f"table {table!r} has a column 'episode', which is the number of an episode in a data set"
        )
    return write(target, cast(Iterator[Mapping[str, Any]], replay.episodes(table, timeout)), **options)


def import_table(
    replay: innet.Replay,
    table: str,
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    view: View | None = None,
    priority: float | None = None,
    timeout: float | None = 60.0,
    checked: Counts | None = None,
    convert: Convert | None = None,
) -> Counts:
    """Appends the episodes of a data set to a table.

    The data set is read twice, the first time by `check`: a damaged file, or one with other columns, leaves the table
    as it was. An import that a lost server, a signal or a timeout ends stores the steps before it, and the log says how
    many rows the table has got since its start. Values become the column's dtype where they fit (float64 to float32 is
    rounded). Columns that the table does not have are left out.

    Args:
        replay: The memory.
        table: Name of an existing table.
        source: Name of the data set.
        columns: Columns of the table to columns of the data set, where the names differ: `{"frame": "observation"}`.
        view: View of the items; `None` is the table's.
        priority: Priority of all items, before the exponent; `None` is the largest of the table.
        timeout: Seconds to wait until the table accepts the next steps.
        checked: Result of `check`, which is then not repeated.
        convert: Changes rows before they are appended: a generator that takes and yields blocks of consecutive rows,
            dictionaries of arrays by column of the data set, with bool `first` and `final`.

    Raises:
        SchemaError: The data set has more steps than the table's capacity.
        ReplayError: Also as in `check` and `Writer.extend`.
    """
    name = os.fspath(source)
    definition = replay.table(table, timeout)
    if checked is None:
        checked = check(definition, name, columns=columns, view=view, priority=priority, convert=convert)
    servers = number_of_servers(replay, timeout)
    if checked.capacity(servers) > definition.capacity:
        raise errors.SchemaError(
            f"{name} has {checked.rows} steps, and table {table!r} holds {definition.capacity}: the first ones would "
            f"be evicted at once; give the table a capacity of {checked.capacity(servers)}"
        )
    stored = Counts()
    before = _inserted(replay, table, timeout)
    try:
        dropped = _append(replay, definition, name, columns or {}, view, priority, timeout, convert, stored, servers)
    except (errors.ReplayError, KeyboardInterrupt):
        # Not what was appended: a writer holds steps that its table has not accepted.
        try:
            got = f"{_inserted(replay, table, _ASKED_S) - before} rows"
        except (errors.ReplayError, KeyError):
            got = "an unknown number of rows"
        logger.warning(
            "the import of %s ended early: table %r has got %s since its start, of %d", name, table, got, checked.rows
        )
        raise
    if dropped:
        logger.warning(
            "%s has become %d items; %d windows have not, as the observation after them is missing: of truncated steps "
            "without a final row, and of episodes without an end",
            name,
            stored.items,
            dropped,
        )
    return stored


def check(
    table: innet.Table,
    source: str | os.PathLike[str],
    *,
    columns: Mapping[str, str] | None = None,
    view: View | None = None,
    priority: float | None = None,
    convert: Convert | None = None,
) -> Counts:
    """Reads a data set as `import_table` does, into a scratch table of the same definition that is then dropped.

    Raises:
        SchemaError: The data set lacks a column, or has another shape or values that do not fit. `columns` names one
            that the table does not have.
        ReplayError: Also as in `read` and `Writer.extend`.
    """
    counts = Counts()
    with innet.Memory(_scratch(table)) as scratch:
        _append(scratch, table, os.fspath(source), columns or {}, view, priority, None, convert, counts)
    return counts


def _append(
    replay: innet.Replay,
    definition: innet.Table,
    source: str,
    columns: Mapping[str, str],
    view: View | None,
    priority: float | None,
    timeout: float | None,
    convert: Convert | None,
    counts: Counts,
    servers: int = 1,
) -> int:
    """Appends the data set, counts what was appended, and returns the number of dropped windows.

    Of several servers each gets whole episodes, the one with the fewest rows the next.
    """
    for unknown in columns.keys() - definition.columns.keys():
        raise rows.no_column(f"table {definition.name!r}", unknown, definition.columns, ", which `columns` names")
    with contextlib.ExitStack() as stack:
        writers = [
            stack.enter_context(replay.writer(definition.name, 1, view, name="import", server=server, timeout=timeout))
            for server in range(servers)
        ]
        written = [0] * servers
        now = 0
        named = {columns.get(name, name) for name in definition.columns}
        blocks = _blocks(source, {*named, *rows.FLAGS, "first", "episode"})
        for block in blocks if convert is None else convert(blocks):
            fitting = rows.fit(source, block, definition, columns)
            for piece in rows.pieces(fitting, _PIECE, by_episode=servers > 1):
                size = len(piece["first"])
                if piece["first"][0]:
                    now = written.index(min(written))
                if priority is not None:
                    piece["priority"] = np.full(size, priority)
                # The rows of a `Ragged` are those of the one stream.
                of_stream = {
                    name: array if isinstance(array, innet.Ragged) else array[:, None] for name, array in piece.items()
                }
                steps = structures.unflatten(of_stream)
                try:
                    writers[now].extend(**steps, timeout=timeout)
                except errors.SchemaError as error:
                    raise errors.SchemaError(f"{source}: {error}") from None
                written[now] += size
                counts.add(piece)
        for writer in writers:
            writer.close(timeout)
        counts.items = sum(writer.items for writer in writers)
        return sum(writer.dropped_windows for writer in writers)


def _inserted(replay: innet.Replay, table: str, timeout: float | None) -> int:
    return int(replay.stats(timeout)["tables"][table]["inserted_steps"])


def number_of_servers(replay: innet.Replay, timeout: float | None = 60.0) -> int:
    """Servers of a memory."""
    return max(1, len(replay.stats(timeout).get("shards") or ()))


def _scratch(definition: innet.Table) -> innet.Table:
    """A table of the same columns that keeps a few steps, and never waits for samples."""
    shapes = [(column.dtype.itemsize, column.shape[column.is_ragged :]) for column in definition.columns.values()]
    step_bytes = sum(itemsize * math.prod(map(int, shape)) for itemsize, shape in shapes)
    # Room for a few chunks of large steps.
    capacity_bytes = max(_SCRATCH_BYTES, 200 * step_bytes)
    return innet.Table(
        definition.name,
        definition.columns,
        min(definition.capacity, _SCRATCH),
        capacity_bytes=capacity_bytes,
        sampler="uniform",
        view=definition.view,
    )


def _blocks(source: str | os.PathLike[str], wanted: Container[str] | None = None) -> Iterator[rows.Block]:
    """Parts of a data set in order, each with its flags and `first`. `wanted` has the columns to read, `None` all."""
    name = os.fspath(source)
    with naming_extras(), rows.read_errors(name):
        module, there = _format(name)
        if there == name and not os.path.isfile(name):
            raise errors.ConfigError(f"there is no file {name}")
        yield from rows.with_first(name, module.read(there, wanted))


def _format(name: str) -> tuple[Any, str]:
    """The module of a data set's format, and the data set's name there."""
    if name.startswith("minari:"):
        from innet_drl.datasets import minari

        return minari, name.removeprefix("minari:")
    if name.endswith(".parquet"):
        from innet_drl.datasets import parquet

        return parquet, name
    raise errors.ConfigError(f"a data set is named *.parquet or minari:NAME, got {name!r}")
