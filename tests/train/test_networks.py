"""Networks: sizes, the dueling head, and the scale of the input."""

import dataclasses
from typing import Literal

import pytest
import torch

from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.networks import QNetwork, VectorTorso, make_network, space_to_depth
from innet_drl.train.settings.config import PRESETS

BREAKOUT = EnvironmentSpec(4, 4, (84, 84), "uint8", 4)
CARTPOLE = EnvironmentSpec(2, 1, (4,), "float32", 1)


def parameters(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_network_of_the_paper_has_its_size() -> None:
    assert parameters(make_network(PRESETS["breakout-paper"], BREAKOUT)) == 3_292_837


def test_widths_follow_the_settings() -> None:
    narrow = make_network(PRESETS["breakout"], BREAKOUT)
    wide = make_network(dataclasses.replace(PRESETS["breakout"], hidden=512), BREAKOUT)
    assert 2 * 256 * 7 * 7 * 32 < parameters(narrow) < parameters(wide)


@pytest.mark.parametrize(
    ("preset", "spec", "dtype"), [("breakout", BREAKOUT, torch.uint8), ("cartpole", CARTPOLE, torch.float32)]
)
def test_q_values_have_one_column_for_each_action(preset: str, spec: EnvironmentSpec, dtype: torch.dtype) -> None:
    network = make_network(PRESETS[preset], spec)
    observation = torch.ones((5, *spec.observation_shape)).to(dtype)
    assert network(observation).shape == (5, spec.actions)


def test_the_advantages_have_no_mean() -> None:
    network = QNetwork(VectorTorso(3, (8,)), hidden=8, actions=4, layer_norm=False)
    observation = torch.randn(6, 3)
    hidden = torch.relu(network.streams(network.torso(observation)))
    torch.testing.assert_close(network(observation).mean(1), network.value(hidden[:, :8]).squeeze(1))


def test_frames_are_scaled_once() -> None:
    """The first layer on frames of 0 to 255 gives what it gives on frames of 0 to 1 without the scale."""
    network = make_network(PRESETS["breakout"], BREAKOUT)
    assert isinstance(network, QNetwork)
    frames = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    seen: list[torch.Tensor] = []
    network.torso.get_submodule("second").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    network(frames)
    expected = torch.relu(network.torso.get_submodule("first")(frames.float() / 255))
    torch.testing.assert_close(seen[0], expected)


def test_blocks_of_pixels_as_channels_give_the_same_values_and_gradients() -> None:
    spec = EnvironmentSpec(4, 4, (44, 60), "uint8", 4)
    network = make_network(dataclasses.replace(PRESETS["breakout"], layer_norm=False), spec)
    frames = torch.randint(0, 256, (3, 4, 44, 60), dtype=torch.uint8)
    blocks = space_to_depth(frames, torch.float32)
    assert blocks.shape == (3, 64, 11, 15)
    assert blocks.is_contiguous(memory_format=torch.channels_last)
    # Image 2, block (5, 7), row 1 and column 3 of the block.
    assert (blocks[:, 2 * 16 + 1 * 4 + 3, 5, 7] == frames[:, 2, 5 * 4 + 1, 7 * 4 + 3]).all()
    results = []
    for observation in (frames.float(), blocks):
        network.zero_grad()
        q = network(observation)
        q.square().sum().backward()
        results.append((q, [parameter.grad for parameter in network.parameters()]))
    torch.testing.assert_close(*results)


def test_normalised_hidden_units_do_not_depend_on_the_scale_of_the_features() -> None:
    torch.manual_seed(0)
    network = QNetwork(VectorTorso(3, (8,)), hidden=8, actions=4, layer_norm=True)
    observation = torch.randn(6, 3)
    before = network(observation)
    with torch.no_grad():
        for linear in network.torso.modules():
            if isinstance(linear, torch.nn.Linear):
                linear.weight.mul_(100.0)
                linear.bias.mul_(100.0)
    torch.testing.assert_close(network(observation), before, rtol=1e-3, atol=1e-3)


def test_fresh_layers_are_orthogonal_and_outputs_are_small() -> None:
    torch.manual_seed(0)
    network = make_network(PRESETS["breakout-paper"], BREAKOUT)
    assert isinstance(network, QNetwork)
    weight = network.streams.weight
    torch.testing.assert_close(weight @ weight.T, 2 * torch.eye(len(weight)), atol=1e-4, rtol=0)
    assert all((value == 0).all() for name, value in network.named_parameters() if name.endswith("bias"))
    frames = torch.randint(0, 256, (64, *BREAKOUT.observation_shape), dtype=torch.uint8)
    assert network(frames).abs().max() < 0.5


def test_q_values_are_precise_in_bfloat16() -> None:
    """A head in bfloat16 has steps of 1/16 at Q-values of 8 to 16."""
    torch.manual_seed(0)
    network = make_network(PRESETS["breakout"], BREAKOUT)
    assert isinstance(network, QNetwork)
    torch.nn.init.constant_(network.value.bias, 12.0)
    frames = torch.randint(0, 256, (64, *BREAKOUT.observation_shape), dtype=torch.uint8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        q = network(frames)
    assert q.dtype == torch.float32
    assert ((q * 16) % 1 != 0).float().mean() > 0.9


@pytest.mark.parametrize("network", ["nature", "impala"])
def test_fresh_networks_are_equal_with_any_number_of_threads(network: Literal["nature", "impala"]) -> None:
    before, made = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            torch.manual_seed(3)
            made.append(make_network(dataclasses.replace(PRESETS["atari"], network=network), BREAKOUT).state_dict())
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
