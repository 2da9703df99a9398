"""Minari data sets (Younis et al., 2024), one episode at a time.

An episode has an observation more than steps. A table has it as a final row. Where a table lacks it, a terminated
episode repeats its last observation, which nothing learns from, and an unfinished one loses its last step. A data set's
episode without an end is truncated. Columns beside observation, action and reward are `infos`.
"""

from __future__ import annotations

import itertools
import shutil
import warnings
from collections.abc import Container, Iterable, Iterator
from typing import Any

import gymnasium
import minari
import numpy as np
from minari.data_collector import EpisodeBuffer
from minari.dataset.minari_dataset import parse_dataset_id
from numpy.typing import NDArray

from innet_drl import errors
from innet_drl.datasets import rows

_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}


def write(name: str, blocks: Iterable[rows.Block], **options: Any) -> None:
    """Creates a data set; a failure leaves none.

    Raises:
        ConfigError: It exists.
    """
    try:
        parse_dataset_id(name)
    except (ValueError, TypeError):
        raise errors.ConfigError(f"{name!r} is no id of a Minari data set, such as robot/demonstrations-v0") from None
    path = minari.storage.get_dataset_path(name)
    if path.exists():
        raise errors.ConfigError(f"the Minari data set {name!r} exists: choose another name, or `minari delete {name}`")
    episodes = iter(blocks)
    first = next(episodes)
    present = {column.partition("/")[0] for column in first}
    if missing := [column for column in _NAMES if column not in present]:
        raise errors.SchemaError(
            f"minari:{name}: there is no column {missing[0]!r}, which a Minari data set has; "
            f"there are {', '.join(first)}"
        )
    if "env" not in options:
        shape = rows.nested(first)
        options.setdefault("observation_space", _space(shape["observation"]))
        options.setdefault("action_space", _space(shape["action"]))

    def buffers() -> Iterator[EpisodeBuffer]:
        for episode in itertools.chain([first], episodes):
            buffer = _buffer(episode)
            if len(buffer):
                yield buffer

    # Images as JPEG would change.
    options.setdefault("jpeg_encoding", False)
    try:
        with warnings.catch_warnings():
            # One for each of author, description and so on that is missing.
            warnings.simplefilter("ignore", UserWarning)
            minari.create_dataset_from_buffers(name, buffers(), **options)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)
        raise


def read(name: str, wanted: Container[str] | None) -> Iterator[rows.Block]:
    """The episodes of a data set of this machine. `wanted` leaves none out: Minari reads all columns of an episode.

    Raises:
        ConfigError: There is none of this name.
    """
    known = minari.list_local_datasets()
    if name not in known:
        raise errors.ConfigError(
            f"there is no Minari data set {name!r} on this machine, there is {', '.join(known) or 'none'}: "
            f"`minari download {name}` fetches one"
        )
    for number, episode in enumerate(minari.load_dataset(name).iterate_episodes()):
        steps = len(episode.rewards)
        if steps == 0:
            continue
        block = rows.flat({"observation": episode.observations, "action": episode.actions, "reward": episode.rewards})
        terminated, truncated = np.array(episode.terminations, bool), np.array(episode.truncations, bool)
        if not (terminated[-1] or truncated[-1]):
            truncated[-1] = True
        block |= {"terminated": terminated, "truncated": truncated}
        block = {**_infos(episode.infos, steps), **block}
        rows_of = {column: _padded(values, steps + 1) for column, values in block.items()}
        rows_of["final"] = np.arange(steps + 1) == steps
        rows_of["episode"] = np.full(steps + 1, number, np.int64)
        yield rows_of


def _infos(infos: Any, steps: int) -> dict[str, NDArray[Any]]:
    """Arrays of the infos that have a value for each step, and no name of the data set's own columns."""
    arrays = rows.flat(infos or {})
    return {
        name: array
        for name, array in arrays.items()
        if isinstance(array, np.ndarray)
        and array.ndim > 0
        and len(array) in (steps, steps + 1)
        and name.partition("/")[0] not in _NAMES
    }


def _padded(values: Any, count: int) -> NDArray[Any]:
    """The values with zeros up to the final row."""
    values = np.asarray(values)
    missing = count - len(values)
    return values if missing <= 0 else np.concatenate([values, np.zeros((missing, *values.shape[1:]), values.dtype)])


def _buffer(block: rows.Block) -> EpisodeBuffer:
    final = block["final"]
    ended = bool(block["terminated"][-1])
    if not final[-1] and ended:
        block = {name: np.concatenate([array, array[-1:]]) for name, array in block.items()}
    steps = len(block["final"]) - 1
    truncated = block["truncated"][:steps].copy()
    if not final[-1] and not ended and steps:
        truncated[-1] = True
    extra = {
        name: array for name, array in block.items() if name.partition("/")[0] not in (*_NAMES, *rows.FLAGS, "episode")
    }
    values = rows.nested({name: array for name, array in block.items() if name.partition("/")[0] in _NAMES})
    return EpisodeBuffer(
        observations=values["observation"],
        actions=_first_rows(values["action"], steps),
        rewards=values["reward"][:steps],
        terminations=block["terminated"][:steps],
        truncations=truncated,
        infos=rows.nested(extra, tuples=False),
    )


def _first_rows(values: Any, count: int) -> Any:
    if isinstance(values, dict):
        return {name: _first_rows(part, count) for name, part in values.items()}
    if isinstance(values, tuple):
        return tuple(_first_rows(part, count) for part in values)
    return values[:count]


def _space(values: Any) -> gymnasium.Space[Any]:
    """A space of all values of the dtypes and shapes."""
    if isinstance(values, dict):
        return gymnasium.spaces.Dict({name: _space(part) for name, part in values.items()})
    if isinstance(values, tuple):
        return gymnasium.spaces.Tuple([_space(part) for part in values])
    dtype, shape = values.dtype, values.shape[1:]
    if dtype.kind == "f":
        return gymnasium.spaces.Box(-np.inf, np.inf, shape, dtype)
    if dtype.kind == "b":
        return gymnasium.spaces.MultiBinary(shape or 1)
    return gymnasium.spaces.Box(np.iinfo(dtype).min, np.iinfo(dtype).max, shape, dtype)
