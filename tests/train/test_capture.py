"""A captured update: the same numbers from static tensors alone, and what cannot be captured."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import innet_drl as innet
from innet_drl import torch_batches
from innet_drl.structures import map_leaves
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.learn.capture import (
    MOST_LAYOUTS,
    WARM_UP,
    CapturedUpdate,
    CudaGraph,
    StaticBatch,
    _memory,
    _needs_data,
)
from innet_drl.train.learn.learner import Learner, Numerics, choose_device
from innet_drl.train.learn.numerics import random_batch
from innet_drl.train.losses import FunctionLoss, Outputs
from innet_drl.train.settings.config import PRESETS, Config

SPEC = EnvironmentSpec(3, 1, (5,), "float32", 1)
# Gradients that are clipped, a step size that falls, and a target network that is renewed amid the updates.
CONFIG = dataclasses.replace(
    PRESETS["cartpole"],
    layers=(16,),
    hidden=16,
    batch_size=8,
    device="cpu",
    max_gradient_norm=0.5,
    target_period=7,
    learning_rate=0.01,
    learning_rate_final=0.001,
    learning_rate_anneal_updates=50,
)
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"))


class Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists PyTorch's calls: names, numbers, and the addresses of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not _needs_data(func, args), f"no graph can repeat {func}"
        read: set[int] = set()

        def described(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [described(part) for part in value]
            if not isinstance(value, Tensor):
                return value if isinstance(value, bool | int | float | torch.dtype) else type(value).__name__
            place = value.untyped_storage().data_ptr()
            read.add(place)
            return ("made" if place in self._made else place, value.dtype, value.shape, value.stride())

        call = (str(func), described(args), {name: described(value) for name, value in (kwargs or {}).items()})
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, Tensor) and (place := tensor.untyped_storage().data_ptr()) not in read:
                self._made.add(place)
        self.calls.append(call)
        return result


class RepeatedCalls:
    """In place of a CUDA graph, on the processor: a function that has to make the same calls each time."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._first: list[Any] | None = None

    def replay(self) -> Tensor:
        with Calls() as calls:
            result = self._function()
        if self._first is None:
            self._first = calls.calls
        assert len(calls.calls) > 50
        assert calls.calls == self._first
        return result


def learner(config: Config, device: str) -> Learner:
    torch.manual_seed(1)
    settings: dict[str, Any] = {"device": device}
    made = Learner(dataclasses.replace(config, **settings), SPEC)
    graph = CudaGraph if device == "cuda" else RepeatedCalls
    made.captured = CapturedUpdate(made._step, graph)
    return made


def tensors(batch: TorchBatch) -> list[Tensor]:
    found: list[Tensor] = []
    map_leaves(found.append, {name: value for name, value in batch.items() if name != "ids"})
    return found


@pytest.mark.parametrize(
    "settings", [{}, {"munchausen": True}, {"loss": "categorical"}, {"loss": "quantile"}, {"layer_norm": True}], ids=str
)
@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_captured_update_is_the_one_that_is_not(device: str, settings: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **settings)
    captured, plain = learner(config, device), learner(config, device)
    plain.captured = None
    for number in range(100):
        plain.load({name: value.clone() for name, value in captured.tensors().items()}, number, 0)
        batch = random_batch(SPEC, config.batch_size, captured.device)
        found, expected = captured.update(batch), plain.update(batch)
        np.testing.assert_allclose(found.priorities(), expected.priorities(), rtol=1e-5)
        for name, value in plain.tensors().items():
            torch.testing.assert_close(captured.tensors()[name], value, rtol=1e-5, atol=1e-7, msg=name)
    assert captured.captured is not None
    assert captured.captured.reason is None


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_images_in_bfloat16_are_captured_again_after_a_load(device: str) -> None:
    spec = EnvironmentSpec(4, 4, (64, 64), "uint8", 4)
    settings: dict[str, Any] = {"device": device, "batch_size": 4, "targets_ahead": "off", "layer_norm": True}
    config = dataclasses.replace(PRESETS["breakout"], **settings)
    graph = CudaGraph if device == "cuda" else RepeatedCalls

    def made(captured: bool) -> Learner:
        torch.manual_seed(1)
        ours = Learner(config, spec)
        ours.use(Numerics(torch.bfloat16, torch.channels_last))
        ours.captured = CapturedUpdate(ours._step, graph) if captured else None
        return ours

    captured, plain = made(True), made(False)
    batches = [random_batch(spec, 4, captured.device) for _ in range(WARM_UP + 3)]
    for session in (1, 2):
        for batch in batches:
            torch.testing.assert_close(captured.update(batch).td_error, plain.update(batch).td_error)
        assert captured.captured is not None
        assert len(captured.captured._graphs) == 1
        for ours in (captured, plain):
            ours.load({name: value.clone() for name, value in ours.tensors().items()}, ours.updates, session)
        # After a load the learner captures by CUDA.
        captured.captured = CapturedUpdate(captured._step, graph)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_each_layout_of_batches_has_a_graph(device: str, caplog: pytest.LogCaptureFixture) -> None:
    captured, plain = learner(CONFIG, device), learner(CONFIG, device)
    plain.captured = None
    assert captured.captured is not None
    for size in [8] * (WARM_UP + 1) + [5, 8, 5, 3, 2, 8, 6, 7, 6, 5]:
        batch = random_batch(SPEC, size, captured.device)
        torch.testing.assert_close(captured.update(batch).td_error, plain.update(batch).td_error)
    assert len(captured.captured._graphs) == MOST_LAYOUTS
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "more than 4 layouts" in message


def test_indices_are_captured_and_masks_are_not() -> None:
    def loss(of: Callable[[Tensor, TorchBatch], Tensor]) -> FunctionLoss:
        def function(online: Outputs, target: Outputs, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
            q = online(batch.observation)
            error = batch.reward - of(q, batch)
            return error**2, error.abs(), q

        return FunctionLoss(CONFIG, function)

    def refused(of: Callable[[Tensor, TorchBatch], Tensor]) -> str | None:
        ours = learner(CONFIG, "cpu")
        ours.loss = loss(of)
        for _ in range(WARM_UP + 1):
            ours.update(random_batch(SPEC, 8, ours.device))
        assert ours.captured is not None
        return ours.captured.reason

    assert refused(lambda q, batch: q[torch.arange(8), batch.action.long()]) is None
    assert "index.Tensor" in str(refused(lambda q, batch: q[torch.ones(8, 3).bool()].view(8, 3)[:, 0]))


def test_updates_go_on_after_a_capture_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fail(function: Callable[[], Tensor]) -> RepeatedCalls:
        raise RuntimeError("operation not permitted\nwhen a stream is capturing")

    ours, plain = learner(CONFIG, "cpu"), learner(CONFIG, "cpu")
    ours.captured, plain.captured = CapturedUpdate(ours._step, fail), None
    for _ in range(WARM_UP + 3):
        batch = random_batch(SPEC, 8, ours.device)
        torch.testing.assert_close(ours.update(batch).td_error, plain.update(batch).td_error)
    (message,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    line = fail.__code__.co_firstlineno + 1
    assert message.endswith(f"operation not permitted at {__file__}:{line}")


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_loss_that_waits_for_the_device_is_named(device: str, caplog: pytest.LogCaptureFixture) -> None:
    def loss(online: Outputs, target: Outputs, batch: TorchBatch) -> tuple[Tensor, Tensor, Tensor]:
        q = online(batch.observation)
        error = batch.reward - q.gather(1, batch.action.long()[:, None])[:, 0]
        scale = max(1.0, error.abs().max().item())
        return (error / scale) ** 2, error.abs(), q

    ours = learner(CONFIG, device)
    ours.loss = FunctionLoss(CONFIG, loss)
    with caplog.at_level(logging.WARNING):
        for _ in range(WARM_UP + 3):
            before = ours.network.state_dict()["value.bias"].clone()
            ours.update(random_batch(SPEC, 8, ours.device))
            assert not torch.equal(ours.network.state_dict()["value.bias"], before)
    (message,) = [record.getMessage() for record in caplog.records]
    line = loss.__code__.co_firstlineno + 3
    assert f"{__file__}:{line} waits for the device" in message


def test_the_arrays_of_a_batch_are_one_copy() -> None:
    columns: dict[str, Any] = {"observation": ("uint8", (6,)), "action": "int64", "reward": "float32"}
    with innet.Memory(innet.Table("t", columns, 1_000, view=innet.NStep(n=3, gamma=0.9))) as replay:
        steps = np.arange(200)
        rows: dict[str, Any] = {
            "observation": np.full((200, 1, 6), steps[:, None, None], np.uint8),
            "action": steps[:, None],
        }
        rows |= {"reward": steps[:, None].astype(np.float32), "terminated": (steps % 50 == 49)[:, None]}
        with replay.writer("t", 1) as writer:
            writer.extend(**rows, truncated=np.zeros((200, 1), bool))
        made = []
        for _ in range(2):
            sampled = replay.sample("t", 16)
            flat, layout = sampled._memory()
            made.append(torch_batches._tensors(sampled, torch.from_numpy(flat).clone(), layout))
    static = StaticBatch(made[0])
    assert len(static._copies) == 1
    addresses = [tensor.data_ptr() for tensor in tensors(static.batch)]
    for batch in made:
        layout, pieces = _memory(batch)
        assert layout == static.layout
        static.fill(pieces)
        assert [tensor.data_ptr() for tensor in tensors(static.batch)] == addresses
        for copied, tensor in zip(tensors(static.batch), tensors(batch), strict=True):
            torch.testing.assert_close(copied, tensor)


def test_captures_only_what_a_graph_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = learner(CONFIG, "cpu")
    assert ours.obstacle == "the learner is on the processor"
    monkeypatch.setattr(ours, "device", torch.device("cuda", 0))
    assert ours.obstacle is None
    obstacles = {"capture": ("off", "capture off"), "learners": (2, "several"), "targets_ahead": ("on", "another")}
    for name, (value, obstacle) in obstacles.items():
        ours.config = dataclasses.replace(CONFIG, **{name: value})
        assert str(ours.obstacle).startswith(obstacle)


def test_a_gpu_has_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device(dataclasses.replace(CONFIG, device="cuda")) == torch.device("cuda", 0)
