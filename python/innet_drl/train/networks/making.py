"""The configured network of an environment, and its published parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from innet_drl.structures import map_leaves
from innet_drl.train.environments import Arrays, EnvironmentSpec, Part
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.losses import Loss, make_loss
from innet_drl.train.networks.q_network import (
    ConvolutionTorso,
    DictTorso,
    ImpalaTorso,
    Network,
    QNetwork,
    Torso,
    UserNetwork,
    VectorTorso,
)
from innet_drl.train.settings import importing
from innet_drl.train.settings.slices import NetworkSettings


def make_network(config: NetworkSettings, spec: EnvironmentSpec) -> Network:
    """Makes the configured network for an environment, with fresh weights."""
    loss = make_loss(config)
    network: Network
    if callable(config.network) or importing.is_path(config.network):
        network = UserNetwork(_user_module(config, spec))
        network.read = reader(spec)
        _check(network, loss, config, spec)
    else:
        torso = _torso(config, spec)
        network = QNetwork(torso, config.hidden, spec.actions, config.layer_norm, loss.outputs or 1)
        network.read = reader(spec)
    if loss.outputs != 1:
        network.q_of = loss.q
    return network


def reader(spec: EnvironmentSpec) -> Callable[[Any], Any] | None:
    """Returns the conversion of observations `[B, *observation_shape]` for networks; `None` for no conversion.

    The parts of an observation become a dictionary.
    """
    if spec.parts:
        return lambda observation: {
            part.name: values.reshape(len(values), *part.stacked(spec.stack))
            for part, values in zip(spec.parts, observation, strict=True)
        }
    shape = spec.arrays[0].stacked(spec.stack)
    if shape == spec.observation_shape:
        return None
    return lambda observation: observation.reshape(len(observation), *shape)


def _torso(config: NetworkSettings, spec: EnvironmentSpec) -> Torso:
    name = config.network
    if bool(spec.parts) != (name == "dict") and name != "auto":
        fitting = "dict" if spec.parts else "nature, impala or mlp"
        raise _unusable(config, f"the observations are {spec.observation_space}: take {fitting}, or auto")
    if not spec.parts:
        return _torso_of(config, str(name), spec.arrays[0], spec.stack)
    return DictTorso({part.name: _torso_of(config, "auto", part, spec.stack) for part in spec.parts})


def _torso_of(config: NetworkSettings, name: str, part: Part, stack: int) -> Torso:
    """The torso of one array."""
    shape = part.stacked(stack)
    small = part.is_image and min(shape[1:]) < ConvolutionTorso.MIN_SIZE
    if name == "auto":
        name = "mlp" if not part.is_image else "impala" if small else "nature"
    if name == "mlp":
        return VectorTorso(int(np.prod(shape)), config.layers, part.scale)
    if not part.is_image:
        raise _unusable(config, f"it is for images, and the observations are vectors {shape}: take mlp")
    if name == "impala":
        return ImpalaTorso(shape[0], config.channels, shape[1], shape[2], scale=part.scale)
    if small:
        needs = f"it needs images of at least {ConvolutionTorso.MIN_SIZE} pixels, and these are {shape[1]}x{shape[2]}"
        advice = "take impala or mlp, or larger images (frame_size, of Atari games)"
        raise _unusable(config, f"{needs}: {advice}")
    return ConvolutionTorso(shape[0], config.channels, shape[1], shape[2], scale=part.scale)


def has_blocks(config: NetworkSettings, spec: EnvironmentSpec) -> bool:
    """Whether the configured network takes images as `space_to_depth` returns them."""
    if not spec.is_image or config.network not in ("auto", "nature"):
        return False
    shape = spec.arrays[0].stacked(spec.stack)
    return (
        spec.frame_dtype == "uint8"
        and shape == spec.observation_shape
        and min(shape[1:]) >= ConvolutionTorso.MIN_SIZE
        and all(size % 4 == 0 for size in shape[1:])
    )


def _user_module(config: NetworkSettings, spec: EnvironmentSpec) -> nn.Module:
    made = importing.load(config.network, "network")
    if isinstance(made, nn.Module):
        raise _unusable(
            config,
            "it is an object: give its class, or a function that makes it, which is called with (observation space, "
            "number of actions, config)",
        )
    try:
        module = made(spec.observation_space, spec.actions, config)
    except Exception as error:
        parts = (
            "; observations are dictionaries: each part has a shape, the space itself has none" if spec.parts else ""
        )
        called = f"called with ({spec.observation_space}, {spec.actions}, config)"
        raise _unusable(config, f"{called} it raises {type(error).__name__}: {error}{parts}") from error
    if not isinstance(module, nn.Module):
        raise _unusable(config, f"it returned {type(module).__name__}, and has to return a torch.nn.Module")
    return module


def _unusable(config: NetworkSettings, reason: str) -> ConfigurationError:
    """The error of a network that cannot be used."""
    return ConfigurationError(f"network {importing.path_of(config.network)}: {reason}")


def _check(network: Network, loss: Loss, config: NetworkSettings, spec: EnvironmentSpec) -> None:
    """Compares the shape of a user's network's outputs with the shape that the loss reads."""
    batch = 2
    zeros = spec.make(lambda part: torch.zeros((batch, *part.observed(spec.stack)), dtype=getattr(torch, part.dtype)))
    network.eval()
    try:
        with torch.no_grad():
            outputs: Any = network(zeros)
    except Exception as error:
        on = f"on two observations of {spec.observation_space}"
        raise _unusable(config, f"{on} it raises {type(error).__name__}: {error}") from error
    network.train()
    found = tuple(outputs.shape)
    expected = (batch, spec.actions) if loss.outputs == 1 else (batch, spec.actions, loss.outputs or "any number")
    if found != expected and not (loss.outputs is None and found[:2] == expected[:2] and len(found) in (2, 3)):
        names = "(batch, actions)" if loss.outputs == 1 else "(batch, actions, outputs for each action)"
        reason = (
            f"for {batch} observations it returned the shape {found}, and loss {importing.path_of(config.loss)} reads "
            f"{expected}: {names}"
        )
        raise _unusable(config, reason)


def q_values(network: nn.Module, observation: Arrays) -> NDArray[np.float32]:
    """Q-values of observations, computed on the network's device."""
    device = next(network.parameters()).device
    compute = network.q if isinstance(network, Network) else network
    tensors = map_leaves(lambda array: torch.from_numpy(array).to(device), observation)
    with torch.inference_mode():
        q: NDArray[np.float32] = compute(tensors).float().cpu().numpy()
    return q


_UPDATES = "updates"
"""Name of the published tensor that counts the learner's updates."""


def published(network: nn.Module, updates: int) -> dict[str, NDArray[Any]]:
    """Returns a network's tensors for publication, with the learner's number of updates."""
    tensors = {name: value.cpu().contiguous().numpy() for name, value in network.state_dict().items()}
    return {**tensors, _UPDATES: np.array(updates, np.int64)}


def load_published(network: nn.Module, tensors: Mapping[str, NDArray[Any]]) -> int:
    """Loads the arrays of `published`, and returns the number of updates."""
    network.load_state_dict({name: torch.tensor(value) for name, value in tensors.items() if name != _UPDATES})
    return int(tensors[_UPDATES])
