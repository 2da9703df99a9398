"""TorchRL's replay buffers with this sampler: its own sampler is the reference."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from order import BATCHES, check_every_place
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler

from innet_drl import errors
from innet_drl.torchrl import InnetSampler

CAPACITY = 100


def filled(kind: Any, priorities: Any, **settings: Any) -> Any:
    """A buffer whose items have these priorities; their observations are their indices."""
    sampler = kind(CAPACITY, **{"alpha": 0.7, "beta": 0.5, **settings})
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY), sampler=sampler, priority_key="td_error", batch_size=32
    )
    count = len(priorities)
    items = {"observation": torch.arange(count), "td_error": torch.as_tensor(priorities, dtype=torch.float32)}
    buffer.extend(TensorDict(items, [count]))
    return buffer


def test_frequencies_are_those_of_the_priorities() -> None:
    priorities = np.linspace(0.1, 4.0, 40)
    buffer = filled(InnetSampler, priorities)
    drawn = np.concatenate([buffer.sample()["observation"].numpy() for _ in range(1000)])
    expected = priorities**0.7 / (priorities**0.7).sum() * len(drawn)
    assert stats.chisquare(np.bincount(drawn, minlength=40), expected).pvalue > 1e-8


def test_a_part_of_a_batch_is_as_good_as_the_whole() -> None:
    buffer = filled(InnetSampler, np.ones(CAPACITY))
    check_every_place([buffer.sample()["observation"] for _ in range(BATCHES)], CAPACITY)


def test_weights_and_trees_equal_those_of_torchrl_after_the_same_calls() -> None:
    random = np.random.default_rng(3)
    buffers = [filled(kind, random.random(60) * 0 + 1.0) for kind in (InnetSampler, PrioritizedSampler)]
    for round_ in range(30):
        index = torch.from_numpy(random.permutation(60)[:20])
        # Also of the item with the smallest priority.
        index[0] = int(torch.as_tensor([buffers[1]._sampler._min_tree[i] for i in range(60)]).argmin())
        priority = torch.from_numpy(random.random(20).astype(np.float32) * 3 + 0.01)
        for buffer in buffers:
            buffer.update_priority(index, priority)
            if round_ == 10:
                buffer._sampler.beta = 0.9
            if round_ == 20:
                buffer._sampler.alpha = 0.4
            if round_ % 7 == 0:
                buffer.extend(TensorDict({"observation": torch.arange(5), "td_error": torch.ones(5)}, [5]))
        ours, theirs = (buffer._sampler for buffer in buffers)
        values = torch.as_tensor([theirs._sum_tree[i] for i in range(len(buffers[1]))])
        torch.testing.assert_close(ours._sum_tree[torch.arange(len(values))], values)
        batch = buffers[0].sample()
        torch.testing.assert_close(
            batch["priority_weight"], (values[batch["index"]] / values.min()) ** -ours.beta, rtol=1e-4, atol=1e-6
        )


def test_a_state_continues(tmp_path: Path) -> None:
    buffer = filled(InnetSampler, [0.5, 1.0, 2.0])
    sampler = buffer._sampler
    sampler.dumps(tmp_path / "dumped")
    loaded = [InnetSampler(CAPACITY, alpha=0.1, beta=0.1) for _ in range(2)]
    loaded[0].load_state_dict(sampler.state_dict())
    loaded[1].loads(tmp_path / "dumped")
    for other in [*loaded, copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))]:
        assert (other.alpha, other.beta) == (0.7, 0.5)
        torch.testing.assert_close(other._sum_tree[torch.arange(3)], sampler._sum_tree[torch.arange(3)])
        index, info = other.sample(buffer._storage, 64)
        assert set(index.tolist()) == {0, 1, 2}
        assert float(info["priority_weight"].max()) == 1.0
    # Copies share nothing.
    sampler.update_priority(torch.tensor([0]), torch.tensor([100.0]))
    assert loaded[0]._sum_tree[0] < 1.0


def test_a_dump_of_torchrls_sampler_continues(tmp_path: Path) -> None:
    """Its second tree has the largest float where no item is."""
    theirs = filled(PrioritizedSampler, [0.5, 1.0, 2.0])
    theirs._sampler.dumps(tmp_path / "dumped")
    ours = InnetSampler(CAPACITY, alpha=0.1, beta=0.1)
    ours.loads(tmp_path / "dumped")
    index, info = ours.sample(theirs._storage, 64)
    assert set(index.tolist()) == {0, 1, 2}
    assert float(info["priority_weight"].max()) == pytest.approx(1.0)


def test_a_state_of_torchrls_sampler_continues() -> None:
    theirs = filled(PrioritizedSampler, [0.5, 1.0, 2.0])
    ours = filled(InnetSampler, np.ones(50), alpha=0.1)
    ours._sampler.load_state_dict(theirs._sampler.state_dict())
    indices = torch.arange(3)
    torch.testing.assert_close(ours._sampler._sum_tree[indices], theirs._sampler._sum_tree[indices], rtol=0, atol=1e-5)
    assert set(ours.sample()["index"].tolist()) == {0, 1, 2}


def test_the_seed_repeats_samples() -> None:
    def drawn(generator: torch.Generator | None) -> Any:
        buffer = filled(InnetSampler, np.ones(50))
        buffer.set_rng(generator)
        return torch.stack([buffer.sample()["index"] for _ in range(3)])

    def seeded() -> Any:
        np.random.seed(7)  # noqa: NPY002
        return drawn(None)

    first, generator = seeded(), torch.Generator().manual_seed(7)
    assert torch.equal(first, seeded())
    assert not torch.equal(first[0], first[1])
    with_generator = drawn(generator)
    assert torch.equal(with_generator, drawn(torch.Generator().manual_seed(7)))
    assert not torch.equal(with_generator, drawn(generator))


def test_a_saved_state_changes_no_random_numbers() -> None:
    buffer = filled(InnetSampler, np.ones(50))
    buffer.sample()
    drawn = []
    for saves in (False, True):
        np.random.seed(7)  # noqa: NPY002
        if saves:
            buffer.state_dict()
        drawn.append(np.random.random())  # noqa: NPY002
    assert drawn[0] == drawn[1]


def test_bad_input_is_one_error() -> None:
    with pytest.raises(
        errors.ConfigError, match="the tree of InnetSampler is on the CPU, device is cuda: leave it out"
    ):
        InnetSampler(10, alpha=0.5, beta=0.5, device="cuda")
    with pytest.raises(ValueError, match="alpha must be greater"):
        InnetSampler(10, alpha=-1.0, beta=0.5)
    buffer = filled(InnetSampler, [1.0, 2.0])
    with pytest.raises(errors.PriorityError, match="priority 0 of 1 is nan"):
        buffer.update_priority(torch.tensor([0]), torch.tensor([float("nan")]))
    buffer.empty()
    with pytest.raises(RuntimeError, match="empty storage"):
        buffer.sample()


@pytest.mark.parametrize("bad", [np.inf, np.nan, -0.5])
@pytest.mark.parametrize("before", [[], [0.5, 2.0]])
def test_a_refused_update_changes_nothing(bad: float, before: list[float]) -> None:
    buffer = filled(InnetSampler, before or [1.0])
    sampler = buffer._sampler
    if not before:
        sampler._empty()
    tree, largest = sampler._sum_tree[torch.arange(3)], sampler.default_priority
    with pytest.raises(errors.PriorityError):
        buffer.update_priority(torch.arange(2), torch.tensor([bad, 0.7]))
    assert (sampler._sum_tree[torch.arange(3)] == tree).all()
    assert sampler.default_priority == largest
    # Without priorities of their own, so they get the largest.
    plain = TensorDictReplayBuffer(storage=LazyTensorStorage(CAPACITY), sampler=sampler, batch_size=2)
    plain.extend(TensorDict({"observation": torch.arange(5)}, [5]))
    assert len(plain) == 5
