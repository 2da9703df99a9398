"""The steps of a buffer on their way into its table."""

from __future__ import annotations

import logging
import math
import os
import socket
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl import Memory, Replay, Table, Writer, errors

logger = logging.getLogger(__name__)

Observation = NDArray[Any] | dict[str, NDArray[Any]]
Unscaled = Callable[[NDArray[Any]], NDArray[Any]]

_BLOCK_STEPS = 8
"""Steps of a block, which is a chunk: a compromise of time and bytes, and of the time until a step can be sampled."""
_UNCONFIRMED_STEPS = 24
"""Steps of an environment that a server may not have confirmed. A blocked collector loses them and the newest block."""
_LAST_S = 5.0
"""Seconds in which a process that ends sends its newest steps."""


class Stream:
    """The writer, and the newest steps of each environment, which wait for those that show whether the episodes go on.

    SB3's algorithms give scaled actions, at most `largest` in size; `unscaled` returns the table's.
    """

    def __init__(
        self, replay: Replay, table: Table, environments: int, timeout: float, largest: float, unscaled: Unscaled
    ) -> None:
        self._replay, self._table, self._environments, self._timeout = replay, table, environments, timeout
        self._largest, self._unscaled = largest, unscaled
        self.sampled = False
        # Whole chunks are evicted: a chunk is a small part of an environment's steps.
        self._steps = max(1, min(_BLOCK_STEPS, table.capacity // environments // 16))
        columns = {name: (np.dtype(column.dtype), column.shape) for name, column in table.columns.items()}
        self._observations = [name for name in columns if name.startswith("observation")]
        columns |= {f"final_{name}": columns[name] for name in self._observations}
        columns |= {name: (np.dtype(bool), ()) for name in ("done", "infos")}
        # With a place for the step that shows whether the last one's episodes go on.
        steps = range(self._steps + 1)
        self._rows = {name: np.zeros((len(steps), environments, *of), dtype) for name, (dtype, of) in columns.items()}
        # By step and column: the place of the values, and the same as a vector.
        self._places = [{name: (of[step], of[step].reshape(-1)) for name, of in self._rows.items()} for step in steps]
        self._count = self._unconfirmed = 0
        self._waits = False
        self._writer = self._open()

    def _open(self) -> Writer:
        return self._replay.writer(
            self._table.name,
            self._environments,
            self._table.view,
            name=f"collector {socket.gethostname()} {os.getpid()}",
            chunk_steps=self._steps,
            timeout=self._timeout,
        )

    def _retried(self, call: Callable[[], None]) -> None:
        """Calls, and once more with a new writer where the server was restarted."""
        self._waits = True
        try:
            call()
        except (errors.ExpiredError, errors.UnknownTableError) as error:
            logger.warning("the server has lost this writer's newest steps, and collecting goes on: %s", error)
            self._replay.create_table(self._table, self._timeout)
            self._writer = self._open()
            call()
        self._waits = False

    def put(self, obs: Observation, next_obs: Observation, action: Any, reward: Any, done: Any, infos: Any) -> None:
        """Copies a step, and appends the block of steps before it once that is full. `infos` may be `None`.

        Raises:
            SchemaError: Another shape or dtype, or NaN; nothing of this step is stored.
            ReplayError: As of `Writer.append`; this step is not stored, and the next call tries the block again.
        """
        self._observe("observation", obs)
        self._observe("final_observation", next_obs)
        self._copy("action", action)
        self._copy("reward", reward)
        self._copy("done", done)
        self._rows["infos"][self._count] = False
        if infos is not None and (np.count_nonzero(done) or len(infos) != self._environments):
            self._copy("infos", [info.get("TimeLimit.truncated", False) for info in infos])
        # A memory of this process takes steps at once: a flush would only make chunks shorter.
        if self._unconfirmed >= _UNCONFIRMED_STEPS and not isinstance(self._replay, Memory):
            self._confirm()
        if self._count == self._steps:
            self._append(goes_on=True)
            for rows in self._rows.values():
                rows[0] = rows[self._steps]
        self._count += 1

    def flush(self) -> None:
        """Appends and sends everything; episodes end with it."""
        self._append(goes_on=False)
        self._confirm()

    def _confirm(self) -> None:
        self._retried(lambda: self._writer.flush(self._timeout))
        self._unconfirmed = 0

    def close(self) -> None:
        """Appends and sends everything, if the writer is still open.

        It waits for at most `_LAST_S` seconds, and not at all after a wait that failed or was interrupted.
        """
        lost = self._unconfirmed + self._count
        self._timeout = 0.0 if self._waits else min(self._timeout, _LAST_S)
        try:
            self._append(goes_on=False)
            self._writer.close(self._timeout)
        except errors.ReplayError as error:
            if lost:
                logger.warning("the newest steps of each environment are lost, at most %d: %s", lost, error)

    def _append(self, *, goes_on: bool) -> None:
        """Appends the block. Episodes that the next step does not continue end with it, truncated; all, without one."""
        count = self._count
        if count == 0:
            return
        rows = {name: rows[:count] for name, rows in self._rows.items()}
        done, infos = rows.pop("done"), rows.pop("infos")
        if goes_on and not np.count_nonzero(done) and all(map(self._goes_on, self._observations)):
            for name in self._observations:
                del rows[f"final_{name}"]
            rows["terminated"] = rows["truncated"] = done
        else:
            compared = count if goes_on else count - 1
            continues = np.zeros_like(done)
            continues[:compared] = True
            for name in self._observations:
                equal = rows[f"final_{name}"][:compared] == self._rows[name][1 : compared + 1]
                continues[:compared] &= np.logical_and.reduce(equal, axis=tuple(range(2, equal.ndim)))
            rows["terminated"], rows["truncated"] = done & ~infos, (done & infos) | ~(done | continues)
        rows["action"] = self._unscaled(rows["action"])
        nested: dict[str, Any] = {}
        for name, values in rows.items():
            root, _, part = name.partition("/")
            nested[root] = {**nested.get(root, {}), part: values} if part else values
        self._retried(lambda: self._writer.extend(timeout=self._timeout, **nested))
        # Only now: after an error the block is tried again.
        self._count = 0
        self._unconfirmed += count

    def _goes_on(self, name: str) -> bool:
        """Whether the next observations of a full block are those of the next steps. Bytes compare faster."""
        return self._rows[f"final_{name}"][:-1].tobytes() == self._rows[name][1:].tobytes()

    def _observe(self, name: str, observation: Any) -> None:
        """Copies an observation, or its parts; parts that the table lacks are ignored."""
        if name in self._rows:
            self._copy(name, observation)
            return
        parts = [part.removeprefix("observation/") for part in self._observations]
        missing = [key for key in parts if not isinstance(observation, dict) or key not in observation]
        if missing:
            raise errors.SchemaError(f"the observation lacks its parts {missing}: nothing of this step is stored")
        for key in parts:
            self._copy(f"{name}/{key}", observation[key])

    def _copy(self, name: str, values: Any) -> None:
        """Copies values of the newest step: the caller may write to its arrays."""
        row, flat = self._places[self._count][name]
        dtype, given = row.dtype, getattr(values, "dtype", None)
        # Numbers of another float are rounded.
        same = (given == dtype or (dtype.kind == "f" and given == np.float64)) and values.shape == row.shape
        row[...] = values if same else _converted(name.removeprefix("final_"), values, row)
        # A product takes a third of the time of `isfinite`. NaN is not below a bound, either.
        if dtype.kind == "f" and not flat.dot(flat) < (1.0 if name == "action" else math.inf):
            self._check(name, flat)

    def _check(self, name: str, values: NDArray[Any]) -> None:
        largest = np.maximum.reduce(np.abs(values))
        if not largest < (self._largest if name == "action" else math.inf):
            scaled = f"{largest:.4g}: SB3's algorithms scale actions to [-1, 1], call policy.scale_action"
            reason = scaled if np.isfinite(largest) else "NaN or infinity"
            raise errors.SchemaError(f"{name.removeprefix('final_')} has {reason}; nothing of this step is stored")


def _converted(name: str, values: Any, row: NDArray[Any]) -> NDArray[Any]:
    """The values in the dtype and shape of a row."""
    dtype, shape = row.dtype, row.shape
    try:
        given = np.asarray(values)
    except ValueError as error:
        raise errors.SchemaError(f"{name} is no array: {error}") from None
    if given.shape != shape:
        # The reshapes of SB3. A discrete observation has the shape (1,) there.
        flat = given.shape == shape[:1] or not name.startswith("observation")
        if not flat or given.size != math.prod(shape):
            raise errors.SchemaError(f"{name} has the shape {given.shape}, and {shape} is expected")
        given = given.reshape(shape)
    if given.dtype != dtype and given.dtype.kind not in "biuf":
        raise errors.SchemaError(f"{name} is {given.dtype}, and {dtype} is expected")
    with np.errstate(invalid="ignore", over="ignore"):
        array = given.astype(dtype)
    if dtype.kind != "f" and not (array == given).all():
        raise errors.SchemaError(
            f"{name} has values that {dtype} cannot hold: give whole numbers of its range (pixels from 0 to "
            f"255), or a space of {given.dtype}; nothing of this step is stored"
        )
    return array
