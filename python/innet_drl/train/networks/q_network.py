"""Q-networks with a dueling head, over the torsos of `torsos`.

The network of `breakout-paper` (32-64-64 filters, two streams of 512) has 3,292,837 parameters for 4 actions: the
13.17 MB of Furukawa and Matsutani (2022).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from innet_drl.train.networks.torsos import Torso

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
