"""Torch tensors: the argument `device` of `Replay.sample`, `Replay.batches` and `Replay.get_parameters`.

On the CPU the tensors share the memory of the NumPy arrays. For a CUDA device a batch is decoded into
page-locked memory, which is copied at once; frames that `observation` and `next_observation` share are copied once.
`TorchBatches` copies on a stream of its own, from the moment a batch is decoded, while the device computes.
"""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from innet_drl import _core
from innet_drl.errors import ConfigError, naming_extras
from innet_drl.ragged import Ragged, _of_memory
from innet_drl.structures import at_index, map_leaves

with naming_extras():
    import torch

logger = logging.getLogger(__name__)

__all__ = ["TorchBatch", "TorchBatches", "lender", "tensor_on", "to_device", "torch_device", "upload_to"]


# `device.type` takes 7 µs between two batches, as long as all other work of `to_device`; a comparison of devices 0.1.
_CPU = torch.device("cpu")


def torch_device(device: str | torch.device) -> torch.device:
    """Returns the device that an argument names.

    Raises:
        ConfigError: An unknown device, or one that this machine lacks.
    """
    if device == "cpu" or device == _CPU:
        return _CPU
    try:
        found = torch.device(device)
        # Counting devices takes longer than a batch.
        if found.type == "cuda" and (found.index or 0) >= (devices := torch.cuda.device_count()):
            raise RuntimeError(f"torch finds {devices or 'no'} CUDA device{'s' * (devices > 1)} on this machine")
    except (RuntimeError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f'device is None, "cpu", "cuda", "cuda:1" or a torch.device, got {device!r}: {reason}'
        ) from None
    return found


@functools.cache
def lender(device: torch.device) -> Callable[[int], NDArray[np.uint8] | None] | None:
    """Returns what lends memory for the batches of a device, by bytes; None where the core's own memory serves."""
    return _page_locked if device.type == "cuda" else None


_refused = False
"""Whether page-locked memory was refused, which is logged once."""


def _page_locked(size: int) -> NDArray[np.uint8] | None:
    """Page-locked memory, which a GPU copies by itself while the program continues; None if the system refuses it."""
    global _refused
    if _refused:
        return None
    try:
        return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    except RuntimeError as error:
        _refused = True
        reason = f"{size} bytes could not be page-locked: {str(error).splitlines()[0]}"
        logger.warning(f"batches are copied to the GPU from ordinary memory, which takes longer: {reason}")
    return None


def tensor_on(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """An array as a tensor, which shares its memory on the CPU."""
    return torch.from_numpy(array).to(device)


class TorchBatch:
    """A `Batch` of tensors: attributes, a mapping, and slices of items as there. Unpickled, it is on the CPU.

    `ids` stays a NumPy array on the CPU, where `Replay.update_priorities` takes it.
    """

    __slots__ = ("__weakref__", "_arrays", "_items", "_lease")

    ids: NDArray[np.uint64]

    def __init__(self, items: int, arrays: Mapping[str, Any], lease: _core._Lease | None = None) -> None:
        self._items = items
        self._arrays = arrays
        self._lease = lease

    def __getattr__(self, name: str) -> Any:
        """The tensor of this name, or a dictionary or tuple of them."""
        # `copy` and `pickle` look attributes up before there are arrays.
        arrays = {} if name in TorchBatch.__slots__ else self._arrays
        if name not in arrays:
            raise AttributeError(f"this batch has no array {name!r}; it has {', '.join(arrays)}")
        return arrays[name]

    def __getitem__(self, key: str | slice) -> Any:
        """The tensor of a name, or a batch of some of the items."""
        if isinstance(key, slice):
            items = range(self._items)[key]
            if items.step < 1:
                raise TypeError("the step of a slice of a batch is 1 or more")
            return TorchBatch(len(items), at_index(self._arrays, key))
        if key not in self._arrays:
            raise KeyError(f"this batch has no array {key!r}; it has {', '.join(self._arrays)}")
        return self._arrays[key]

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def acknowledge(self, timeout: float | None = 60.0) -> None:
        """As `Batch.acknowledge`."""
        if self._lease is None:
            raise ConfigError(
                "this batch has no lease: acknowledge whole batches of an iterator with acknowledge=True, no parts and "
                "no copies"
            )
        self._lease._acknowledge(timeout)

    def keys(self) -> KeysView[str]:
        """Names of the arrays, so that `**batch` passes them."""
        return self._arrays.keys()

    def values(self) -> ValuesView[Any]:
        """The tensors and structures of them."""
        return self._arrays.values()

    def items(self) -> ItemsView[str, Any]:
        """Names and tensors, or structures of them."""
        return self._arrays.items()

    def get(self, name: str, default: Any = None) -> Any:
        """The tensor of a name, or the default."""
        return self._arrays.get(name, default)

    def as_dict(self) -> dict[str, Any]:
        """The tensors by name, in a new dictionary."""
        return dict(self._arrays)

    def __len__(self) -> int:
        """Number of items in the batch."""
        return self._items

    def __getstate__(self) -> tuple[int, dict[str, Any]]:
        # torch pickles no tensors of uint16 to uint64, such as `ages`.
        return self._items, _map_arrays(lambda array: torch.as_tensor(array).cpu().numpy(), dict(self._arrays))

    def __setstate__(self, state: tuple[int, dict[str, Any]]) -> None:
        (self._items, arrays), self._lease = state, None
        self._arrays = {**_map_arrays(torch.from_numpy, arrays), "ids": arrays["ids"]}

    def __repr__(self) -> str:
        return f"<TorchBatch of {self._items} items: {', '.join(self._arrays)}>"


def _map_arrays(function: Callable[[Any], Any], structure: Any) -> Any:
    """A structure of the function's results for each array, also of those of a `Ragged`."""
    return map_leaves(lambda leaf: leaf._map(function) if isinstance(leaf, Ragged) else function(leaf), structure)


class TorchBatches:
    """An iterator over `TorchBatch` on one device.

    Args:
        batches: NumPy batches; closed together with this iterator.
        device: `"cpu"`, `"cuda"`, `"cuda:1"` or a `torch.device`.
        upload: `upload_to` of the device, which the batches begin their copies by.
    """

    def __init__(self, batches: _core.Batches, device: str | torch.device, upload: _Upload | None = None) -> None:
        self._batches = batches
        self._device = torch.device(device)
        self._upload = upload
        self.on_sample: Callable[[], object] | None = None
        """Hook for timers: called in `next` when the batch is there, before the wait for its copy."""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TorchBatch:
        batch = next(self._batches)
        if self.on_sample is not None:
            self.on_sample()
        if self._upload is None:
            return to_device(batch, self._device)
        tensors, *copy = batch._copied or self._upload(batch)
        self._upload.wait(*copy)
        tensors._lease = batch._lease
        return tensors

    def close(self) -> None:
        """Stops sampling ahead."""
        self._batches.close()
        if self._upload is not None:
            self._upload.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TorchBatches on {self._device}, {self._batches!r}>"


def to_device(batch: _core.Batch, device: torch.device) -> TorchBatch:
    """A batch on a device, copied at once. The call waits for the copy."""
    if device == _CPU or device.type == "cpu":
        return TorchBatch(len(batch), batch._wrapped(torch.from_numpy), batch._lease)
    flat, layout = batch._memory()
    return _tensors(batch, tensor_on(flat, device), layout)


def _tensors(batch: _core.Batch, flat: torch.Tensor, layout: list[tuple[Any, ...]]) -> TorchBatch:
    """A batch of views of its copied memory (`Batch._memory`); ids stay a NumPy array."""
    tensors: dict[str, Any] = {"ids": batch.ids}

    def tensor(dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> torch.Tensor:
        elements = (flat.numel() - offset) // dtype.itemsize
        piece = flat[offset : offset + elements * dtype.itemsize]
        return piece.view(getattr(torch, dtype.name)).as_strided(shape, strides)

    for name, dtype, shape, strides, offset, _, levels, step in layout:
        if name != "ids":
            tensors[name] = tensor(dtype, shape, strides, offset)
            if levels:
                offsets = [tensor(np.dtype(np.int64), *level) for level in levels]
                tensors[name] = _of_memory(tensors[name], offsets, step)
    return TorchBatch(len(batch), batch._nested(tensors), batch._lease)


class _Upload:
    """Copies batches to a CUDA device from where the core decoded them."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # With its number, which a thread of the core does not know.
        self._device = self._stream.device
        # Memory of batches, oldest first, with the event after its copy: the core decodes no other batch there before.
        self._sources: deque[tuple[torch.Tensor, torch.cuda.Event]] = deque()
        self._lock = threading.Lock()
        weakref.finalize(self, self._stream.synchronize)

    def __call__(self, batch: _core.Batch) -> tuple[TorchBatch, torch.Tensor, torch.cuda.Event]:
        """Begins a copy: in the thread that has decoded the batch, or in the reader's where none is decoded ahead.

        Returns:
            The batch on the device, the memory of its tensors, and the event after the copy.
        """
        flat, layout = batch._memory()
        source = torch.from_numpy(flat)
        # In a new thread device 0 is the current one: restoring its stream would make a context there.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            on_device = source.to(self._device, non_blocking=True)
        copied = self._stream.record_event()
        with self._lock:
            self._sources.append((source, copied))
            while self._sources and self._sources[0][1].query():  # type: ignore[no-untyped-call]
                self._sources.popleft()
        return _tensors(batch, on_device, layout), on_device, copied

    def wait(self, on_device: torch.Tensor, copied: torch.cuda.Event) -> None:
        """Makes the reader's stream wait for a copy."""
        reader = torch.cuda.current_stream(self._device)
        # The allocator must not reuse the memory before the reader's stream has used it.
        on_device.record_stream(reader)
        reader.wait_event(copied)

    def finish(self) -> None:
        """Waits for the copies, and releases the memory that they are from."""
        self._stream.synchronize()
        with self._lock:
            self._sources.clear()


def upload_to(device: torch.device) -> _Upload | None:
    """Returns what copies batches to a device; None where tensors share the memory of the arrays."""
    return _Upload(device) if device.type == "cuda" else None
