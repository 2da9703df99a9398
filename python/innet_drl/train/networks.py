"""Q-networks: the convolutional one for frames, a small one for vectors, both with a dueling head.

The network of `breakout-paper` (32-64-64 filters, two streams of 512) has 3,292,837 parameters for 4 actions: the
13.17 MB of Furukawa and Matsutani (2022).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from innet_drl.train.config import Config
from innet_drl.train.environments import EnvironmentSpec


class ConvolutionTorso(nn.Module):
    """Three convolutions (Mnih et al., 2015) over uint8 frames [B, stack, 84, 84]; returns [B, features]."""

    def __init__(self, stack: int, channels: tuple[int, int, int], height: int = 84, width: int = 84) -> None:
        super().__init__()
        self.first = nn.Conv2d(stack, channels[0], 8, 4)
        self.second = nn.Conv2d(channels[0], channels[1], 4, 2)
        self.third = nn.Conv2d(channels[1], channels[2], 3, 1)
        rows, columns = (((size - 8) // 4 + 1 - 4) // 2 + 1 - 2 for size in (height, width))
        self.features = rows * columns * channels[2]

    def forward(self, frames: Tensor) -> Tensor:
        """Computes features of frames of 0 to 255 in a floating dtype."""
        # The weights of the first layer are scaled in place of the 28,224 pixels of each sample.
        scaled = functional.conv2d(frames, self.first.weight / 255.0, self.first.bias, stride=4)
        hidden = functional.relu(self.second(functional.relu(scaled)))
        return functional.relu(self.third(hidden)).flatten(1)


class VectorTorso(nn.Module):
    """Linear layers over vectors [B, inputs]; returns [B, features]."""

    def __init__(self, inputs: int, layers: tuple[int, ...]) -> None:
        super().__init__()
        widths = (inputs, *layers)
        self.linears = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.features = widths[-1]

    def forward(self, vectors: Tensor) -> Tensor:
        """Computes features of float vectors."""
        for linear in self.linears:
            vectors = functional.relu(linear(vectors))
        return vectors


class QNetwork(nn.Module):
    """A torso under a dueling head: Q = V + A - mean(A) (Wang et al., 2016, equation 9)."""

    def __init__(self, torso: ConvolutionTorso | VectorTorso, hidden: int, actions: int, layer_norm: bool) -> None:
        super().__init__()
        self.torso = torso
        self.features_norm = nn.LayerNorm(torso.features) if layer_norm else nn.Identity()
        self.hidden_norm = nn.LayerNorm(2 * hidden) if layer_norm else nn.Identity()
        # The hidden layers of both streams are one matrix, whose first half is the value stream's.
        self.streams = nn.Linear(torso.features, 2 * hidden)
        self.value = nn.Linear(hidden, 1)
        self.advantage = nn.Linear(hidden, actions)

    def forward(self, observation: Tensor) -> Tensor:
        """Computes Q-values [B, actions] of observations [B, *observation_shape]: uint8 frames or float vectors."""
        hidden = self._hidden(observation)
        # bfloat16 has 8 bits of precision: Q-values of 8 to 16 would be multiples of 1/16, and the best action a tie.
        with torch.autocast(hidden.device.type, enabled=False):
            value_stream, advantage_stream = hidden.float().chunk(2, dim=1)
            advantage = self.advantage(advantage_stream)
            q: Tensor = self.value(value_stream) + advantage - advantage.mean(1, keepdim=True)
        return q

    def _hidden(self, observation: Tensor) -> Tensor:
        floats = observation if observation.is_floating_point() else observation.float()
        return functional.relu(self.hidden_norm(self.streams(self.features_norm(self.torso(floats)))))


def make_network(config: Config, spec: EnvironmentSpec) -> QNetwork:
    """Makes the configured network for an environment, with fresh weights."""
    if len(spec.frame_shape) == 2:
        torso: ConvolutionTorso | VectorTorso = ConvolutionTorso(spec.stack, config.channels, *spec.frame_shape)
    else:
        torso = VectorTorso(spec.frame_shape[0], config.layers)
    return QNetwork(torso, config.hidden, spec.actions, config.layer_norm)


def q_values(network: nn.Module, observation: NDArray[Any]) -> NDArray[np.float32]:
    """Q-values of observations, computed on the network's device."""
    device = next(network.parameters()).device
    with torch.inference_mode():
        q: NDArray[np.float32] = network(torch.from_numpy(observation).to(device)).float().cpu().numpy()
    return q


_UPDATES = "updates"
"""Name of the published tensor that counts the learner's updates."""


def published(network: QNetwork, updates: int) -> dict[str, NDArray[Any]]:
    """A network's tensors as the learner publishes them, with the number of updates that made them."""
    tensors = {name: value.cpu().contiguous().numpy() for name, value in network.state_dict().items()}
    return {**tensors, _UPDATES: np.array(updates, np.int64)}


def load_published(network: QNetwork, tensors: Mapping[str, NDArray[Any]]) -> int:
    """Loads what `published` returned, and returns the number of updates."""
    network.load_state_dict({name: torch.tensor(value) for name, value in tensors.items() if name != _UPDATES})
    return int(tensors[_UPDATES])
