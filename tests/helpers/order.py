"""The order of batches."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

BATCHES = 200


def check_every_place(batches: ArrayLike, most: int) -> None:
    """Every place of the batches has the mean of all, and so have all slices and halves.

    The mean of a place scatters by 0.29 / sqrt(200) = 0.02 of the positions: 0.15 are seven standard deviations. In
    ascending batches the first and the last place are 0.5 away.

    Args:
        batches: Positions of sampled items, (BATCHES, items).
        most: Positions there are.
    """
    positions: NDArray[Any] = np.asarray(batches, np.int64)
    assert len(positions) == BATCHES
    means = positions.mean(axis=0) / most
    assert np.abs(means - means.mean()).max() < 0.15, means
    assert not (np.diff(positions, axis=1) >= 0).all(axis=1).any()
