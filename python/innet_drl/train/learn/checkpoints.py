"""Checkpoint files: networks and optimizer as safetensors, counters in the file's metadata."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innet_drl.train.errors import RunFolderError
from innet_drl.train.files import replacing

if TYPE_CHECKING:
    # The command line reads a run's settings before it imports torch.
    from torch import Tensor, nn


@dataclass(frozen=True)
class Checkpoint:
    """Contents of a checkpoint."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    """Counters, as plain JSON values."""


def save_checkpoint(path: Path, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
    """Writes a checkpoint atomically, by a temporary file and a rename."""
    import safetensors.torch

    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    counters = json.dumps(state)
    content = safetensors.torch.save(whole, {"state": counters, "crc32": str(_checksum(whole, counters))})
    with replacing(path, durable=True) as file:
        file.write_bytes(content)


def load_checkpoint(path: Path) -> Checkpoint:
    """Reads a checkpoint."""
    import safetensors

    try:
        with safetensors.safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            metadata = file.metadata()
            state = json.loads(metadata["state"])
        if int(metadata["crc32"]) != _checksum(tensors, metadata["state"]):
            raise ValueError("its checksum differs: the disk or a copy of the file is damaged")
    except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        raise RunFolderError(
            f"the checkpoint {path} cannot be read ({error}): remove it to use the one before"
        ) from error
    return Checkpoint(path, tensors, state)


def _checksum(tensors: dict[str, Tensor], counters: str) -> int:
    import torch

    checksum = zlib.crc32(counters.encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(name.encode(), checksum)
        # As bytes, as NumPy has no bfloat16. The copy has stride 1, which a view of a single value may lack.
        flat = torch.empty(tensors[name].numel(), dtype=tensors[name].dtype).copy_(tensors[name].flatten())
        checksum = zlib.crc32(flat.view(torch.uint8).numpy().data, checksum)
    return checksum


def load_network(network: nn.Module, prefix: str, checkpoint: Mapping[str, Tensor]) -> None:
    """Loads a network from the tensors with this prefix in a checkpoint."""
    saved, own = under(prefix, checkpoint), network.state_dict()
    other = [name for name in sorted(saved.keys() | own.keys()) if _shape(saved, name) != _shape(own, name)]
    if other:
        raise RunFolderError(
            "the checkpoint is of another network than the run's settings make: they differ in "
            f"{', '.join(other[:4])}{' and others' if len(other) > 4 else ''}. Continue with the release or module "
            "that wrote it, or train anew with another folder"
        )
    network.load_state_dict(saved)


def _shape(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors whose names start with a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
