"""Flashbax's prioritized flat buffer on the CPU, compiled, in the learner's process. Batches are JAX arrays."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import flashbax
import jax
import numpy as np
from numpy.typing import NDArray

VERSION = f"Flashbax {importlib.metadata.version('flashbax')}, JAX {jax.__version__}"
SWEEP: dict[str, list[dict[str, Any]]] = {}
BLOCK = 10_000


class Vectors:
    """`make_prioritised_flat_buffer`, whose transitions are two steps in a row."""

    def __init__(self, data: dict[str, NDArray[Any]], batch: int) -> None:
        items = len(data["reward"])
        buffer = flashbax.make_prioritised_flat_buffer(
            items, batch, batch, add_sequences=True, priority_exponent=0.6, device="cpu"
        )
        steps = {name: column for name, column in data.items() if name != "next_observation"}
        self._state = buffer.init({name: column[0] for name, column in steps.items()})
        # Donated states are changed in place, as its documentation advises.
        add = jax.jit(buffer.add, donate_argnums=0)

        def sample(state: Any, key: Any) -> tuple[Any, Any, dict[str, Any]]:
            key, now = jax.random.split(key)
            sampled = buffer.sample(state, now)
            weights = (sampled.probabilities + 1e-12) ** -0.4
            batch = {**sampled.experience.first, "next_observation": sampled.experience.second["observation"]}
            return key, sampled.indices, {**batch, "weights": weights / weights.max()}

        self._sample = jax.jit(sample)
        self._set_priorities = jax.jit(buffer.set_priorities, donate_argnums=0)
        self._key = jax.random.key(0)
        for first in range(0, items, BLOCK):
            self._state = add(self._state, {name: column[first : first + BLOCK] for name, column in steps.items()})

    def sample(self) -> tuple[Any, dict[str, Any]]:
        self._key, indices, batch = self._sample(self._state, self._key)
        batch["weights"].block_until_ready()
        return indices, batch

    def rewrite(self, ids: Any, priorities: NDArray[np.float64]) -> None:
        self._state = self._set_priorities(self._state, ids, priorities.astype(np.float32))
