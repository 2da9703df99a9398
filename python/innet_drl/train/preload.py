"""Demonstrations that a run starts from (Hester et al., 2018; Ball et al., 2023): a data set in the run's memory."""

from __future__ import annotations

import logging
import threading

import innet_drl as innet
from innet_drl import datasets
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import MemorySettings

logger = logging.getLogger(__name__)


def preload(replay: innet.Replay, settings: MemorySettings) -> None:
    """Imports the data set into a table of its own, or else into the run's, unless an earlier session has.

    Raises:
        innet_drl.ReplayError: The data set cannot be read, or has other columns than the run.
        ConfigurationError: There is no space for them.
    """
    assert settings.preload is not None
    source, table, view = settings.preload, settings.table, settings.view
    columns = _columns(settings)
    counts = datasets.check(table, source, columns=columns, view=view)
    name = settings.demonstrations
    if name is not None:
        if name in replay.tables():
            stored = replay.stats()["tables"][name]["inserted_steps"]
            if settings.resumed and stored == counts.rows:
                logger.info("the demonstrations of an earlier session are in table %r", name)
                return
            # Of another run, or of a session that ended within the import.
            replay.drop_table(name)
        _make_table(replay, table, name, counts)
        datasets.import_table(replay, name, source, columns=columns, view=view, checked=counts)
    elif settings.resumed:
        return
    elif table.samples_per_insert == 0:
        datasets.import_table(replay, table.name, source, columns=columns, view=view, checked=counts)
    else:
        # The replay ratio admits the steps only as the learner samples.
        thread = threading.Thread(
            target=_import_beside, args=(replay, settings, columns, counts), name="preload", daemon=True
        )
        thread.start()
    logger.info("the run starts from %s steps of %s", f"{counts.steps:,}", source)


def _make_table(replay: innet.Replay, table: innet.Table, name: str, counts: datasets.Counts) -> None:
    _, kept = table.__getnewargs_ex__()
    settings = {setting: kept[setting] for setting in ("columns", "sampler", "priority_exponent")}
    servers = datasets.number_of_servers(replay)
    # Room for all steps, and at least a chunk at each server.
    capacity = max(counts.capacity(servers), 1024 * servers)
    bytes_of_step = table.capacity_bytes / table.capacity
    try:
        replay.create_table(
            innet.Table(name, capacity=capacity, capacity_bytes=int(capacity * bytes_of_step), **settings)
        )
    except innet.errors.TableError as error:
        raise ConfigurationError(
            "not enough memory for the demonstrations ({error}): lower {capacity}, raise {max_bytes}, or give a server "
            "more (innet-replay serve --max-bytes)",
            error=error,
        ) from error


def _import_beside(
    replay: innet.Replay, settings: MemorySettings, columns: dict[str, str], counts: datasets.Counts
) -> None:
    assert settings.preload is not None
    try:
        datasets.import_table(
            replay,
            settings.table.name,
            settings.preload,
            columns=columns,
            view=settings.view,
            timeout=None,
            checked=counts,
        )
    except innet.errors.ClosedError:
        # The run has ended.
        pass
    except innet.ReplayError as error:
        logger.warning("the rest of the demonstrations is missing: %s", error)


def _columns(settings: MemorySettings) -> dict[str, str]:
    """Names of the data set's columns, by the columns of the run's table that have other names."""
    frame = settings.view.observation
    if settings.preload is not None and _has_frames(settings.preload, frame):
        return {}
    if not settings.spec.parts:
        return {frame: "observation"}
    # Names of nested parts are joined by dots.
    names = [part.name.replace(".", "/") for part in settings.spec.parts]
    return {f"{frame}/{index}": f"observation/{name}" for index, name in enumerate(names)}


def _has_frames(source: str, frame: str) -> bool:
    """Whether the data set is an export of a run."""
    first = next(datasets.read(source), None)
    return first is not None and frame in first
