"""Priorities by index, for the samplers of frameworks that keep the items themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl import _core

_LARGEST_UNITS = 2.0**39
"""Units to which `SumTree` cuts a priority."""


class IndexPriorities:
    """A `SumTree` whose priorities can be read, saved and pickled. They are 0 where none was set.

    Priorities are read as the tree has them, rounded and cut, so that weights fit the probabilities.

    Args:
        capacity: Indexes: 0 to `capacity - 1`.
    """

    def __init__(self, capacity: int) -> None:
        self._values: NDArray[np.float64] = np.zeros(capacity)
        self._open()

    def _open(self) -> None:
        # The frameworks seed NumPy's global generator.
        seed = int(np.random.randint(2**31))  # noqa: NPY002
        self._tree = _core.SumTree(len(self._values), priority_exponent=1.0, seed=seed)
        written = np.flatnonzero(self._values)
        self._tree.update(written, self._values[written])

    def sample(self, size: int) -> NDArray[np.int64]:
        """Returns ascending indexes (size,), as `SumTree.sample`."""
        return self._tree.sample(size, beta=0.0).indexes

    def clear(self) -> None:
        """Sets all priorities to 0."""
        self._values = np.zeros_like(self._values)
        self._open()

    def __getitem__(self, index: Any) -> Any:
        """Priorities of an index, or of several."""
        return self._values[index]

    def __setitem__(self, index: Any, values: Any) -> None:
        """Sets priorities: one value for all, or one for each index."""
        at = np.atleast_1d(np.asarray(index, np.int64))
        new = np.broadcast_to(np.asarray(values, np.float64), at.shape)
        self._tree.update(at, new)
        unit = 2.0**self._tree.priority_unit_log2
        self._values[at] = np.clip(np.rint(new / unit), new > 0, _LARGEST_UNITS) * unit

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_tree"} | {"_values": self._values.copy()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._open()
