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
        self._seed: int | None = None
        self._tree: _core.SumTree | None = None

    def seed(self, seed: int) -> None:
        """Seeds the samples from now on. Without it NumPy's global generator does, which the frameworks seed.

        Forked processes inherit its state: seed it in each.
        """
        self._seed, self._tree = seed, None

    def _opened(self) -> _core.SumTree:
        """The tree, made when it is needed: a copy that is only saved draws no seed."""
        if self._tree is None:
            seed = int(np.random.randint(2**31)) if self._seed is None else self._seed  # noqa: NPY002
            self._tree = _core.SumTree(len(self._values), priority_exponent=1.0, seed=seed)
            written = np.flatnonzero(self._values)
            self._tree.update(written, self._values[written])
        return self._tree

    def sample(self, size: int) -> NDArray[np.int64]:
        """Returns indexes (size,), as `SumTree.sample`."""
        return self._opened().sample(size, beta=0.0).indexes

    def clear(self) -> None:
        """Sets all priorities to 0."""
        self._values, self._tree = np.zeros_like(self._values), None

    def __getitem__(self, index: Any) -> Any:
        """Priorities of an index, or of several."""
        return self._values[index]

    def __setitem__(self, index: Any, values: Any) -> None:
        """Sets priorities: one value for all, or one for each index."""
        at = np.atleast_1d(np.asarray(index, np.int64))
        new = np.broadcast_to(np.asarray(values, np.float64), at.shape)
        tree = self._opened()
        tree.update(at, new)
        unit = 2.0**tree.priority_unit_log2
        self._values[at] = np.clip(np.rint(new / unit), new > 0, _LARGEST_UNITS) * unit

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_values": self._values.copy(), "_seed": None, "_tree": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
