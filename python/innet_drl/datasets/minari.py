"""Minari data sets (Younis et al., 2024), one episode at a time.

An episode of n steps has n + 1 observations; a table stores the last as a final row. Where it is missing, in a table or
in a data set of others, an episode without a termination loses its last step, whose observation becomes the last one. A
terminated episode keeps its steps: an export repeats the last observation, from which nothing bootstraps, and an import
has no final row. A data set's episode without an end is truncated. Columns beside observation, action and reward are
`infos`. Of n + 1 infos the first is of the reset, and left out.
"""

from __future__ import annotations

import functools
import itertools
import logging
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

from innet_drl import errors, structures
from innet_drl.datasets import rows
from innet_drl.ragged import Ragged

logger = logging.getLogger(__name__)

_NAMES = {"observation": "observations", "action": "actions", "reward": "rewards"}


def storable(name: str, blocks: Iterable[rows.Block]) -> Iterator[rows.Block]:
    """The episodes as Minari stores them, each with a final row."""
    shortened = 0
    for block in blocks:
        if block["final"][-1]:
            yield block
        elif block["terminated"][-1]:
            yield {column: rows.joined([array, array[-1:]]) for column, array in block.items()} | {
                "final": np.append(block["final"], True),
                "terminated": np.append(block["terminated"], False),
            }
        else:
            shortened += 1
            if len(block["final"]) > 1:
                yield _shortened(block)
    _tell(name, shortened)


def _shortened(block: rows.Block) -> rows.Block:
    """The episode without its last step, whose observation becomes the last one."""
    steps = len(block["final"]) - 1
    of_rows = {name: array for name, array in block.items() if name.partition("/")[0] in ("observation", "episode")}
    block = {name: of_rows.get(name, _padded(array[:steps], steps + 1)) for name, array in block.items()}
    block["truncated"][steps - 1] = block["final"][steps] = True
    return block


def _tell(name: str, shortened: int) -> None:
    if shortened:
        logger.warning(
            "minari:%s: %d episodes end without a termination and without a last observation: the last step of each is "
            "left out",
            name,
            shortened,
        )


_tell_once = functools.cache(_tell)
"""For an import, which reads the data twice."""


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
    first = next(episodes, None)
    if first is None:
        raise errors.ConfigError(f"minari:{name}: there is no episode to write")
    present = {column.partition("/")[0] for column in first}
    if ragged := [column for column, array in first.items() if isinstance(array, Ragged)]:
        raise errors.SchemaError(
            f"minari:{name}: column {ragged[0]!r} has values of any length, which are not written to Minari: write "
            "Parquet, or leave the column out"
        )
    if missing := [column for column in _NAMES if column not in present]:
        raise errors.SchemaError(
            f"minari:{name}: there is no column {missing[0]!r}, which a Minari data set has; "
            f"there are {', '.join(first)}"
        )
    if "env" not in options:
        shape = structures.unflatten(first)
        options.setdefault("observation_space", _space(shape["observation"]))
        options.setdefault("action_space", _space(shape["action"]))

    # Images as JPEG would change.
    options.setdefault("jpeg_encoding", False)
    try:
        with warnings.catch_warnings():
            # One for each of author, description and so on that is missing.
            warnings.simplefilter("ignore", UserWarning)
            minari.create_dataset_from_buffers(name, map(_buffer, itertools.chain([first], episodes)), **options)
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
    shortened = 0
    for number, episode in enumerate(minari.load_dataset(name).iterate_episodes()):
        steps = len(episode.rewards)
        block = {column: np.asarray(array) for column, array in structures.flatten(_columns(episode)).items()}
        observed = next((len(array) for column, array in block.items() if column.startswith("observation")), 0)
        for column, array in block.items():
            expected = observed if column.startswith("observation") else steps
            if len(array) != expected or observed not in (steps, steps + 1):
                raise ValueError(f"episode {number} has {steps} steps, and {len(array)} values of {column!r}")
        if steps == 0:
            continue
        if not (block["terminated"][-1] or block["truncated"][-1]):
            block["truncated"][-1] = True
        block = {**_infos(episode.infos, steps), **block}
        block["episode"] = np.full(observed, number, np.int64)
        block["final"] = np.arange(observed) == steps
        block = {column: _padded(array, observed) for column, array in block.items()}
        if observed == steps and not block["terminated"][-1]:
            shortened += 1
            if steps == 1:
                continue
            block = _shortened(block)
        yield block
    _tell_once(name, shortened)


def _columns(episode: Any) -> dict[str, Any]:
    return {
        "observation": episode.observations,
        "action": episode.actions,
        "reward": episode.rewards,
        "terminated": np.array(episode.terminations, bool),
        "truncated": np.array(episode.truncations, bool),
    }


def _infos(infos: Any, steps: int) -> dict[str, NDArray[Any]]:
    """Arrays of the infos that have a value for each step, and no name of the data set's own columns."""
    arrays = structures.flatten(infos or {})
    return {
        name: array[len(array) - steps :]
        for name, array in arrays.items()
        if isinstance(array, np.ndarray)
        and array.ndim > 0
        and len(array) in (steps, steps + 1)
        and name.partition("/")[0] not in _NAMES
    }


def _padded(values: Any, count: int) -> Any:
    """The values, and zeros for the final row."""
    if isinstance(values, Ragged):
        return Ragged(values.values, np.append(values.offsets, values.offsets[-1:].repeat(count - len(values))))
    return np.concatenate([values, np.zeros((count - len(values), *values.shape[1:]), values.dtype)])


def _buffer(block: rows.Block) -> EpisodeBuffer:
    steps = len(block["final"]) - 1
    # The reset has zeros.
    extra = {
        name: np.concatenate([np.zeros_like(array[:1]), array[:steps]])
        for name, array in block.items()
        if name.partition("/")[0] not in (*_NAMES, *rows.FLAGS, "episode")
    }
    values = structures.unflatten({name: array for name, array in block.items() if name.partition("/")[0] in _NAMES})
    return EpisodeBuffer(
        observations=values["observation"],
        actions=structures.at_index(values["action"], slice(steps)),
        rewards=values["reward"][:steps],
        terminations=block["terminated"][:steps],
        truncations=block["truncated"][:steps],
        infos=structures.unflatten(extra, tuples=False),
    )


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
