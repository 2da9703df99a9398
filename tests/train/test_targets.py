"""Targets ahead of the learner: the same numbers as in the update, each batch once and in order, errors and the end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest
import torch

from innet_drl.errors import DeadlineError, UnknownTableError
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.learn.learner import Learner
from innet_drl.train.learn.numerics import random_batch
from innet_drl.train.learn.targets import TargetsAhead
from innet_drl.train.settings.config import PRESETS

SPEC = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
CONFIG = dataclasses.replace(PRESETS["breakout"], batch_size=4, target_period=2, device="cpu")


def learner() -> Learner:
    torch.manual_seed(1)
    return Learner(CONFIG, SPEC)


def test_targets_ahead_are_those_of_the_update() -> None:
    ours = learner()
    batches = [random_batch(SPEC, 4, ours.device) for _ in range(3)]
    with TargetsAhead(ours, iter(batches)) as ahead:
        for batch in batches:
            ready = next(ahead)
            torch.testing.assert_close(ready.target, ours.with_targets(batch).target)
            assert all(getattr(ready, name) is array for name, array in batch.as_dict().items())


def test_an_update_with_a_target_is_the_one_that_computes_it() -> None:
    apart, together = learner(), learner()
    for _ in range(3):
        batch = random_batch(SPEC, 4, apart.device)
        ready = apart.with_targets(batch)
        torch.testing.assert_close(apart.update(ready).td_error, together.update(batch).td_error)
    for left, right in zip(apart.network.parameters(), together.network.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_a_copied_network_is_of_one_update() -> None:
    """Every weight moves by the same update: a copy that mixed two would differ from all of them."""
    ours = learner()
    copied = learner().network
    batch = random_batch(SPEC, 4, ours.device)
    seen = [[p.clone() for p in ours.network.parameters()]]
    copies: list[list[torch.Tensor]] = []
    training = threading.Event()

    def copy_on() -> None:
        while not training.is_set():
            ours.copy_network(copied)
            copies.append([p.clone() for p in copied.parameters()])

    thread = threading.Thread(target=copy_on)
    thread.start()
    for _ in range(20):
        ours.update(batch)
        seen.append([p.detach().clone() for p in ours.network.parameters()])
    training.set()
    thread.join()
    assert len(copies) > 1
    for copy in copies:
        assert any(all(torch.equal(a, b) for a, b in zip(copy, one, strict=True)) for one in seen)


class Source:
    """Batches with errors between them."""

    def __init__(self, results: list[TorchBatch | Exception]) -> None:
        self._results = iter(results)

    def __iter__(self) -> Iterator[TorchBatch]:
        return self

    def __next__(self) -> TorchBatch:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result


def test_a_deadline_is_passed_on_and_an_error_ends_it() -> None:
    ours = learner()
    first, second = (random_batch(SPEC, 4, ours.device) for _ in range(2))
    source = Source([first, DeadlineError("later"), second, UnknownTableError("gone")])
    with TargetsAhead(ours, source) as ahead:
        assert next(ahead).action is first.action
        with pytest.raises(DeadlineError, match="later"):
            next(ahead)
        assert next(ahead).action is second.action
        with pytest.raises(UnknownTableError, match="gone"):
            next(ahead)


def test_it_ends_while_batches_go_on() -> None:
    ours = learner()
    batch = random_batch(SPEC, 4, ours.device)
    with TargetsAhead(ours, iter(lambda: batch, None)) as ahead:
        next(ahead)
    assert not any(thread.name == "targets" for thread in threading.enumerate())
