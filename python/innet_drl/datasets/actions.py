"""Actions of tables whose framework scales them to [-1, 1], as Stable-Baselines3 does, in a column `scaled_action`.

Data sets have them in the environment's units, as `action`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from innet_drl import errors

if TYPE_CHECKING:
    import gymnasium

SCALED = "scaled_action"
REMEDY = (
    f"{SCALED!r} is the action scaled to [-1, 1], as Stable-Baselines3 stores it: give action_space=, the environment's"
)
_ROUNDING = 1e-5
"""Part of half the range by which a rounded action may be outside."""


def bounds(space: gymnasium.spaces.Space[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Lowest and highest action, flat.

    Raises:
        ConfigError: Not a Box with finite bounds.
    """
    low, high = (np.asarray(getattr(space, bound, np.nan), np.float64).reshape(-1) for bound in ("low", "high"))
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise errors.ConfigError(f"actions are scaled by a Box with finite bounds, got action_space={space}")
    return low, high


def scaled(
    source: str, blocks: Iterable[dict[str, NDArray[Any]]], column: str, space: gymnasium.spaces.Space[Any]
) -> Iterator[dict[str, NDArray[Any]]]:
    """The blocks with the actions of a column in [-1, 1], and 0 in final rows.

    Raises:
        SchemaError: Another shape than the space's, or an action outside it.
    """
    low, high = bounds(space)
    begin = 0
    for block in blocks:
        if column in block:
            action = block[column]
            if action.dtype.kind not in "biuf" or action.size != len(action) * low.size:
                raise errors.SchemaError(
                    f"{source}: column {column!r} has {action.dtype} of the shape {action.shape[1:]}, and {space} has "
                    f"{space.shape}"
                )
            ratio = 2 * (action.reshape(len(action), -1).astype(np.float64) - low) / (high - low) - 1
            ratio[block["final"]] = 0
            outside = (np.abs(ratio) > 1 + _ROUNDING).any(axis=1)
            if outside.any():
                row = int(np.argmax(outside))
                raise errors.SchemaError(
                    f"{source}: {column!r} is {action[row]} in row {begin + row}, outside of {space}: give the "
                    "action_space= whose units the data set has"
                )
            block = block | {column: np.clip(ratio, -1, 1)}
        begin += len(block["final"])
        yield block


def unscaled(actions: NDArray[Any], final: NDArray[np.bool_], space: gymnasium.spaces.Space[Any]) -> NDArray[Any]:
    """Actions in the space's units, shape and dtype; of final rows 0."""
    low, high = bounds(space)
    values = low + (actions.reshape(len(actions), -1).astype(np.float64) + 1) / 2 * (high - low)
    values[final] = 0
    shaped: NDArray[Any] = values.reshape(len(actions), *(space.shape or ())).astype(space.dtype)
    return shaped
