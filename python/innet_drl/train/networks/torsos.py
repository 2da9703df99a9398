"""Torsos: features of images, of vectors, and of dictionaries of both."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, cat, nn
from torch.nn import functional


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
