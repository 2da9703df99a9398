"""The arithmetic and the memory layout of a learner, chosen by measuring an update."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import numpy as np
import torch

from innet_drl.structures import map_leaves
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.learn.capture import WARM_UP
from innet_drl.train.learn.learner import Learner, Numerics
from innet_drl.train.networks import has_blocks
from innet_drl.train.observe.display import Progress, silent
from innet_drl.train.settings.slices import NETWORKS, LearnerSettings

logger = logging.getLogger(__name__)

_LAYOUTS = {
    "contiguous": (torch.contiguous_format, False),
    "channels_last": (torch.channels_last, False),
    "space_to_depth": (torch.channels_last, True),
}
"""Layouts of `--layout`: the memory format of weights, and whether blocks of pixels become channels."""
HOPELESS_SLOWDOWN = 5.0
"""Slowdown of a candidate's first update, relative to the best, above which its measurement stops."""


def choose_numerics(config: LearnerSettings, spec: EnvironmentSpec, progress: Progress = silent) -> Numerics:
    """Returns the configured arithmetic and layout; `auto` measures them on a temporary learner.

    For serial runs `auto` is float32 and the contiguous layout: their results must not depend on a clock.
    """
    dtypes = {"float32": [torch.float32], "bfloat16": [torch.bfloat16]}.get(
        config.numerics, [torch.float32, torch.bfloat16]
    )
    blocks = has_blocks(config, spec)
    if config.layout == "space_to_depth" and not blocks:
        raise ConfigurationError(
            "layout space_to_depth: it is for images of bytes under network nature, whose height and width are "
            f"multiples of 4: take auto for {spec.observation_space}"
        )
    names = [config.layout] if config.layout != "auto" else [*_LAYOUTS][: 3 if blocks else 2]
    layouts = [_LAYOUTS[name] for name in names]
    if config.network not in NETWORKS:
        # A user's head may need more than bfloat16's 8 bits of precision.
        dtypes, layouts = dtypes[:1], layouts[:1]
    if not spec.is_image:
        # Networks for vectors are too small to gain from bfloat16.
        dtypes, layouts = dtypes[:1], [_LAYOUTS["contiguous"]]
    candidates = [Numerics(dtype, *layout) for dtype, layout in itertools.product(dtypes, layouts)]
    if config.serial or len(candidates) == 1:
        return candidates[0]
    seconds: dict[Numerics, float] = {}
    for number, candidate in enumerate(candidates, 1):
        progress("measuring the fastest arithmetic", f"{number} of {len(candidates)}, {candidate}")
        limit = HOPELESS_SLOWDOWN * min(seconds.values(), default=float("inf"))
        seconds[candidate] = _seconds_of_update(config, spec, candidate, limit)
    fastest = min(seconds, key=lambda candidate: seconds[candidate])
    listed = "; ".join(f"{candidate}: {1e3 * value:.1f} ms" for candidate, value in seconds.items())
    logger.info(f"an update takes {listed}: computing in {fastest}")
    return fastest


def _seconds_of_update(
    config: LearnerSettings, spec: EnvironmentSpec, numerics: Numerics, limit: float, repeats: int = 3
) -> float:
    """Returns the shortest of a few updates after a warm-up; stops if one exceeds the limit."""
    learner = Learner(config, spec)
    learner.use(numerics)
    batch = random_batch(spec, config.batch_size, learner.device)
    if learner.captured is not None:
        learner.captured.quiet = True
        for _ in range(WARM_UP):
            learner.update(batch)
    best = float("inf")
    for _ in range(1 + repeats):
        start = time.perf_counter()
        learner.update(batch).priorities()
        best = min(best, time.perf_counter() - start)
        if best > limit and learner.captured is None:
            break
    # Ends the circle of the two, and with it the graph's memory, before the next candidate.
    learner.captured = None
    return best


def random_batch(spec: EnvironmentSpec, size: int, device: torch.device, observations: Any = None) -> TorchBatch:
    """Makes a batch of noise, or of observations [2 * size, *observation_shape], the second half as next ones."""
    if observations is None:
        observations = spec.make(
            lambda part: torch.randint(0, 256, (2 * size, *part.observed(spec.stack))).to(getattr(torch, part.dtype))
        )
    tensors = map_leaves(lambda array: torch.as_tensor(array).to(device), observations)
    random = torch.rand(size, device=device)
    return TorchBatch(
        size,
        {
            "observation": map_leaves(lambda tensor: tensor[:size], tensors),
            "reward": torch.randn(size, device=device),
            "discount": torch.where(random < 0.9, 0.99, 0.0),
            "action": torch.randint(0, spec.actions, (size,), device=device).to(getattr(torch, spec.action_dtype)),
            "next_observation": map_leaves(lambda tensor: tensor[size:], tensors),
            "weights": 1.0 - random,
            "probabilities": torch.full((size,), 1.0 / size, dtype=torch.float64, device=device),
            "ids": np.arange(size, dtype=np.uint64),
            "ages": torch.zeros(size, dtype=torch.uint32, device=device),
        },
    )
