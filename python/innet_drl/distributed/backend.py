"""The `torch.distributed` backend `innet`: sums of float32 go through the network's aggregator, all else through Gloo.

    import innet_drl.distributed
    torch.distributed.init_process_group("cpu:innet")             # or "cpu:innet,cuda:nccl"

The environment says where the server is (`docs/distributed.md` has the variables). A process group is a job of its
own, whose name its first rank draws and shares through the store; its workers join with their first sum. Like Gloo,
it may be used from one thread at a time, and in the same order by all ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from concurrent.futures import Future as Result
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Backend as C10DBackend
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, ReduceOp, Store, Work
from torch.futures import Future

import innet_drl as innet
from innet_drl.distributed.hook import summed
from innet_drl.errors import ConfigError

NAME = "innet"
ADDRESS = "INNET_GRADIENTS"
"""Environment variable with the server's address."""
TLS_CA = "INNET_TLS_CA"
"""Environment variable with the certificate of its authority, a PEM file, for `innets://`."""
RACK = "INNET_RACK"
"""Environment variable with the name of this rank's rack: ranks of one rack have one server, below that of all."""

HANDED_OVER = (
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce_coalesced",
    "allreduce_sparse",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "scatter",
    "send",
)
"""Collectives that Gloo does."""


class SumWork(Work):
    """A sum under way, in the backend's own thread."""

    def __init__(self, result: Result[None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the sum.

        Raises:
            innet_drl.ReplayError: It came to nothing.
        """
        self._result.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        """Whether it has come to an end, be it a failure."""
        return self._result.done()

    def is_success(self) -> bool:
        """Whether the tensors hold the sum."""
        return self._result.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """What it came to in place of a sum; `None` while it is under way."""
        if self._result.cancelled():
            return CancelledError("the process group was aborted before this sum began")
        return self._result.exception() if self._result.done() else None

    def result(self) -> list[Tensor]:
        """The tensors, once they hold the sum: waits for it, and raises as `wait` does."""
        self.wait()
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        """The tensors, once they hold the sum. A failure is a RuntimeError with the error's text, as torch has it."""
        done: Future[None] = Future()

        def tensors(_: Future[None]) -> list[Tensor]:
            self._result.result()
            return self._tensors

        self._result.add_done_callback(lambda _: done.set_result(None))
        return done.then(tensors)


class InnetBackend(C10DBackend):
    """A process group's backend: see the module.

    Args:
        store: Shared by the group's ranks, and by nobody else.
        rank: This rank.
        size: Their number.
        timeout: Of each operation.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        try:
            super().__init__(rank, size)
        except TypeError as error:
            raise RuntimeError(
                f"torch {torch.__version__} takes no backends written in Python: install a newer one, or register "
                "the communication hook (innet_drl.distributed.hook) on a group of Gloo"
            ) from error
        self._store = PrefixStore("innet/", store)
        self._timeout = timeout
        self._address = os.environ.get(ADDRESS, "").strip()
        if not self._address:
            raise ConfigError(
                f"the backend {NAME!r} needs a server that sums gradients: start innet-replay serve --gradients "
                f"HOST:PORT, and set {ADDRESS}=innet://host:port, its address for clients"
            )
        self._gloo = ProcessGroupGloo(PrefixStore("gloo/", store), rank, size, timeout=timeout)
        self._options = C10DBackend.Options(NAME, timeout=timeout)
        if rank == 0:
            self._store.set("job", secrets.token_hex(8))
        self._rack = os.environ.get(RACK, "").strip()
        self._store.set(f"rack/{rank}", self._rack)
        self._connection: innet.Replay | None = None
        self._worker: innet.GradientWorker | None = None
        # One thread: sums go in the order of the calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="innet-sums")

    @property
    def options(self) -> C10DBackend.Options:
        """Name and timeout."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """`innet`."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Sums or means of float32 through the network, anything else through Gloo."""
        operation = opts.reduceOp
        operation = getattr(operation, "op", operation)
        if operation not in (ReduceOp.SUM, ReduceOp.AVG) or not all(map(_is_ours, tensors)):
            return self._gloo.allreduce(tensors, opts)  # type: ignore[attr-defined, no-any-return]
        mean = operation == ReduceOp.AVG
        seconds = min((limit for limit in (opts.timeout, self._timeout) if limit > timedelta(0)), default=self._timeout)
        result = self._thread.submit(self._sum, tensors, mean, seconds.total_seconds())
        return SumWork(result, tensors)

    def _sum(self, tensors: list[Tensor], mean: bool, deadline: float) -> None:
        worker = self._joined()
        for tensor in tensors:
            if tensor.is_contiguous():
                summed(worker, tensor, mean=mean, deadline=deadline)
            else:
                with torch.no_grad():
                    tensor.copy_(summed(worker, tensor.contiguous(), mean=mean, deadline=deadline))

    def _joined(self) -> innet.GradientWorker:
        if self._worker is None:
            job = self._store.get("job").decode()
            racks = [self._store.get(f"rack/{rank}").decode() for rank in range(self.size())]
            if self._connection is None:
                tls_ca = os.environ.get(TLS_CA, "").strip() or None
                self._connection = innet.connect(self._address, tls_ca=tls_ca, timeout=self._timeout.total_seconds())
            self._worker = self._connection.join_gradients(
                job,
                racks[: self.rank()].count(self._rack),
                racks.count(self._rack),
                world=self.size(),
                name=f"rank {self.rank()}",
                deadline=self._timeout.total_seconds(),
            )
        return self._worker

    def shutdown(self) -> None:
        """Ends what is under way, and leaves the job."""
        self._thread.shutdown()
        worker, connection = self._worker, self._connection
        self._worker = self._connection = None
        with contextlib.ExitStack() as stack:
            if connection is not None:
                stack.callback(connection.close)
            if worker is not None:
                worker.leave()

    def abort(self) -> None:
        """Begins nothing more. What is under way ends at its deadline at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_ours(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _handed_over(name: str) -> Callable[..., Work]:
    def collective(self: InnetBackend, *arguments: Any) -> Work:
        work: Work = getattr(self._gloo, name)(*arguments)
        return work

    collective.__name__ = name
    collective.__doc__ = "As Gloo does it."
    return collective


for _name in HANDED_OVER:
    # Releases of torch differ in which there are.
    if hasattr(ProcessGroupGloo, _name):
        setattr(InnetBackend, _name, _handed_over(_name))


def register() -> None:
    """Makes the backend known to `torch.distributed`, once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, InnetBackend, devices=["cpu"])
