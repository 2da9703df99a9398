"""Networks from observations to the inputs of the loss: torsos under a dueling head, and modules of users.

The network of `breakout-paper` (32-64-64 filters, two streams of 512) has 3,292,837 parameters for 4 actions: the
13.17 MB of Furukawa and Matsutani (2022).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, cat, nn
from torch.nn import functional

from innet_drl.structures import map_leaves
from innet_drl.train.environments import Arrays, EnvironmentSpec, Part
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.losses import Loss, make_loss
from innet_drl.train.settings.slices import NetworkSettings
from innet_drl.train.settings.values import is_path, load, path_of


def floating(values: Tensor) -> Tensor:
    """Converts values to float32 unless their dtype is floating."""
    return values if values.is_floating_point() else values.float()


def space_to_depth(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Converts blocks of 4x4 pixels to channels, so that a convolution of 8x8 with stride 4 becomes one of 2x2.

    Matrix units need many input channels, and a stack of frames has only four.

    Args:
        images: Bytes [B, channels, height, width]; height and width are multiples of 4.
        dtype: Floating dtype of the result.

    Returns:
        [B, 16 * channels, height / 4, width / 4] in channels-last; channels in the order image, row, column.
    """
    batch, channels, height, width = images.shape
    # Moves the four bytes of a block's row together.
    words = images.contiguous().view(torch.int32).view(batch, channels, height // 4, 4, width // 4)
    blocks = words.permute(0, 2, 4, 1, 3).contiguous().view(torch.uint8)
    return blocks.view(batch, height // 4, width // 4, 16 * channels).to(dtype).permute(0, 3, 1, 2)


class ConvolutionTorso(nn.Module):
    """Three convolutions (Mnih et al., 2015) over images [B, stack, height, width]; returns [B, features].

    Images may be results of `space_to_depth`: the first convolution is then equivalent to one of 2x2.
    """

    MIN_SIZE = 36
    """Smallest height and width for which the third convolution has an input of its size."""

    def __init__(
        self, stack: int, channels: tuple[int, int, int], height: int = 84, width: int = 84, scale: float = 255.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.first = nn.Conv2d(stack, channels[0], 8, 4)
        self.second = nn.Conv2d(channels[0], channels[1], 4, 2)
        self.third = nn.Conv2d(channels[1], channels[2], 3, 1)
        rows, columns = (((size - 8) // 4 + 1 - 4) // 2 + 1 - 2 for size in (height, width))
        self.features: int = rows * columns * channels[2]

    def forward(self, frames: Tensor) -> Tensor:
        """Computes features of images of 0 to `scale`."""
        # Scales the weights of the first layer instead of the 28,224 pixels of each sample.
        weight, stride = self.first.weight / self.scale, 4
        filters, channels = weight.shape[:2]
        if frames.shape[1] == 16 * channels:
            blocks = weight.view(filters, channels, 2, 4, 2, 4).permute(0, 1, 3, 5, 2, 4)
            weight, stride = blocks.reshape(filters, 16 * channels, 2, 2), 1
        scaled = functional.conv2d(floating(frames), weight, self.first.bias, stride=stride)
        hidden = functional.relu(self.second(functional.relu(scaled)))
        return functional.relu(self.third(hidden)).flatten(1)


class VectorTorso(nn.Module):
    """Linear layers over vectors [B, inputs], or flattened images; returns [B, features]."""

    def __init__(self, inputs: int, layers: tuple[int, ...], scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        widths = (inputs, *layers)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.features: int = widths[-1]

    def forward(self, vectors: Tensor) -> Tensor:
        """Computes features of values of up to `scale`."""
        vectors = floating(vectors).flatten(1)
        if self.scale != 1.0:
            vectors = vectors / self.scale
        for linear in self.linears:
            vectors = functional.relu(linear(vectors))
        return vectors


class ResidualBlock(nn.Module):
    """Two convolutions with a skip connection (Espeholt et al., 2018, figure 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # Identities keep the names of the weights in earlier checkpoints.
        first, second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.layers = nn.Sequential(nn.Identity(), nn.ReLU(), first, nn.Identity(), nn.ReLU(), second)

    def forward(self, images: Tensor) -> Tensor:
        """Adds the block's result to its input [B, channels, height, width]."""
        added: Tensor = images + self.layers(images)
        return added


class ImpalaTorso(nn.Module):
    """Three sections of a convolution, a pooling and two residual blocks, for images of any size.

    The network of Espeholt et al. (2018), figure 3, with a final pooling to 6x6, which makes the head independent of
    the image's size (Clark et al., 2024, "Beyond the Rainbow").
    """

    def __init__(
        self, stack: int, channels: tuple[int, int, int], height: int, width: int, scale: float = 255.0
    ) -> None:
        super().__init__()
        self.scale = scale
        self.entries = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in itertools.pairwise((stack, *channels))
        )
        self.blocks = nn.ModuleList(nn.Sequential(ResidualBlock(count), ResidualBlock(count)) for count in channels)
        # Each of the three poolings halves the size, rounded up.
        pooled = tuple(min(6, -(-size // 8)) for size in (height, width))
        self.pool = nn.AdaptiveMaxPool2d(pooled)
        self.features: int = pooled[0] * pooled[1] * channels[-1]

    def forward(self, images: Tensor) -> Tensor:
        """Computes features of images of 0 to `scale`."""
        hidden = floating(images) / self.scale
        for entry, blocks in zip(self.entries, self.blocks, strict=True):
            hidden = blocks(functional.max_pool2d(entry(hidden), 3, 2, 1))
        return functional.relu(self.pool(hidden)).flatten(1)


class DictTorso(nn.Module):
    """A torso for each key of a dictionary, with concatenated features."""

    def __init__(self, torsos: Mapping[str, Torso]) -> None:
        super().__init__()
        self.keys = tuple(torsos)
        # Module names must not have dots.
        self.torsos = nn.ModuleList(torsos.values())
        self.features: int = sum(torso.features for torso in torsos.values())

    def forward(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Computes features of a dictionary of images and vectors."""
        return cat([torso(parts[key]) for key, torso in zip(self.keys, self.torsos, strict=True)], 1)


Torso = ConvolutionTorso | ImpalaTorso | VectorTorso | DictTorso


OUTPUT_GAIN = 0.1
"""Gain of the output layers, for small initial Q-values."""


def _orthogonal(layer: nn.Module) -> None:
    """Initialises a layer before a ReLU (Saxe et al., 2014), as PyTorch's default leaves dead filters."""
    if isinstance(layer, nn.Conv2d | nn.Linear):
        nn.init.orthogonal_(layer.weight, nn.init.calculate_gain("relu"))
        if layer.bias is not None:
            nn.init.zeros_(layer.bias)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread: rounding in a decomposition depends on threads, and learners need equal weights."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class Network(nn.Module):
    """A network of actors and learners: outputs `[B, actions]` or `[B, actions, outputs]` of observations.

    `make_network` sets how observations of the memory are read, and how outputs become Q-values.
    """

    read: Callable[[Tensor], Any] | None = None
    """Converts observations of the memory to inputs of the network; `None` for no conversion."""
    q_of: Callable[[Tensor], Tensor] | None = None
    """Converts outputs to Q-values [B, actions]; `None` if they are Q-values already."""

    def q(self, observation: Tensor) -> Tensor:
        """Computes Q-values [B, actions] of observations of the memory."""
        outputs: Tensor = self(observation)
        return outputs if self.q_of is None else self.q_of(outputs)


class QNetwork(Network):
    """A torso under a dueling head: Q = V + A - mean(A) (Wang et al., 2016, equation 9).

    Args:
        torso: Features of observations.
        hidden: Units of each stream.
        actions: Number of actions.
        layer_norm: Normalise the hidden units of the head, but not its inputs, whose spread may be below the
            normaliser's epsilon for millions of steps.
        outputs: Numbers for each action: 1, or the atoms or quantiles of a distribution.
    """

    def __init__(self, torso: Torso, hidden: int, actions: int, layer_norm: bool, outputs: int = 1) -> None:
        super().__init__()
        self.torso = torso
        self.shape = (-1, actions, outputs)
        self.hidden_norm = nn.LayerNorm(2 * hidden) if layer_norm else nn.Identity()
        # One matrix has the hidden layers of both streams; its first half is the value stream's.
        self.streams = nn.Linear(torso.features, 2 * hidden)
        self.value = nn.Linear(hidden, outputs)
        self.advantage = nn.Linear(hidden, actions * outputs)
        with _one_thread():
            self.apply(_orthogonal)
            for output in (self.value, self.advantage):
                nn.init.orthogonal_(output.weight, OUTPUT_GAIN)

    def forward(self, observation: Tensor) -> Tensor:
        """Computes outputs [B, actions], or [B, actions, outputs], of observations of the memory."""
        if self.read is not None:
            observation = self.read(observation)
        hidden = functional.relu(self.hidden_norm(self.streams(self.torso(observation))))
        # In bfloat16, with 8 bits of precision, Q-values of 8 to 16 are multiples of 1/16, and best actions tie.
        with torch.autocast(hidden.device.type, enabled=False):
            value_stream, advantage_stream = hidden.float().chunk(2, dim=1)
            advantage = self.advantage(advantage_stream)
            value = self.value(value_stream)
            if self.shape[-1] > 1:
                advantage, value = advantage.view(self.shape), value.unsqueeze(1)
            q: Tensor = value + advantage - advantage.mean(1, keepdim=True)
        return q


class UserNetwork(Network):
    """A user's module, which receives float32 tensors.

    Args:
        module: Maps observations [B, ...], or a dictionary of them, to outputs [B, actions] or [B, actions, outputs].
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, observation: Tensor) -> Tensor:
        """Computes the module's outputs of observations of the memory, in float32."""
        given: Any = observation if self.read is None else self.read(observation)
        floats = {key: part.float() for key, part in given.items()} if isinstance(given, dict) else given.float()
        outputs: Tensor = self.module(floats)
        return outputs.float()


def make_network(config: NetworkSettings, spec: EnvironmentSpec) -> Network:
    """Makes the configured network for an environment, with fresh weights."""
    loss = make_loss(config)
    network: Network
    if callable(config.network) or is_path(config.network):
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
    made = load(config.network, "network")
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
    return ConfigurationError(f"network {path_of(config.network)}: {reason}")


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
            f"for {batch} observations it returned the shape {found}, and loss {path_of(config.loss)} reads "
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
