"""Prioritized replay buffers of Tianshou, on the lock-free sum tree."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tianshou.data import PrioritizedReplayBuffer, PrioritizedVectorReplayBuffer

from innet_drl.index_priorities import IndexPriorities

if TYPE_CHECKING:
    _Base = PrioritizedReplayBuffer
else:
    _Base = object


class _Priorities(IndexPriorities):
    """Transformed priorities by index, with the interface of Tianshou's `SegmentTree`."""

    def __len__(self) -> int:
        return len(self._values)

    def reduce(self, start: int = 0, end: int | None = None) -> float:
        """The sum of the priorities from `start` to before `end`."""
        return float(self._values[start:end].sum())


class _OnTree(_Base):
    """A buffer of Tianshou whose priorities are in a sum tree."""

    weight: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.weight = _Priorities(self.maxsize)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes the state of a buffer of Tianshou, too, also from its HDF5 files."""
        super().__setstate__(state)
        if not isinstance(self.weight, _Priorities):
            places, theirs = np.arange(self.maxsize), self.weight
            self.weight = _Priorities(self.maxsize)
            self.weight[places] = theirs[places]

    def sample_indices(self, batch_size: int | None) -> NDArray[np.int64]:
        """Samples indices by priority, with replacement. 0 returns all, in order, as Tianshou's buffers do."""
        indices: NDArray[np.int64]
        if batch_size is not None and batch_size > 0 and len(self) > 0:
            indices = self.weight.sample(batch_size)
        else:
            indices = super().sample_indices(batch_size)
        return indices

    def reset(self, keep_statistics: bool = False) -> None:
        """Removes all items, and their priorities."""
        super().reset(keep_statistics)
        # Tianshou resets a new buffer before it has a tree.
        if isinstance(vars(self).get("weight"), _Priorities):
            self.weight.clear()


class InnetPrioritizedReplayBuffer(_OnTree, PrioritizedReplayBuffer):
    """Takes the place of `PrioritizedReplayBuffer`, with its arguments, methods and weights.

    Priorities are (|p| + eps)^alpha, rounded to 2^-19 and cut to 2^20. A batch takes one item from each of `batch_size`
    equal parts of their sum (Schaul et al., 2016, appendix B.2.1), in random order.
    """


class InnetPrioritizedVectorReplayBuffer(_OnTree, PrioritizedVectorReplayBuffer):
    """Takes the place of `PrioritizedVectorReplayBuffer`: a part for each environment, and one tree for all.

    See `InnetPrioritizedReplayBuffer`.
    """
