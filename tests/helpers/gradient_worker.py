"""A worker of a gradient job in a process of its own: `gradient_worker.py ADDRESS WORKER WORKERS LENGTH ROUNDS`.

It sums whole numbers, whose sums float32 has exactly in every order, checks each sum, and prints a line after each
round. After the last round it waits for the end of its standard input.
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet


def vector(worker: int, length: int, seed: int) -> NDArray[np.float32]:
    """A worker's numbers in one round."""
    places = np.arange(length, dtype=np.int64)
    numbers: NDArray[np.float32] = ((worker + 1) * (places % 997) + seed).astype(np.float32)
    return numbers


def expected(workers: int, length: int, seed: int) -> NDArray[np.float32]:
    """The sum of all workers."""
    exact: NDArray[np.float32] = np.sum([vector(worker, length, seed) for worker in range(workers)], axis=0)
    return exact


def main() -> None:
    address = sys.argv[1]
    worker, workers, length, rounds = map(int, sys.argv[2:6])
    with innet.connect(address) as replay:
        place = replay.join_gradients("job", worker, workers, name=f"host-{worker}", deadline=100.0)
    with place:
        for seed in range(rounds):
            values = vector(worker, length, seed)
            assert place.sum(values) == workers
            np.testing.assert_array_equal(values, expected(workers, length, seed))
            print("round", seed, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
