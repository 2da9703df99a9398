"""An update as a CUDA graph: one launch in place of some 160, which take most of the time of an update.

A graph repeats its kernels on the same memory. So the batch is copied into static tensors, and whatever else an update
reads and writes keeps its address: parameters, moments, rates, sums of metrics.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from innet_drl.structures import map_leaves
from innet_drl.torch_batches import TorchBatch

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Updates before the capture. In the first ones PyTorch makes the optimizer's moments, and its libraries choose their
kernels."""


class Graph(Protocol):
    """Work that was recorded once."""

    def replay(self) -> Tensor:
        """Does the work again; returns its result, at the same address each time."""


class CudaGraph:
    """The kernels that a function launches. Recording does not run them."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Threads that evaluate or copy batches may allocate meanwhile.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._result = function()

    def replay(self) -> Tensor:
        """Launches the kernels."""
        self._graph.replay()
        return self._result


class StaticBatch:
    """A copy of a batch at addresses that stay."""

    def __init__(self, batch: TorchBatch) -> None:
        self._layout, sources = _memory(batch)
        self._copies = [torch.empty_like(source) for source in sources]
        places = iter(self._layout)

        def copy_of(tensor: Tensor) -> Tensor:
            number, dtype, shape, strides, offset = next(places)
            empty = torch.empty(0, dtype=dtype, device=tensor.device)
            return empty.set_(self._copies[number].untyped_storage(), offset, shape, strides)

        self.batch = TorchBatch(len(batch), map_leaves(copy_of, _tensors(batch)))

    def fill(self, batch: TorchBatch) -> bool:
        """Copies a batch, in one copy if its tensors share their memory; `False` if they are laid out differently."""
        layout, sources = _memory(batch)
        if layout != self._layout or any(a.shape != b.shape for a, b in zip(self._copies, sources, strict=True)):
            return False
        torch._foreach_copy_(self._copies, sources)
        return True


def _tensors(batch: TorchBatch) -> dict[str, Any]:
    """The tensors of a batch; its ids are a NumPy array."""
    return {name: value for name, value in batch.items() if name != "ids"}


def _memory(batch: TorchBatch) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """The place of each tensor (piece of memory, dtype, shape, strides, offset), and the bytes of each piece."""
    pieces: dict[int, tuple[int, Tensor]] = {}
    layout: list[tuple[Any, ...]] = []

    def add(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (place := storage.data_ptr()) not in pieces:
            piece = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pieces[place] = (len(pieces), piece)
        layout.append((pieces[place][0], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))

    map_leaves(add, _tensors(batch))
    return layout, [piece for _, piece in pieces.values()]


class CapturedUpdate:
    """Calls an update's function: directly at first, then as a graph.

    Args:
        update: Computes on the learner's device, from tensors that keep their addresses and a batch; returns [B].
        make: Makes the graph, by default of CUDA.
    """

    def __init__(
        self, update: Callable[[TorchBatch], Tensor], make: Callable[[Callable[[], Tensor]], Graph] = CudaGraph
    ) -> None:
        self._update = update
        self._make = make
        self._calls = 0
        self._static: StaticBatch | None = None
        self._graph: Graph | None = None
        self.reason: str | None = None
        """Why updates are not captured; `None` if they are, or will be."""
        self.quiet = False
        """Whether nothing is logged, for measurements."""

    def __call__(self, batch: TorchBatch) -> Tensor:
        """Runs the update."""
        if self._graph is not None and self._static is not None:
            return self._graph.replay() if self._static.fill(batch) else self._update(batch)
        if self.reason is not None:
            return self._update(batch)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._warm_up(batch)
        self._static = static = StaticBatch(batch)
        try:
            graph = self._make(lambda: self._update(static.batch))
        except RuntimeError as error:
            self._refuse(str(error).splitlines()[0])
            return self._update(batch)
        self._graph = graph
        if not self.quiet:
            logger.info("an update is one CUDA graph")
        static.fill(batch)
        return graph.replay()

    def _warm_up(self, batch: TorchBatch) -> Tensor:
        if self._calls < WARM_UP:
            return _beside(batch, self._update)
        # The first updates may check results of a user's loss; the last one is as those that follow.
        with _Watch() as watch:
            result = _beside(batch, self._update)
        if watch.found is not None:
            self._refuse(watch.found)
        return result

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        if not self.quiet:
            logger.warning(f"an update is not one CUDA graph, and takes several times as long: {reason}")


def _beside(batch: TorchBatch, update: Callable[[TorchBatch], Tensor]) -> Tensor:
    """Runs an update on a stream of its own, as the updates before a capture have to."""
    device = batch.weights.device
    if device.type == "cpu":
        return update(batch)
    stream, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = update(batch)
    current.wait_stream(stream)
    result.record_stream(current)
    return result


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first call that no graph can repeat: it waits for the device, or its result's shape needs data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and (
            {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags)
            or _reads_back(args, result)
        ):
            self.found = f"{func.name().removeprefix('aten::')} at {_caller()} waits for the device"
        return result


def _reads_back(args: Any, result: Any) -> bool:
    """Whether a call copies from the device to the processor."""
    on_device = any(isinstance(arg, Tensor) and arg.device.type != "cpu" for arg in args)
    return on_device and isinstance(result, Tensor) and result.device.type == "cpu"


def _caller() -> str:
    """The innermost line outside PyTorch and this file."""
    torch_files = str(Path(torch.__file__).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(torch_files) and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
