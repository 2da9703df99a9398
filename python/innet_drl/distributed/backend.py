"""The `torch.distributed` backend `innet`: float32 all-reduce in the aggregator, all other collectives by Gloo.

    import innet_drl.distributed
    torch.distributed.init_process_group("cpu:innet")             # or "cpu:innet,cuda:nccl"

Environment variables name the server (see `docs/how-to/data-parallel.md`). Each process group is a job. Its first rank
chooses the job's name and shares it through the store; workers join at their first sum. As with Gloo, one thread at a
time may use a group, and all ranks must call its collectives in the same order.
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
from innet_drl.gradients import GradientWorker

NAME = "innet"
ADDRESS = "INNET_GRADIENTS"
"""Environment variable with the server's address."""
TLS_CA = "INNET_TLS_CA"
"""Environment variable with the PEM file of the server's certificate authority, for `innets://`."""
RACK = "INNET_RACK"
"""Environment variable with the rack of this rank: ranks of a rack share a server below a common parent."""


class SumWork(Work):
    """A sum in progress in the backend's thread."""

    def __init__(self, result: Result[None], tensors: list[Tensor]) -> None:
        super().__init__()
        self._result = result
        self._tensors = tensors

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the sum.

        Raises:
            innet_drl.ReplayError: The sum failed.
        """
        self._result.result(timeout.total_seconds() or None)
        return True

    def is_completed(self) -> bool:
        """Whether the sum has finished or failed."""
        return self._result.done()

    def is_success(self) -> bool:
        """Whether the tensors hold the sum."""
        return self._result.done() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Returns the error of a failed sum; `None` while it is in progress or after success."""
        if self._result.cancelled():
            return CancelledError("the process group was aborted before this sum began")
        return self._result.exception() if self._result.done() else None

    def result(self) -> list[Tensor]:
        """Waits as `wait` does, and returns the tensors, which hold the sum."""
        self.wait()
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        """Returns a future of the tensors. torch turns an error into a RuntimeError with its text."""
        done: Future[None] = Future()

        def tensors(_: Future[None]) -> list[Tensor]:
            self._result.result()
            return self._tensors

        self._result.add_done_callback(lambda _: done.set_result(None))
        return done.then(tensors)


class InnetBackend(C10DBackend):
    """The backend of a process group; see the module."""

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
        self._worker: GradientWorker | None = None
        # A single thread keeps the order of the calls.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="innet-sums")

    @property
    def options(self) -> C10DBackend.Options:
        """Name and timeout."""
        return self._options

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """`innet`."""
        return NAME

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        """Sums or averages float32 in the network, and forwards other operations to Gloo."""
        operation = opts.reduceOp
        operation = getattr(operation, "op", operation)
        if operation not in (ReduceOp.SUM, ReduceOp.AVG) or not all(map(_is_supported, tensors)):
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

    def _joined(self) -> GradientWorker:
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
        """Finishes operations in progress, and leaves the job."""
        self._thread.shutdown()
        worker, connection = self._worker, self._connection
        self._worker = self._connection = None
        with contextlib.ExitStack() as stack:
            if connection is not None:
                stack.callback(connection.close)
            if worker is not None:
                worker.leave()

    def abort(self) -> None:
        """Cancels waiting operations. An operation in progress ends at its deadline at the latest."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_supported(tensor: Tensor) -> bool:
    return tensor.dtype == torch.float32 and tensor.device.type == "cpu" and tensor.layout == torch.strided


def _gloo_collective(name: str) -> Callable[..., Work]:
    def collective(self: InnetBackend, *arguments: Any) -> Work:
        work: Work = getattr(self._gloo, name)(*arguments)
        return work

    collective.__name__ = name
    collective.__doc__ = "Forwards to Gloo."
    return collective


# The set of collectives depends on the release of torch: they are the methods that return a Work.
for _name in dir(C10DBackend):
    if (getattr(C10DBackend, _name).__doc__ or "").endswith("Work\n") and _name not in vars(InnetBackend):
        setattr(InnetBackend, _name, _gloo_collective(_name))


def register() -> None:
    """Registers the backend at `torch.distributed`, once."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, InnetBackend, devices=["cpu"])
