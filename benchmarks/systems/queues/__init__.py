"""Queues of trajectories, one module each.

`store(size)` starts a queue, and returns its address and a function that ends it; `produce(address, blocks)` puts
blocks, and `consume(address)` yields batches, which are then gone. A peer's module runs in the peer's environment: it
imports NumPy, the standard library, the peer and this package.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BATCH = 64
"""Trajectories of a batch, and of a block."""
SHORTEST, LONGEST = 200, 8_000
"""Tokens of a trajectory, uniform between both: on average 4,100, of 8 bytes with their log-probabilities."""
BLOCKS = 8
"""Different blocks of a producer, 17 MB. Then they repeat, with other numbers."""

Block = dict[str, NDArray[Any]]
"""Trajectories one after the other: `numbers` int64 `[64]`, `offsets` int64 `[65]`, `tokens` int32 and
`log_probabilities` float32."""
Trajectory = tuple[int, NDArray[np.int32], NDArray[np.float32]]
"""Number, tokens and log-probabilities."""


def blocks(seed: int) -> list[Block]:
    """The blocks of a producer, without their numbers."""
    random, made = np.random.default_rng(seed), []
    for _ in range(BLOCKS):
        offsets = np.concatenate([[0], np.cumsum(random.integers(SHORTEST, LONGEST + 1, BATCH))])
        tokens, probabilities = random.integers(0, 150_000, offsets[-1], np.int32), random.random(offsets[-1], "f4")
        made.append({"offsets": offsets, "tokens": tokens, "log_probabilities": np.log1p(-probabilities)})
    return made


def split(block: Block) -> list[Trajectory]:
    """The trajectories of a block, without a copy."""
    at, tokens, log_probabilities = block["offsets"].tolist(), block["tokens"], block["log_probabilities"]
    of = zip(block["numbers"].tolist(), at, at[1:], strict=False)
    return [(number, tokens[begin:end], log_probabilities[begin:end]) for number, begin, end in of]
