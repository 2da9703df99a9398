"""Diagnostics: what they see in networks and batches, and the warning of each planted mistake."""

from __future__ import annotations

import copy
import dataclasses
import html
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_metrics import recorded
from torch import Tensor, nn
from torch.nn import functional
from training import lines, small

from innet_drl.analysis import recorded_run
from innet_drl.analysis.recorded_run import read_run
from innet_drl.analysis.report import write_report
from innet_drl.launch import local
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.learn import diagnostics
from innet_drl.train.learn.diagnostics import Diagnostics, Watch, adam_epsilon_share
from innet_drl.train.learn.learner import Learner
from innet_drl.train.learn.numerics import random_batch
from innet_drl.train.observe import signs as train_signs
from innet_drl.train.observe.display import silent
from innet_drl.train.observe.metrics import parts
from innet_drl.train.observe.signs import RECENT, SignsOfRun
from innet_drl.train.settings.presets import PRESETS

IMAGES = EnvironmentSpec(4, 4, (40, 40), "uint8", 4)


class Half(nn.Module):
    """Three ReLUs, in three ways to write them, of which a half, none and all of the units are 0."""

    def forward(self, inputs: Tensor) -> Tensor:
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0])
        hidden = functional.relu(inputs.abs() * signs)
        return torch.relu(-1.0 - nn.ReLU(inplace=True)(hidden + 1.0))


def test_dead_units_are_of_each_relu() -> None:
    with torch.no_grad(), Watch() as watch:
        Half()(torch.randn(8, 4).abs() + 2)
        functional.relu(torch.tensor([[[[1.0, -1.0]], [[-1.0, -1.0]]]]))
    # A filter is alive if it is so anywhere in the image.
    assert watch.dead_units == {"1": 0.5, "2": 0.0, "3": 1.0, "4": 0.5}


def test_relus_of_numbers_are_no_units() -> None:
    with torch.no_grad(), Watch() as watch:
        functional.relu(torch.tensor(-1.0))
        functional.relu(torch.zeros(3))
    assert watch.dead_units == {}


@pytest.mark.parametrize(
    ("norm", "shape"), [(nn.LayerNorm(6), (3, 6)), (nn.LayerNorm((2, 3)), (3, 2, 3)), (nn.GroupNorm(1, 2), (3, 2, 5))]
)
@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_the_spread_is_of_what_is_normalised(norm: nn.Module, shape: tuple[int, ...], spread: float) -> None:
    inputs = spread * torch.randn(shape)
    with torch.no_grad(), Watch() as watch:
        norm(inputs)
    expected = inputs.flatten(1).numpy().std(1).mean() / math.sqrt(1e-5)
    assert watch.spreads == [pytest.approx(expected, rel=1e-4)]


def test_weights_that_adams_epsilon_holds_back() -> None:
    weights = nn.Parameter(torch.zeros(4))
    unused = nn.Parameter(torch.zeros(9))
    optimizer = torch.optim.Adam([weights, unused], eps=0.1)
    assert adam_epsilon_share(optimizer) == 0.0
    for _ in range(3):
        weights.grad = torch.tensor([1.0, 0.2, 0.09, 0.0])
        optimizer.step()
    assert adam_epsilon_share(optimizer) == 0.5


def test_a_diagnosis_of_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "PERIOD", 4)
    config = dataclasses.replace(PRESETS["atari"], batch_size=8, device="cpu", channels=(4, 4, 4), hidden=8)
    learner, twin = (Learner(config, IMAGES) for _ in range(2))
    twin.load(copy.deepcopy(learner.tensors()), 0, 0)
    seen, found = Diagnostics(learner), []
    for number in range(8):
        batch = random_batch(IMAGES, 8, learner.device)
        observation = batch.observation.clone()
        # A quarter of the states of each batch shows no motion.
        observation[:2] = observation[:2, :1]
        # They are sampled three times as often as stored.
        probabilities = torch.tensor([3e-3] * 2 + [1e-3] * 6, dtype=torch.float64)
        weights = torch.tensor([1.0] * 4 + [0.0] * 4)
        observed = {"observation": observation, "weights": weights, "probabilities": probabilities}
        tensors = {**batch.as_dict(), **observed}
        batch = type(batch)(8, tensors)
        found.append(seen.add(batch, learner.update(batch)))
        twin.update(batch)
        assert bool(found[-1]) == (number in (3, 7))
    first, second = found[3], found[7]
    assert "policy_churn" not in first
    assert 0 <= second["policy_churn"] <= 1
    assert 0 <= first["policy_agreement"] <= 1
    assert first["equal_frames"] == pytest.approx(0.1)
    assert first["effective_sample_size"] == 0.5
    assert parts(first, "dead_units").keys() == {"1", "2", "3", "4"}
    assert first["feature_spread"] > 0
    percentiles = parts(first, "priority_percentiles")
    assert list(percentiles) == ["0", "10", "25", "50", "75", "90", "99", "100"]
    assert list(percentiles.values()) == sorted(percentiles.values())
    # Networks are only read.
    for name, tensor in twin.tensors().items():
        assert torch.equal(tensor, learner.tensors()[name]), name


def test_the_policy_of_states_of_before_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnostics, "PERIOD", 1)
    spec = EnvironmentSpec(2, 1, (1,), "float32", 1)
    learner = Learner(small(network="mlp", publish="newest", device="cpu", learning_rate=1e-12), spec)
    seen = Diagnostics(learner)

    def diagnose(sign: float) -> dict[str, float]:
        """Of a network whose best action is 0 where `sign` times the observation is positive."""
        with torch.no_grad():
            for value in learner.network.parameters():
                value.zero_()
            learner.network.advantage.bias.copy_(torch.tensor([sign, -sign]))  # type: ignore[union-attr,operator]
        batch = random_batch(spec, 8, learner.device)
        return seen.add(batch, learner.update(batch))

    assert [diagnose(sign).get("policy_churn") for sign in (1.0, 1.0, -1.0, 1.0)] == [None, 0.0, 1.0, 1.0]


RANDOM = {
    "environment": "brought:Sampler",
    "environment_args": {"action": "several discrete"},
    "learning_rate": 1.0,
    "max_gradient_norm": 1e6,
}
"""Noise of six actions to learn from, at a rate at which every update is another policy."""


@pytest.mark.parametrize("network", ["own_networks:Spectral", "own_networks:Forgetful"])
def test_a_diagnosis_changes_nothing(network: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the power iterations of spectral norms, nor the random numbers of dropout."""
    monkeypatch.setattr(diagnostics, "PERIOD", 1)
    spec = EnvironmentSpec(2, 1, (3,), "float32", 1)
    learner = Learner(small(network=network, device="cpu"), spec)
    seen, batch = Diagnostics(learner), random_batch(spec, 8, learner.device)
    for _ in range(2):
        update = learner.update(batch)
        before, random = copy.deepcopy(learner.tensors()), torch.get_rng_state()
        assert seen.add(batch, update)
        assert torch.equal(torch.get_rng_state(), random)
        for name, tensor in learner.tensors().items():
            assert torch.equal(tensor, before[name]), name
        assert learner.network.training
        assert not learner.average.training


PLANTED: dict[str, tuple[dict[str, Any], str]] = {
    "a game that waits": (
        {"stack": 4, "environment_wrappers": ("brought:Standing",)},
        r"\d\d % of the steps show no motion in 4 frames: does the game wait for a key",
    ),
    "actors of newer weights": (
        {**RANDOM, "publish": "newest", "seed": 2},
        r"actors play with the newest weights, .* in only \d+ % of the states: publish average",
    ),
    "a restless policy": (
        {**RANDOM, "average_decay": 0.1, "network": "own_networks:Linear", "seed": 3},
        r"the best action changes in \d+ % of the states",
    ),
    "dead units": ({"network": "own_networks:Dead"}, r"100 % of the units of ReLU 1 are 0 in all states"),
    "a silent normaliser": (
        {"network": "own_networks:Silent"},
        r"times the root of its epsilon, and it multiplies noise",
    ),
    "a large epsilon": ({"adam_epsilon": 10.0}, r"above the gradients of 100 % of the weights"),
    "unequal weights": (
        {"loss": "own_networks:uneven", "priority_exponent": 1.0, "importance_exponent": 1.0},
        r"learns as much as from \d+ % of its batch, .*: a lower priority_exponent",
    ),
    "values above returns": (
        {"loss": "own_networks:optimistic", "learning_rate": 0.01},
        r"Q-values of \d+.* are above the returns that follow, [\d.]+: a lower samples_per_insert",
    ),
}
HEALTHY = small(serial=True, steps=2_000, report_steps=20, adam_epsilon=1e-5)


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes diagnoses of a small run count."""
    monkeypatch.setattr(diagnostics, "PERIOD", 20)
    for module in (train_signs, recorded_run):
        monkeypatch.setattr(module, "WARM_UP", 80)


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_cause_is_said_in_log_and_report(
    cause: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch)
    changes, sentence = PLANTED[cause]
    run = tmp_path / "run"
    local.train(dataclasses.replace(HEALTHY, **changes), run)
    assert len([line for line in caplog.messages if _is(sentence, line)]) == 1, caplog.messages
    assert any(_is(sentence, sign) for sign in read_run(run, "run", 0, silent).signs)
    assert any(_is(sentence, line) for line in write_report([run]).path.read_text().splitlines())


def _is(sentence: str, line: str) -> bool:
    return re.search(sentence, html.unescape(line)) is not None


def test_a_healthy_run_says_nothing_and_has_its_diagnoses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quick(monkeypatch)
    run = tmp_path / "run"
    result = local.train(HEALTHY, run)
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == []
    assert read_run(run, "run", 0, silent).signs == []
    diagnosed = [line for line in lines(run) if "policy_agreement" in line]
    assert result.learner_updates // 20 - RECENT <= len(diagnosed) <= result.learner_updates // 20
    assert ["policy_churn" not in line for line in diagnosed] == [True] + [False] * (len(diagnosed) - 1)
    events = EventAccumulator(str(run), size_guidance={"scalars": 0})
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"diagnostics/policy_churn", "diagnostics/adam_epsilon_share", "dead_units/1"} <= tags
    assert {"priority_percentiles/50", "diagnostics/effective_sample_size"} <= tags
    histogram = events.Histograms("priorities/new")[-1].histogram_value
    percentiles = parts(diagnosed[-1], "priority_percentiles")
    assert (histogram.min, histogram.max, histogram.bucket_limit) == (
        percentiles["0"],
        percentiles["100"],
        list(percentiles.values()),
    )
    assert histogram.bucket == [0, 10, 15, 25, 25, 15, 9, 1]
    assert "Dead units of each ReLU" in write_report([run]).path.read_text()


def test_what_a_healthy_run_of_pong_has_is_no_sign() -> None:
    """Few of its first filters see anything, and its Q-values fall from 0 towards the returns."""
    pong = {"q_predicted": -0.58, "return_discounted": -2.17, "policy_churn": 0.59}
    pong |= {"dead_units/1": 0.75, "dead_units/2": 0.28, "dead_units/3": 0.1, "dead_units/4": 0.02}
    assert train_signs.signs(pong, small()) == {}
    assert list(train_signs.signs({**pong, "dead_units/3": 0.3}, small())) == ["dead_units/3"]


def test_a_sign_is_said_once_and_of_several_values() -> None:
    line = {**recorded().line(), "equal_frames": 0.5, "learner_updates": 4_000}
    signs = SignsOfRun(small())
    said = [signs.add(line) for _ in range(2 * RECENT)]
    assert [len(new) for new in said] == [0] * (RECENT - 1) + [1] + [0] * RECENT
    assert said[RECENT - 1][0].startswith("50 % of the steps show no motion")
