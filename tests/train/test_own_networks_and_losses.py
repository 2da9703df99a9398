"""Networks and losses by name and of a user's own: shapes, formulas, and faults that are one error."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import brought
import numpy as np
import own_networks
import pytest
import torch
from training import small

from innet_drl.launch import start
from innet_drl.structures import map_leaves
from innet_drl.torch_batches import TorchBatch
from innet_drl.train import environments
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError, DivergedError
from innet_drl.train.learn.learner import Learner, Numerics
from innet_drl.train.learn.numerics import random_batch
from innet_drl.train.losses import make_loss
from innet_drl.train.networks import make_network
from innet_drl.train.settings.config import PRESETS

VECTOR = EnvironmentSpec(3, 1, (4,), "float32", 1)
VECTOR_SPACE: Any = VECTOR.observation_space
SMALL_IMAGES = EnvironmentSpec(3, 2, (3, 11, 9), "uint8", 1)
LARGE_IMAGES = EnvironmentSpec(3, 4, (84, 84), "uint8", 1)


@pytest.mark.parametrize("spec", [SMALL_IMAGES, LARGE_IMAGES])
def test_impala_takes_images_of_any_size(spec: EnvironmentSpec) -> None:
    config = small(network="impala", channels=(4, 4, 4))
    learner = Learner(config, spec)
    before = [parameter.clone() for parameter in learner.network.parameters()]
    for _ in range(3):
        learner.update(random_batch(spec, 4, learner.device))
    assert not any(torch.equal(a, b) for a, b in zip(before, learner.network.parameters(), strict=True))
    restored = Learner(config, spec)
    restored.load({name: tensor.clone() for name, tensor in learner.tensors().items()}, 3, 1)
    frames = random_batch(spec, 4, learner.device).observation
    for network in ("network", "target", "average"):
        q = [getattr(owner, network).eval()(frames) for owner in (learner, restored)]
        torch.testing.assert_close(*q)


def test_spectral_norms_of_the_average_follow_its_weights() -> None:
    """Power iteration runs in training; the average, which is not trained, gets its vectors with its weights."""
    config = small(network="own_networks:Spectral", average_decay=0.0, publish="newest", learning_rate=0.01)
    learner = Learner(config, VECTOR)
    for _ in range(30):
        learner.update(random_batch(VECTOR, 4, learner.device))
    weight = learner.average.module.layer.weight  # type: ignore[union-attr]
    assert torch.linalg.matrix_norm(weight, 2) == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize(
    ("network", "spec", "message"),
    [
        ("nature", SMALL_IMAGES, "at least 36 pixels, and these are 11x9: take impala"),
        ("impala", VECTOR, "for images, and the observations are vectors .*: take mlp"),
        ("dict", VECTOR, "take nature, impala or mlp"),
    ],
)
def test_a_network_of_other_observations_is_refused(network: str, spec: EnvironmentSpec, message: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"network {network}: .*{message}"):
        make_network(small(network=network), spec)


def test_a_dictionary_takes_no_other_network() -> None:
    spec = environments.make(small(environment=brought.Sampler, environment_args={"observation": "dictionary"}), 1).spec
    with pytest.raises(ConfigurationError, match="take dict"):
        make_network(small(network="mlp"), spec)
    zeros = spec.make(lambda part: torch.zeros((2, *part.shape), dtype=getattr(torch, part.dtype)))
    assert make_network(small(network="own_networks:LinearDict"), spec)(zeros).shape == (2, 3)


def test_a_network_for_vectors_is_told_of_a_dictionary() -> None:
    spec = environments.make(small(environment=brought.Sampler, environment_args={"observation": "dictionary"}), 1).spec
    with pytest.raises(ConfigurationError, match=r"Linear: .*; observations are dictionaries: each part has a shape"):
        make_network(small(network="own_networks:Linear"), spec)


@pytest.mark.parametrize(
    ("network", "loss"),
    [
        ("own_networks:Linear", "double_q"),
        (own_networks.Linear, "own_networks:squared"),
        ("own_networks:LinearAtoms", "categorical"),
    ],
)
def test_a_network_of_ones_own_trains(network: Any, loss: Any, tmp_path: Path) -> None:
    config = small(network=network, loss=loss, steps=300, batch_size=16)
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None
    saved = (tmp_path / "run" / "config.yaml").read_text()
    assert "network: own_networks:Linear" in saved
    more = dataclasses.replace(config, steps=result.agent_steps + 300)
    resumed = start.train(more, tmp_path / "run", resume=True)
    assert resumed.learner_updates > result.learner_updates


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"network": "own_networks:OneTooMany"},
            r"OneTooMany: for 2 .* shape \(2, 4\), and loss double_q reads \(2, 3\)",
        ),
        (
            {"network": "own_networks:Linear", "loss": "quantile"},
            r"shape \(2, 3\), and loss quantile reads \(2, 3, 200\)",
        ),
        (
            {"network": "own_networks:network_raises"},
            r"network_raises: called with .* it raises RuntimeError: too small",
        ),
        ({"network": "brought:make_number"}, r"make_number: called with .* TypeError"),
        ({"network": "own_networks:LinearDict"}, r"LinearDict: called with .*AttributeError"),
        ({"network": "brought:Missing"}, r"network brought:Missing: brought has no 'Missing'"),
        (
            {"network": "own_networks:Liner"},
            r"network own_networks:Liner: own_networks has no 'Liner': did you mean Linear",
        ),
        ({"network": own_networks.Linear(VECTOR_SPACE, 3, small())}, "it is an object: give its class"),
        (
            {"loss": "own_networks:squared_nan"},
            r"loss own_networks:squared_nan: its loss is infinite or NaN on the first batch",
        ),
        ({"loss": "own_networks:squared_mean"}, r"its loss has the shape \(\), and has to have \(4,\)"),
        ({"loss": "brought:make_raises"}, r"make_raises: on the first batch it raises TypeError"),
        ({"loss": "own_networks:squared_constant"}, r"its loss has no gradient: compute it from online"),
        ({"loss": "own_networks:Linear"}, r"loss own_networks:Linear: it is a class, and has to be a function"),
        ({"loss": "own_networks:LossWithoutCall"}, r"LossWithoutCall: the class has to define __call__"),
        (
            {"loss": "own_networks:LossThatRaises"},
            r"LossThatRaises: called with the settings it raises RuntimeError: no",
        ),
        ({"loss": "nothing_here:loss"}, r"loss nothing_here:loss: there is no module"),
    ],
)
def test_a_network_or_loss_that_cannot_be_used_is_one_error(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        learner = Learner(small(**changes, device="cpu"), VECTOR)
        learner.update(random_batch(VECTOR, 4, learner.device))


def test_a_network_of_ones_own_computes_vectors_in_bfloat16_where_that_is_given(tmp_path: Path) -> None:
    class Typed(own_networks.Linear):
        def forward(self, observation: torch.Tensor) -> torch.Tensor:
            q = super().forward(observation)
            seen.add(q.dtype)
            return q

    seen: set[torch.dtype] = set()
    result = start.train(small(network=Typed, numerics="bfloat16", serial=True, steps=300), tmp_path / "run")
    assert result.learner_updates > 0
    assert torch.bfloat16 in seen


class Counted:
    """A loss with a lock, which cannot be copied."""

    def __init__(self) -> None:
        self.lock, self.batches = threading.Lock(), 0

    def __call__(self, online: Any, target: Any, batch: TorchBatch) -> Any:
        with self.lock:
            self.batches += 1
        return own_networks.squared(online, target, batch)


@pytest.mark.parametrize("loss", ["categorical", Counted()])
def test_copies_of_a_network_share_what_its_loss_holds(loss: Any, tmp_path: Path) -> None:
    """The loss holds the settings, which hold the environment."""
    lock = threading.Lock()

    def make() -> brought.Counter:
        with lock:
            return brought.Counter()

    config = small(
        environment=make, environment_args={}, loss=loss, serial=True, steps=300, batch_size=16, target_period=5
    )
    result = start.train(config, tmp_path / "run")
    assert result.learner_updates > 5
    if isinstance(loss, Counted):
        assert loss.batches >= result.learner_updates


@pytest.mark.parametrize("serial", [True, False])
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ("brought:make_raises", "on a random batch it raises TypeError"),
        ("own_networks:squared_mean", r"its loss has the shape \(\), and has to have \(32,\)"),
        ("own_networks:LossOfTargets", "LossOfTargets: on a random batch it raises .*no array 'missing'"),
        # Of values, the first batch of the run decides.
        ("own_networks:squared_nan", "its loss is infinite or NaN on the first batch"),
    ],
)
def test_a_loss_that_fails_at_once_leaves_no_folder(loss: str, message: str, serial: bool, tmp_path: Path) -> None:
    config = small(loss=loss, serial=serial, network="own_networks:Linear")
    with pytest.raises(ConfigurationError, match=message):
        start.train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_loss_is_tried_in_the_layout_of_the_learner() -> None:
    config = dataclasses.replace(PRESETS["breakout"], loss="own_networks:squared", device="cpu")
    spec = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
    learner = Learner(config, spec)
    learner.use(Numerics(torch.float32, torch.channels_last, space_to_depth=True))
    learner.try_loss(random_batch(spec, 4, learner.device))


def test_a_loss_is_tried_on_a_batch_like_those_of_the_memory(tmp_path: Path) -> None:
    """Of an environment with a dictionary, whose observations the network can read."""
    seen: list[dict[str, Any]] = []

    def watched(online: Any, target: Any, batch: TorchBatch) -> Any:
        seen.append(
            {name: map_leaves(lambda array: (array.dtype, array.shape), of) for name, of in batch.as_dict().items()}
        )
        assert torch.isfinite(online(batch.observation)).all()
        return own_networks.squared(online, target, batch)

    environment = {"environment": brought.Sampler, "environment_args": {"observation": "dictionary"}}
    config = small(**environment, loss=watched, serial=True, steps=200, batch_size=16, stack=2, channels=(2, 2, 2))
    result = start.train(config, tmp_path / "run")
    assert len(seen) > result.learner_updates
    assert all(each == seen[0] for each in seen)


@pytest.mark.parametrize("ahead", ["on", "off"])
def test_targets_of_any_names_are_computed_once(ahead: str, tmp_path: Path) -> None:
    own_networks.Halved.computed = 0
    result = start.train(small(loss="own_networks:Halved", targets_ahead=ahead, steps=400), tmp_path / "run")
    assert result.learner_updates > 10
    # Once for each update and for the trial before the run; the targets of a few batches were not needed at the end.
    assert result.learner_updates < own_networks.Halved.computed <= result.learner_updates + 4


@pytest.mark.parametrize("name", ["network", "loss"])
def test_an_unknown_name_lists_the_names(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^{name} 'big': it must be .*, or an import path module:name"):
        small(**{name: "big"})


@pytest.mark.parametrize("serial", [True, False])
def test_a_loss_that_becomes_nan_names_itself(serial: bool, tmp_path: Path) -> None:
    own_networks.later_nan.batches = 0
    with pytest.raises(DivergedError, match=r"loss own_networks:LaterNan"):
        start.train(small(loss=own_networks.later_nan, serial=serial), tmp_path / "run")


def batch_of(outputs: int) -> tuple[dict[str, np.ndarray[Any, Any]], TorchBatch, Any, Any]:
    """A batch of three transitions, with networks whose outputs are tables of random numbers."""
    random = np.random.default_rng(1)
    tables = {name: random.normal(size=(3, 2, outputs)) for name in ("q", "next_online", "next_target", "now_target")}
    arrays = {
        "reward": np.array([0.3, -0.7, 2.0]),
        "discount": np.array([0.9, 0.0, 0.81]),
        "action": np.array([0, 1, 1]),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}

    def network(now: str, then: str) -> Any:
        def compute(observation: int) -> torch.Tensor:
            table = torch.from_numpy(tables[now if observation == 0 else then]).float()
            return table[..., 0] if outputs == 1 else table

        return compute

    online, target = network("q", "next_online"), network("now_target", "next_target")
    float_tensors = {name: tensor.float() if name != "action" else tensor for name, tensor in tensors.items()}
    return tables | arrays, TorchBatch(3, {**float_tensors, "observation": 0, "next_observation": 1}), online, target


def softmax(values: Any) -> Any:
    values = np.exp(values - values.max(-1, keepdims=True))
    return values / values.sum(-1, keepdims=True)


def computed(config: Any, outputs: int) -> tuple[dict[str, Any], dict[str, torch.Tensor], Any]:
    """The arrays of a batch, the targets of the loss, and what the loss returns."""
    arrays, batch, online, target = batch_of(outputs)
    loss = make_loss(config)
    targets = loss.targets(batch, online, target)
    return arrays, targets, loss(online, target, TorchBatch(3, {**batch.as_dict(), **targets}))


MUNCHAUSEN = {"munchausen": True, "munchausen_temperature": 0.5, "munchausen_floor": -0.4, "munchausen_scale": 0.8}


def munchausen_terms(now: Any, then: Any, action: Any) -> tuple[Any, Any, Any]:
    """Reward added to each transition, next policy, and the term added to each next action's value."""
    log_now, log_then = (0.5 * np.log(softmax(q / 0.5)) for q in (now, then))
    added = 0.8 * np.clip(log_now[np.arange(3), action], -0.4, 0.0)
    assert added.min() == pytest.approx(-0.32)
    return added, softmax(then / 0.5), -log_then


def test_munchausen_q_learning_is_the_formula() -> None:
    a, targets, result = computed(small(**MUNCHAUSEN), 1)
    now, then, q = a["now_target"][..., 0], a["next_target"][..., 0], a["q"][..., 0]
    added, policy, raised = munchausen_terms(now, then, a["action"])
    expected = a["reward"] + added + a["discount"] * (policy * (then + raised)).sum(1)
    np.testing.assert_allclose(targets["target"], expected, rtol=1e-5)
    error = a["reward"] + a["discount"] * then.max(1) - q[np.arange(3), a["action"]]
    np.testing.assert_allclose(result.priority, abs(error), rtol=1e-5)


@pytest.mark.parametrize("munchausen", [False, True])
def test_quantile_regression_is_the_formula(munchausen: bool) -> None:
    count = 5
    a, targets, result = computed(small(loss="quantile", quantiles=count, **(MUNCHAUSEN if munchausen else {})), count)
    rows = np.arange(3)
    now, then = a["now_target"].mean(2), a["next_target"].mean(2)
    if munchausen:
        added, policy, raised = munchausen_terms(now, then, a["action"])
        returns = (policy[..., None] * (a["next_target"] + raised[..., None])).sum(1)
        value = then.max(1)
    else:
        best = a["next_online"].mean(2).argmax(1)
        added, returns, value = 0.0, a["next_target"][rows, best], then[rows, best]
    expected = (a["reward"] + added)[:, None] + a["discount"][:, None] * returns
    np.testing.assert_allclose(targets["target"], expected, rtol=1e-5)
    taken = a["q"][rows, a["action"]]
    losses = np.zeros(3)
    for row in rows:
        for index in range(count):
            for goal in expected[row]:
                error = goal - taken[row, index]
                huber = error**2 / 2 if abs(error) < 1 else abs(error) - 0.5
                losses[row] += abs((index + 0.5) / count - (error < 0)) * huber / count
    np.testing.assert_allclose(result.loss, losses, rtol=1e-4)
    td_error = a["reward"] + a["discount"] * value - taken.mean(1)
    np.testing.assert_allclose(result.priority, abs(td_error), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("munchausen", [False, True])
def test_categorical_is_the_formula(munchausen: bool) -> None:
    atoms, low, high = 6, -1.5, 2.0
    changes: dict[str, Any] = MUNCHAUSEN if munchausen else {}
    a, targets, result = computed(small(loss="categorical", atoms=atoms, value_range=(low, high), **changes), atoms)
    support, rows = np.linspace(low, high, atoms), np.arange(3)
    mean = {name: (softmax(a[name]) * support).sum(2) for name in ("q", "next_online", "next_target", "now_target")}
    if munchausen:
        added, policy, raised = munchausen_terms(mean["now_target"], mean["next_target"], a["action"])
        value = mean["next_target"].max(1)
    else:
        best = mean["next_online"].argmax(1)
        added, policy, raised = np.zeros(3), np.eye(2)[best], np.zeros((3, 2))
        value = mean["next_target"][rows, best]
    expected = np.zeros((3, atoms))
    for row in rows:
        for action in range(2):
            for atom, probability in zip(support, softmax(a["next_target"])[row, action], strict=True):
                goal = a["reward"][row] + added[row] + a["discount"][row] * (atom + raised[row, action])
                position = (np.clip(goal, low, high) - low) / (support[1] - support[0])
                for index in range(atoms):
                    expected[row, index] += policy[row, action] * probability * max(0.0, 1 - abs(position - index))
    np.testing.assert_allclose(expected.sum(1), 1.0)
    np.testing.assert_allclose(targets["target"], expected, atol=1e-5)
    taken = softmax(a["q"])[rows, a["action"]]
    np.testing.assert_allclose(result.loss, -(expected * np.log(taken)).sum(1), rtol=1e-4)
    td_error = a["reward"] + a["discount"] * value - mean["q"][rows, a["action"]]
    np.testing.assert_allclose(result.priority, abs(td_error), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", ["categorical", "quantile"])
def test_distributions_train_in_processes(loss: str, tmp_path: Path) -> None:
    result = start.train(small(loss=loss, munchausen=True, steps=400, targets_ahead="on"), tmp_path / "run")
    assert result.learner_updates > 0
    assert result.evaluation is not None
