"""Prioritized sampler of TorchRL's replay buffers, on the lock-free sum tree."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torchrl.data.replay_buffers.samplers import PrioritizedSampler
from torchrl.data.replay_buffers.storages import Storage
from torchrl.data.replay_buffers.utils import unravel_index

from innet_drl.errors import ConfigError
from innet_drl.index_priorities import IndexPriorities


class InnetSampler(PrioritizedSampler):  # type: ignore[misc]
    """Takes the place of `PrioritizedSampler`, with its arguments, methods and weights.

    Priorities are (p + eps)^alpha, rounded to 2^-19 and cut to 2^20. A batch takes one item from each of `batch_size`
    equal parts of their sum (Schaul et al., 2016, appendix B.2.1), in random order. Weights are (p / p_min)^-beta,
    with the smallest priority of the buffer. The tree is on the CPU: tensors may be on any device.

    Raises:
        innet_drl.ConfigError: `device` is not the CPU.
    """

    def _init(self) -> None:
        if self._device is not None and self._device.type != "cpu":
            raise ConfigError(f"the tree of InnetSampler is on the CPU, device is {self._device}: leave it out")
        self._sum_tree = _Tree(self._max_capacity, self.dtype)
        self._max_priority = None

    def _tree_device_from_storage(self, storage: Storage | None) -> torch.device | None:
        return None

    def update_priority(self, index: Any, priority: Any, *, storage: Storage | None = None) -> None:
        """Sets the priorities of indices, before eps and alpha.

        Raises:
            innet_drl.PriorityError: A priority that is NaN, infinite or negative; nothing was changed.
        """
        largest = vars(self).get("_max_priority")
        try:
            super().update_priority(index, priority, storage=storage)
        except BaseException:
            # TorchRL sets it before the trees: it would be the priority of every later item.
            self._max_priority = largest
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of this class, or of `PrioritizedSampler`."""
        super().load_state_dict(state_dict)
        if not isinstance(self._sum_tree, _Tree):
            indices = torch.arange(self._max_capacity)
            priorities = self._sum_tree[indices]
            self._sum_tree = _Tree(self._max_capacity, self.dtype)
            self._sum_tree[indices] = priorities

    @property
    def _min_tree(self) -> _Minima:
        return _Minima(self._sum_tree)

    @_min_tree.setter
    def _min_tree(self, tree: object) -> None:
        pass

    def sample(self, storage: Storage, batch_size: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """Samples indices, with replacement, and their weights as `priority_weight`.

        Raises:
            RuntimeError: The storage is empty.
        """
        if len(storage) == 0:
            raise RuntimeError("Cannot sample from an empty storage.")
        self._sum_tree.seed_by(self._rng)
        index, weight = self._sum_tree.weighted(batch_size, self._beta)
        found = torch.from_numpy(index)
        if storage.ndim > 1:
            found = unravel_index(found, storage.shape)
        return found, {"priority_weight": torch.from_numpy(weight).to(self.dtype)}


class _Tree(IndexPriorities):
    """Transformed priorities by index, with the interface of TorchRL's segment trees that `PrioritizedSampler` uses."""

    def __init__(self, capacity: int, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._smallest: float | None = None
        self._smallest_index = -1
        self._generator: torch.Generator | None = None
        # A power of two, as TorchRL's trees: a storage may be a little larger.
        super().__init__(1 << (capacity - 1).bit_length())

    def seed_by(self, generator: torch.Generator | None) -> None:
        """Seeds the samples by the buffer's generator, if it has one that has not seeded them yet."""
        if generator is not None and generator is not self._generator:
            self._generator = generator
            self.seed(int(torch.randint(2**31, (), generator=generator, device=generator.device)))

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_generator": None}

    def weighted(self, size: int, beta: float) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Indices, and weights."""
        index = self.sample(size)
        weight: NDArray[np.float64] = (self._values[index] / self._minimum()) ** -float(beta)
        return index, weight

    def _minimum(self) -> float:
        if self._smallest is None:
            values = np.where(self._values > 0, self._values, np.inf)
            self._smallest_index = int(values.argmin())
            self._smallest = float(values[self._smallest_index])
        return self._smallest

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, torch.Tensor) and index.ndim:
            return torch.from_numpy(self._values[index.cpu().numpy()]).to(self._dtype)
        return float(self._values[int(index)])

    def __setitem__(self, index: Any, value: Any) -> None:
        at = np.atleast_1d(np.asarray(torch.as_tensor(index).cpu(), np.int64))
        super().__setitem__(at, np.asarray(torch.as_tensor(value).cpu(), np.float64))
        values = self._values[at]
        if self._smallest is None or (at == self._smallest_index).any():
            # The scan of the whole buffer waits for the next sample: the smallest priority is rarely sampled.
            self._smallest = None
        elif at.size and 0 < values.min() < self._smallest:
            self._smallest, self._smallest_index = float(values.min()), int(at[values.argmin()])


class _Minima:
    """The second tree of `PrioritizedSampler`: it writes each priority to both, and `_Tree` knows its smallest one."""

    def __init__(self, tree: _Tree) -> None:
        self._tree = tree

    def __getitem__(self, index: Any) -> Any:
        return self._tree[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        pass
