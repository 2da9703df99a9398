"""Demonstrations that a run starts from (Hester et al., 2018; Ball et al., 2023): a data set in the run's memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import innet_drl as innet
from innet_drl import datasets, errors
from innet_drl.datasets import rows
from innet_drl.train.environments import Environments
from innet_drl.train.environments.spaces import Leaf, numbered_from
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import MemorySettings
from innet_drl.train.settings.slices import ReplaySettings

logger = logging.getLogger(__name__)


def preload(replay: innet.Replay, settings: MemorySettings, envs: Environments) -> None:
    """Imports the data set into a table of its own, unless an earlier session has.

    Its rows become as actors write them in the environments `envs`.

    Raises:
        innet_drl.ReplayError: The data set cannot be read, or does not fit the environment.
        ConfigurationError: There is no space for them.
    """
    assert settings.config.preload is not None
    source, table, view = os.fspath(settings.config.preload), settings.table, settings.view
    columns = _columns(settings, source)
    played = AsPlayed(source, columns, table, settings.config, envs)
    counts = datasets.check(table, source, columns=columns, view=view, convert=played)
    name = settings.demonstrations
    if name in replay.tables():
        stored = replay.stats()["tables"][name]["inserted_steps"]
        if settings.resumed and stored == counts.rows:
            logger.info("the demonstrations of an earlier session are in table %r", name)
            return
        # Of another run, or of a session that ended within the import.
        replay.drop_table(name)
    _make_table(replay, table, name, counts)
    datasets.import_table(replay, name, source, columns=columns, view=view, checked=counts, convert=played)
    logger.info("the run starts from %s steps of %s%s", f"{counts.steps:,}", source, played.note)


class AsPlayed:
    """Conversion of a data set's rows to those that actors write: frames, numbers of actions, clipped rewards."""

    def __init__(
        self, source: str, columns: Mapping[str, str], table: innet.Table, config: ReplaySettings, envs: Environments
    ) -> None:
        self._source = source
        self._clips = config.clip_rewards
        self._leaves: dict[str, Leaf] = {}
        self._actions, of_space = envs.actions, str(envs.vector.single_action_space)
        if columns and envs.encoder is not None:
            self._leaves = dict(zip(columns.values(), envs.encoder.leaves, strict=True))
        else:
            # The export of a run has frames, and actions by their numbers.
            self._actions = numbered_from(envs.actions.count)
        self._possible = of_space if columns else f"the {self._actions.count} of {of_space}, which a run numbers from 0"
        given: dict[str, Any] = {columns.get(name, name): column for name, column in table.columns.items()}
        given |= {name: (leaf.dtype, leaf.shape) for name, leaf in self._leaves.items()}
        given["action"] = "int64", self._actions.shape
        self._given = innet.Table(table.name, given, capacity=1)
        self.note = (
            "; their rewards become -1, 0 or 1, as in the run (clip_rewards)" if config.clip_rewards else ""
        ) + ("; a lost life does not end their episodes (life_loss_ends)" if config.life_loss_ends else "")

    def __call__(self, blocks: Iterator[rows.Block]) -> Iterator[rows.Block]:
        """Converts consecutive blocks.

        Raises:
            SchemaError: Values of another shape or dtype than the environment's, or an action that it does not have.
        """
        # Episodes of the blocks before, and rows of the last one of them.
        episodes, rows_of_last = 0, 0
        for block in blocks:
            converted = rows.fit(self._source, block, self._given, {})
            texts = [name for name, array in converted.items() if array.dtype.kind in "OU"]
            if texts:
                raise errors.SchemaError(f"{self._source}: column {texts[0]!r} has texts, and a run needs numbers")
            for name, leaf in self._leaves.items():
                converted[name] = leaf.encode(converted[name])
            numbers = np.where(converted["final"], 0, self._actions.number(converted["action"]))
            begins = np.flatnonzero(converted["first"])
            if (numbers < 0).any():
                row = int(np.argmax(numbers < 0))
                before = begins[begins <= row]
                first = int(before[-1]) if len(before) else -rows_of_last
                raise errors.SchemaError(
                    f"{self._source}: step {row - first} of episode {episodes + len(before) - 1} (both from 0) has the "
                    f"action {converted['action'][row].tolist()}, and the environment has {self._possible}: the data "
                    "set is of another environment, or its actions have other numbers"
                )
            episodes += len(begins)
            rows_of_last = len(numbers) - begins[-1] if len(begins) else rows_of_last + len(numbers)
            converted["action"] = numbers
            if self._clips:
                converted["reward"] = np.sign(converted["reward"])
            yield converted


def _make_table(replay: innet.Replay, table: innet.Table, name: str, counts: datasets.Counts) -> None:
    servers = datasets.number_of_servers(replay)
    # Room for all steps, and at least a chunk at each server.
    capacity = max(counts.capacity(servers), 1024 * servers)
    bytes_of_step = table.capacity_bytes / table.capacity
    try:
        replay.create_table(
            innet.Table(
                name,
                table.columns,
                capacity,
                capacity_bytes=int(capacity * bytes_of_step),
                sampler=table.sampler,
                priority_exponent=table.priority_exponent,
            )
        )
    except innet.errors.TableError as error:
        raise ConfigurationError(
            f"not enough memory for the demonstrations ({error}): lower capacity, raise max_bytes, or give a server "
            "more (innet-replay serve --max-bytes)"
        ) from error


def _columns(settings: MemorySettings, source: str) -> dict[str, str]:
    """Names of the data set's columns, by the columns of the run's table that have other names."""
    frame = settings.view.observation
    if _has_frames(source, frame):
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
