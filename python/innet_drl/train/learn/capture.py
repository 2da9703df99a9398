"""An update as a CUDA graph: one launch in place of some 160, which take most of the time of an update.

A graph repeats its kernels on the same memory. So the batch is copied into static tensors, and whatever else an update
reads and writes keeps its address: parameters, moments, rates, sums of metrics.
"""

from __future__ import annotations

import contextlib
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
MOST_LAYOUTS = 4
"""Layouts of batches that get a graph each: stacks that overlap in memory are laid out in another way than a batch with
a window that ends early."""


class Graph(Protocol):
    """Work that was recorded once."""

    def replay(self) -> Tensor:
        """Does the work again; returns its result, at the same address each time."""


class CudaGraph:
    """The kernels that a function launches. Recording does not run them."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            # The threads of autograd, and of copies to the device, may allocate meanwhile.
            with torch.cuda.graph(self._graph, pool, capture_error_mode="thread_local"):
                self._result = function()
        except BaseException:
            # A failed capture leaves the allocator in the graph's pool, where freed memory is never used again.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            raise

    def replay(self) -> Tensor:
        """Launches the kernels."""
        self._graph.replay()
        return self._result


class StaticBatch:
    """A copy of a batch at addresses that stay."""

    def __init__(self, batch: TorchBatch) -> None:
        self.layout, sources = _memory(batch)
        self._copies = [torch.empty_like(source) for source in sources]
        places = iter(self.layout)

        def copy_of(tensor: Tensor) -> Tensor:
            number, dtype, shape, strides, offset = next(places)
            empty = torch.empty(0, dtype=dtype, device=tensor.device)
            return empty.set_(self._copies[number].untyped_storage(), offset, shape, strides)

        self.batch = TorchBatch(len(batch), map_leaves(copy_of, _tensors(batch)))

    def fill(self, pieces: list[Tensor]) -> None:
        """Copies the pieces of memory of a batch of this layout: one, if its tensors share their memory."""
        torch._foreach_copy_(self._copies, pieces)


def _tensors(batch: TorchBatch) -> dict[str, Any]:
    """The tensors of a batch; its ids are a NumPy array."""
    return {name: value for name, value in batch.items() if name != "ids"}


def _memory(batch: TorchBatch) -> tuple[list[tuple[Any, ...]], list[Tensor]]:
    """The layout of a batch, and its pieces of memory as bytes.

    The layout has the place of each tensor (piece, dtype, shape, strides, offset), then the size of each piece.
    """
    pieces: dict[int, tuple[int, Tensor]] = {}
    layout: list[tuple[Any, ...]] = []

    def add(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if (address := storage.data_ptr()) not in pieces:
            piece = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            pieces[address] = (len(pieces), piece)
        layout.append((pieces[address][0], tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()))

    map_leaves(add, _tensors(batch))
    found = [piece for _, piece in pieces.values()]
    return [*layout, *((len(piece),) for piece in found)], found


class CapturedUpdate:
    """Calls an update's function: directly at first, then as a graph for each layout of batches.

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
        self._stream: torch.cuda.Stream | None = None
        self._graphs: list[tuple[StaticBatch, Graph]] = []
        self.reason: str | None = None
        """Why some updates are not captured; `None` if all are, or will be."""
        self.quiet = False
        """Whether nothing is logged, for measurements."""

    def __call__(self, batch: TorchBatch) -> Tensor:
        """Runs the update."""
        if self._graphs:
            layout, pieces = _memory(batch)
            for static, graph in self._graphs:
                if static.layout == layout:
                    static.fill(pieces)
                    return graph.replay()
        if self.reason is not None:
            return self._update(batch)
        self._calls += 1
        if self._calls <= WARM_UP:
            return self._warm_up(batch)
        if len(self._graphs) == MOST_LAYOUTS:
            self._refuse(f"batches have more than {MOST_LAYOUTS} layouts")
            return self._update(batch)
        static = StaticBatch(batch)
        try:
            graph = self._make(lambda: self._update(static.batch))
        except Exception as error:
            # The end of a failed capture raises an error of its own.
            cause = error.__context__ or error
            self._refuse(f"{str(cause).splitlines()[0]} at {_caller(traceback.extract_tb(cause.__traceback__))}")
            return self._update(batch)
        if not self._graphs and not self.quiet:
            logger.info("an update is one CUDA graph")
        self._graphs.append((static, graph))
        static.fill(_memory(batch)[1])
        return graph.replay()

    def _warm_up(self, batch: TorchBatch) -> Tensor:
        if self._calls < WARM_UP:
            return self._on_side_stream(batch)
        # The first updates may check results of a user's loss; the last one is as those that follow.
        with _Watch() as watch:
            result = self._on_side_stream(batch)
        if watch.found is not None:
            self._refuse(watch.found)
        return result

    def _on_side_stream(self, batch: TorchBatch) -> Tensor:
        """Runs an update on a stream of its own, as the updates before a capture have to."""
        device = batch.weights.device
        if device.type == "cpu":
            return self._update(batch)
        current = torch.cuda.current_stream(device)
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = self._update(batch)
        current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def _refuse(self, reason: str) -> None:
        self.reason = reason
        if not self.quiet:
            logger.warning(f"not every update is one CUDA graph, others take several times as long: {reason}")


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Finds the first call that no graph can repeat: it waits for the device, or its result's shape needs data."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.found is None and (_needs_data(func, args) or _changes_device(func, args, result)):
            line = _caller(traceback.extract_stack())
            self.found = f"{func.name().removeprefix('aten::')} at {line} waits for the device"
        return result


def _needs_data(func: Any, args: Any) -> bool:
    """Whether the result, or its shape, has to be known on the processor."""
    if func.name() == "aten::index.Tensor":
        # With integers as indices the shape is known.
        return any(isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _changes_device(func: Any, args: Any, result: Any) -> bool:
    """Whether a call copies between the device and the processor."""
    tensors = [each for each in (*args, result) if isinstance(each, Tensor)]
    return func.name() in ("aten::_to_copy", "aten::copy_") and len({each.device.type for each in tensors}) > 1


def _caller(frames: traceback.StackSummary) -> str:
    """The innermost line outside PyTorch and this file."""
    torch_files = str(Path(torch.__file__).parent)
    for frame in reversed(frames):
        if not frame.filename.startswith(torch_files) and frame.filename != __file__:
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown line"
