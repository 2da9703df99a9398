"""The learner against NumPy: targets, loss, gradient, clipping, Adam, the networks beside it, priorities."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from training import small

from innet_drl.torch_batches import TorchBatch
from innet_drl.train import environments
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.learn import numerics
from innet_drl.train.learn.learner import Learner, Numerics, choose_device
from innet_drl.train.learn.numerics import choose_numerics
from innet_drl.train.losses import PRIORITY_FLOOR
from innet_drl.train.memory import EmbeddedMemory, make_view, memory_settings
from innet_drl.train.observe.metrics import Meter
from innet_drl.train.play.actor import Actor
from innet_drl.train.settings import machine
from innet_drl.train.settings.config import PRESETS, Config

Weights: TypeAlias = dict[str, NDArray[np.float64]]

VECTOR = EnvironmentSpec(3, 1, (2,), "float32", 1)
IMAGES = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
# Clipped gradients, and an epsilon of Adam's that makes a step depend on their size.
TINY = dataclasses.replace(
    PRESETS["cartpole"],
    layers=(4,),
    hidden=3,
    device="cpu",
    learning_rate=0.05,
    adam_epsilon=0.1,
    max_gradient_norm=0.2,
    target_period=2,
)
BATCH: dict[str, NDArray[np.float64]] = {
    "observation": np.array([[0.5, -1.0], [1.5, 0.3], [-0.7, 0.9], [0.1, 0.2], [2.0, -0.4]]),
    "next_observation": np.array([[0.4, -1.2], [1.1, 0.8], [-0.2, 1.9], [0.0, 0.1], [1.0, -1.4]]),
    "action": np.array([0, 2, 1, 2, 0]),
    # Errors on both sides of Huber's threshold.
    "reward": np.array([0.2, -3.0, 1.0, 0.0, 5.0]),
    "discount": np.array([0.97, 0.0, 0.9, 0.97, 0.5]),
    "weights": np.array([1.0, 0.3, 0.7, 0.5, 0.9]),
}


def q_values(weights: Weights, observation: NDArray[np.float64]) -> NDArray[np.float64]:
    """The dueling network: Q = V + A - mean(A)."""
    features = np.maximum(observation @ weights["torso.linears.0.weight"].T + weights["torso.linears.0.bias"], 0)
    hidden = np.maximum(features @ weights["streams.weight"].T + weights["streams.bias"], 0)
    value = hidden[:, :3] @ weights["value.weight"].T + weights["value.bias"]
    advantage = hidden[:, 3:] @ weights["advantage.weight"].T + weights["advantage.bias"]
    return np.asarray(value + advantage - advantage.mean(1, keepdims=True))


def double_q_target(online: Weights, target: Weights) -> NDArray[np.float64]:
    """The online network chooses the action, the target network says what it is worth."""
    best = q_values(online, BATCH["next_observation"]).argmax(1)
    worth = q_values(target, BATCH["next_observation"])[np.arange(5), best]
    return np.asarray(BATCH["reward"] + BATCH["discount"] * worth)


def errors(weights: Weights, target: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.asarray(target - q_values(weights, BATCH["observation"])[np.arange(5), BATCH["action"]])


def weighted_huber(weights: Weights, target: NDArray[np.float64]) -> float:
    error = np.abs(errors(weights, target))
    return float(np.mean(BATCH["weights"] * np.where(error < 1, error**2 / 2, error - 0.5)))


def gradient(weights: Weights, target: NDArray[np.float64], step: float = 1e-6) -> Weights:
    """Central differences, one weight at a time."""
    slopes: Weights = {}
    for name, values in weights.items():
        slopes[name] = np.zeros_like(values)
        for index in np.ndindex(values.shape):
            sides = []
            for sign in (1, -1):
                moved = {**weights, name: values.copy()}
                moved[name][index] += sign * step
                sides.append(weighted_huber(moved, target))
            slopes[name][index] = (sides[0] - sides[1]) / (2 * step)
    return slopes


def weights_of(network: torch.nn.Module) -> Weights:
    return {name: value.double().numpy().copy() for name, value in network.state_dict().items()}


def tiny_learner(config: Config = TINY) -> Learner:
    """A learner whose two networks differ."""
    torch.manual_seed(3)
    made = Learner(config, VECTOR)
    made.target = Learner(config, VECTOR).network.requires_grad_(False)
    # Without biases, units of inactive features are at the kink of their ReLU, where differences are no gradients.
    for network in (made.network, made.target):
        for name, values in network.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.uniform_(values, -0.3, 0.3)
    made.average.load_state_dict(made.network.state_dict())
    return made


def torch_batch() -> TorchBatch:
    arrays = {name: torch.from_numpy(array).float() for name, array in BATCH.items()}
    arrays |= {"ages": torch.full((5,), 3), "probabilities": torch.full((5,), 0.2)}
    return TorchBatch(5, {**arrays, "action": torch.from_numpy(BATCH["action"])})


def test_the_target_is_double_q() -> None:
    ours = tiny_learner()
    online, target = weights_of(ours.network), weights_of(ours.target)
    expected = double_q_target(online, target)
    np.testing.assert_allclose(ours.with_targets(torch_batch()).target.numpy(), expected, rtol=1e-5)
    # It is neither of the two that it could be mistaken for.
    assert not np.allclose(expected, double_q_target(target, target))
    assert not np.allclose(expected, double_q_target(online, online))


def test_updates_are_those_of_the_formulas() -> None:
    """Three updates: the second copies the target network, the third learns from the copy."""
    ours = tiny_learner()
    meter = Meter()
    online, target = weights_of(ours.network), weights_of(ours.target)
    average = {name: value.copy() for name, value in online.items()}
    first = {name: np.zeros_like(value) for name, value in online.items()}
    second = {name: np.zeros_like(value) for name, value in online.items()}
    for number in (1, 2, 3):
        wanted = double_q_target(online, target)
        update = ours.update(torch_batch())
        error = np.abs(errors(online, wanted))
        assert error.min() < 1 < error.max()
        np.testing.assert_allclose(update.td_error.numpy(), error, rtol=1e-4)
        np.testing.assert_allclose(update.priorities(), error + PRIORITY_FLOOR, rtol=1e-4)
        ours.record(meter)
        recorded = meter.line()
        assert recorded["td_loss"] == pytest.approx(weighted_huber(online, wanted), rel=1e-4)
        assert recorded["q_mean"] == pytest.approx(np.mean(wanted - errors(online, wanted)), rel=1e-4)
        assert recorded["sample_age"] == 3.0
        assert recorded["priority_concentration"] == pytest.approx(0.2)

        slopes = gradient(online, wanted)
        norm = np.sqrt(sum(np.sum(slope**2) for slope in slopes.values()))
        assert recorded["gradient_norm"] == pytest.approx(norm, rel=1e-3)
        assert norm > TINY.max_gradient_norm
        for name, slope in slopes.items():
            clipped = slope * TINY.max_gradient_norm / norm
            first[name] = 0.9 * first[name] + 0.1 * clipped
            second[name] = 0.999 * second[name] + 0.001 * clipped**2
            mean, square = first[name] / (1 - 0.9**number), second[name] / (1 - 0.999**number)
            online[name] = online[name] - TINY.learning_rate * mean / (np.sqrt(square) + TINY.adam_epsilon)
            np.testing.assert_allclose(weights_of(ours.network)[name], online[name], atol=2e-5)
            # Its decay rises towards `average_decay`.
            average[name] += (online[name] - average[name]) * (1 - number / (number + 10))
            np.testing.assert_allclose(weights_of(ours.average)[name], average[name], atol=2e-5)
        if number == 2:
            target = {name: value.copy() for name, value in online.items()}
        for name, value in weights_of(ours.target).items():
            np.testing.assert_allclose(value, target[name], atol=2e-5)


def test_a_small_gradient_is_not_clipped() -> None:
    ours = tiny_learner(dataclasses.replace(TINY, max_gradient_norm=1e3))
    online = weights_of(ours.network)
    slopes = gradient(online, double_q_target(online, weights_of(ours.target)))
    ours.update(torch_batch())
    for name, slope in slopes.items():
        expected = online[name] - TINY.learning_rate * slope / (np.abs(slope) + TINY.adam_epsilon)
        np.testing.assert_allclose(weights_of(ours.network)[name], expected, atol=2e-5)


def test_a_priority_at_birth_is_the_error_of_the_learner() -> None:
    """Actor and learner with one network: what the writer computes from the actor's Q-values, the learner finds."""
    config = small(serial=True, priority_exponent=1.0, device="cpu")
    arena = environments.make(config, config.environments)
    torch.manual_seed(0)
    ours = Learner(config, arena.spec)
    view = make_view(config, arena.spec)
    settings = memory_settings(config, arena.spec, "t", ours.parameters())
    with EmbeddedMemory.unserved(settings) as memory:
        replay = memory.replay
        writer = memory.writer(0)
        actor = Actor(config, 0, arena, ours.network, writer)
        for _ in range(150):
            actor.step()
        assert actor.report().games, "no episode has ended"
        writer.close()
        batch = replay.sample("t", 500, view)
        at_birth = batch.probabilities * replay.stats()["tables"]["t"]["total_mass"]
        sampled = TorchBatch(
            len(batch), {name: torch.tensor(a) for name, a in batch.as_dict().items() if name != "ids"}
        )
        np.testing.assert_allclose(at_birth, ours.update(sampled).td_error.numpy(), atol=1e-5)
        assert (batch.discount == 0).any()
        assert at_birth.std() > 0.01


@pytest.mark.parametrize(("divisor", "largest"), [("batch", 1.0), ("memory", 0.1)])
def test_weights_are_divided_by_the_largest_of_the_batch_or_of_the_memory(
    divisor: Literal["batch", "memory"], largest: float
) -> None:
    config = small(
        serial=True, normalize_weights=divisor, priority_exponent=1.0, importance_exponent=1.0, samples_per_insert=100.0
    )
    arena = environments.make(config, config.environments)
    network = Learner(config, arena.spec).network
    settings = memory_settings(config, arena.spec, "t", {})
    with EmbeddedMemory.unserved(settings) as memory:
        writer = memory.writer(0)
        actor = Actor(config, 0, arena, network, writer)
        for _ in range(150):
            actor.step()
        writer.close()
        ids = np.unique(memory.replay.sample("t", 60_000, settings.view).ids)
        priorities = np.full(len(ids), 10.0)
        priorities[0] = 1.0
        memory.replay.update_priorities("t", ids, priorities)
        with memory.batches("cpu", 10.0) as batches:
            found = [batch for batch in (next(batches) for _ in range(50)) if ids[0] not in batch.ids]
    assert len(found) > 10
    for batch in found:
        assert float(batch.weights.max()) == pytest.approx(largest, rel=1e-3)


def test_the_step_size_falls_to_its_final_value() -> None:
    config = dataclasses.replace(
        TINY, learning_rate=0.1, learning_rate_final=0.02, learning_rate_anneal_updates=4, adam_epsilon=1e-12
    )
    ours = tiny_learner(config)
    meter = Meter()
    rates, steps = [], []
    for _ in range(6):
        before = weights_of(ours.network)["value.bias"]
        ours.update(torch_batch())
        ours.record(meter)
        rates.append(meter.line()["learning_rate"])
        steps.append(float(np.abs(weights_of(ours.network)["value.bias"] - before).item()))
    assert rates == pytest.approx([0.1, 0.08, 0.06, 0.04, 0.02, 0.02])
    # The first step of Adam has the size of the rate.
    assert steps[0] == pytest.approx(0.1, rel=1e-4)
    resumed = tiny_learner(config)
    resumed.load({name: tensor.clone() for name, tensor in ours.tensors().items()}, updates=2, publications=0)
    resumed.update(torch_batch())
    resumed.record(meter)
    assert meter.line()["learning_rate"] == pytest.approx(0.06)


@pytest.mark.parametrize("settings", [{"learning_rate_final": 1e-4}, {"learning_rate_anneal_updates": 10}])
def test_an_annealed_step_size_has_an_end_and_a_length(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="given with"):
        dataclasses.replace(TINY, **settings)


def test_chosen_arithmetic_is_taken_unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(*arguments: object) -> float:
        raise AssertionError("an update was measured")

    monkeypatch.setattr(numerics, "_seconds_of_update", measured)
    breakout = dataclasses.replace(PRESETS["breakout"], numerics="bfloat16", layout="channels_last", device="cpu")
    assert choose_numerics(breakout, IMAGES) == Numerics(torch.bfloat16, torch.channels_last)
    plain = dataclasses.replace(breakout, numerics="float32", layout="contiguous")
    assert choose_numerics(plain, IMAGES) == Numerics(torch.float32, torch.contiguous_format)
    blocks = dataclasses.replace(plain, layout="space_to_depth")
    assert choose_numerics(blocks, IMAGES) == Numerics(torch.float32, torch.channels_last, space_to_depth=True)
    assert choose_numerics(breakout, VECTOR) == Numerics(torch.bfloat16, torch.contiguous_format)
    assert choose_numerics(small(device="cpu"), VECTOR) == Numerics(torch.float32, torch.contiguous_format)
    assert choose_numerics(dataclasses.replace(PRESETS["breakout"], serial=True), IMAGES) == Numerics()


def test_the_fastest_arithmetic_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(config: Config, spec: EnvironmentSpec, numerics: Numerics, limit: float) -> float:
        return 1.0 if numerics == Numerics(torch.float32, torch.channels_last) else 2.0

    monkeypatch.setattr(numerics, "_seconds_of_update", measured)
    assert choose_numerics(PRESETS["breakout"], IMAGES) == Numerics(torch.float32, torch.channels_last)


@pytest.mark.parametrize(
    ("spec", "network"),
    [
        (EnvironmentSpec(4, 4, (84, 82), "uint8", 4), "nature"),
        (EnvironmentSpec(4, 1, (3, 84, 84), "float32", 1), "nature"),
        (EnvironmentSpec(4, 4, (3, 84, 84), "uint8", 4), "nature"),
        (IMAGES, "impala"),
        (VECTOR, "auto"),
    ],
)
def test_blocks_of_pixels_are_for_images_that_have_whole_ones(
    spec: EnvironmentSpec, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[Numerics] = []

    def measure(config: Config, spec: EnvironmentSpec, numerics: Numerics, limit: float) -> float:
        measured.append(numerics)
        return 1.0

    monkeypatch.setattr(numerics, "_seconds_of_update", measure)
    config = dataclasses.replace(PRESETS["breakout"], network=network, device="cpu")
    choose_numerics(config, spec)
    assert not any(candidate.space_to_depth for candidate in measured)
    with pytest.raises(ConfigurationError, match=r"layout space_to_depth: .*multiples of 4"):
        choose_numerics(dataclasses.replace(config, layout="space_to_depth"), spec)


@pytest.mark.parametrize(
    ("cuda", "serial", "device"), [(True, False, "cuda:0"), (True, True, "cpu"), (False, False, "cpu")]
)
def test_the_device_follows_the_machine_but_not_in_a_serial_run(
    cuda: bool, serial: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    assert choose_device(small(serial=serial)) == torch.device(device)


def test_several_learners_take_the_gpus_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    devices = [choose_device(small(learners=3), number) for number in range(3)]
    assert devices == [torch.device("cuda", number) for number in (0, 1, 0)]


def test_threads_are_counted_by_the_cores_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 3, 4, 6, 7})
    assert machine.cores() == 5
    assert Learner(small(actors=2, device="cpu"), VECTOR).threads_left == 3
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {2})
    assert not Learner(dataclasses.replace(PRESETS["breakout"], device="cpu"), IMAGES).targets_ahead


@pytest.mark.parametrize("publish", ["average", "newest"])
def test_actors_get_the_published_network(publish: Literal["average", "newest"]) -> None:
    learner = tiny_learner(dataclasses.replace(TINY, publish=publish))
    for _ in range(3):
        learner.update(torch_batch())
    arrays = learner.parameters()
    for name, average in weights_of(learner.average).items():
        wanted = average if publish == "average" else weights_of(learner.network)[name]
        np.testing.assert_array_equal(arrays[name], wanted.astype(np.float32))
    assert any(
        (weights_of(learner.network)[name] != array).any() for name, array in weights_of(learner.average).items()
    )
