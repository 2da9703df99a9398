"""The adapters' buffers and their frameworks' own, filled with the same vectors: time of each call, in turns."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import ReplayBuffer
from tensordict import TensorDict
from tianshou.data import Batch, PrioritizedReplayBuffer
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

from benchmarks import report
from innet_drl.sb3 import InnetReplayBuffer
from innet_drl.tianshou import InnetPrioritizedReplayBuffer
from innet_drl.torchrl import InnetReplayBuffer as TensorDictBuffer
from innet_drl.torchrl import InnetSampler

OBSERVATION, ACTION = 17, 6
"""Numbers of an observation and an action, as of HalfCheetah."""
ALPHA, BETA = 0.6, 0.4
BLOCK = 4096
"""Items of a call that fills a buffer of TorchRL."""

Call = Callable[[], object]


def adapters(items: int = 1 << 20, turns: int = 25, calls: int = 40) -> None:
    """Prints microseconds of a call, medians of the turns, for both buffers of each framework.

    Args:
        items: Items of each buffer, all filled.
        turns: Turns, which the two buffers take one after the other.
        calls: Calls of a turn.
    """
    torch.set_num_threads(2)
    for framework, compared in (("sb3", _sb3), ("torchrl", _torchrl), ("tianshou", _tianshou)):
        for name, (own, ours) in compared(items).items():
            times: dict[str, list[float]] = {"own": [], "ours": []}
            for _ in range(turns):
                times["own"].append(_microseconds(own, calls))
                times["ours"].append(_microseconds(ours, calls))
            medians = {buffer: round(statistics.median(each), 1) for buffer, each in times.items()}
            report.closing(
                "adapters", framework, call=name, **medians, times=round(medians["own"] / medians["ours"], 2)
            )


def _microseconds(call: Call, calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return (time.perf_counter() - began) / calls * 1e6


def _sb3(items: int) -> dict[str, tuple[Call, Call]]:
    box = [spaces.Box(-1, 1, (numbers,), np.float32) for numbers in (OBSERVATION, ACTION)]
    own, ours = (kind(items, box[0], box[1], "cpu") for kind in (ReplayBuffer, InnetReplayBuffer))
    observation = np.random.default_rng(0).standard_normal((1, OBSERVATION), np.float32)
    # The next observation is that of the next step: one long episode.
    step: tuple[Any, ...] = (observation, observation, np.zeros((1, ACTION)), np.ones(1), np.zeros(1, bool), [{}])
    for _ in range(items):
        own.add(*step)
        ours.add(*step)

    def sampled(buffer: Any, count: int) -> Call:
        return lambda: buffer.sample(count)

    samples = {f"sample({count})": (sampled(own, count), sampled(ours, count)) for count in (64, 256)}
    return samples | {"add": (lambda: own.add(*step), lambda: ours.add(*step))}


def _torchrl(items: int) -> dict[str, tuple[Call, Call]]:
    own = TensorDictPrioritizedReplayBuffer(alpha=ALPHA, beta=BETA, storage=LazyTensorStorage(items))
    sampler = InnetSampler(items, alpha=ALPHA, beta=BETA)
    ours = {
        "": TensorDictBuffer(items, alpha=ALPHA, beta=BETA),
        " by InnetSampler": TensorDictReplayBuffer(
            storage=LazyTensorStorage(items), sampler=sampler, priority_key="td_error"
        ),
    }
    for _ in range(items // BLOCK):
        block = _transitions(BLOCK)
        for buffer in (own, *ours.values()):
            buffer.extend(block)
    errors = itertools.cycle(torch.rand(64, 512))

    def sampled(buffer: Any, count: int) -> Call:
        return lambda: buffer.sample(count)

    def updated(buffer: Any, count: int) -> Call:
        def call() -> None:
            batch["td_error"] = next(errors)[:count]
            buffer.update_tensordict_priority(batch)

        batch = buffer.sample(count)
        return call

    def added(buffer: Any) -> Call:
        return lambda: buffer.add(step)

    step = _transitions(1)[0]
    found: dict[str, tuple[Call, Call]] = {}
    for by, buffer in ours.items():
        for count in (64, 256, 512):
            found[f"sample({count}){by}"] = sampled(own, count), sampled(buffer, count)
            found[f"update({count}){by}"] = updated(own, count), updated(buffer, count)
        found[f"add{by}"] = added(own), added(buffer)
    return found


def _tianshou(items: int) -> dict[str, tuple[Call, Call]]:
    kinds = (PrioritizedReplayBuffer, InnetPrioritizedReplayBuffer)
    own, ours = (kind(items, alpha=ALPHA, beta=BETA) for kind in kinds)
    observation = np.random.default_rng(0).standard_normal(OBSERVATION, np.float32)
    step = Batch(
        obs=observation, act=np.zeros(ACTION), rew=1.0, terminated=False, truncated=False, obs_next=observation, info={}
    )

    def added(buffer: Any) -> Call:
        return lambda: buffer.add(step)

    return {"add": (added(own), added(ours))}


def _transitions(count: int) -> TensorDict:
    """Transitions as TorchRL's collectors make them."""
    ended = torch.zeros(count, 1, dtype=torch.bool)
    following = {
        "observation": torch.randn(count, OBSERVATION),
        "reward": torch.randn(count, 1),
        "done": ended,
        "terminated": ended,
    }
    entries = {"observation": torch.randn(count, OBSERVATION), "action": torch.randn(count, ACTION)}
    return TensorDict({**entries, "next": TensorDict(following, [count])}, [count])
