"""A communication hook for `DistributedDataParallel`, which averages each bucket in the network.

DDP calls the hook with its buckets in the same order in every process, and each bucket is one round of the job. The
hook is synchronous, so that `backward()` raises the errors of `innet_drl.errors`.
"""

# No `from __future__ import annotations` here: DDP compares the hook's annotations with classes.

from types import TracebackType
from typing import Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

import innet_drl as innet
from innet_drl.gradients import GradientWorker

NARROW = (torch.float16, torch.bfloat16)
"""Types narrower than float32: their gradients are widened exactly, summed, and rounded back."""


class State:
    """The state of the hook, which holds a worker of a job. Use it as a context manager, or `close` it.

    Args:
        worker: The worker, which must have no other user.
        deadline: Seconds that a bucket may wait for the other workers; `None` is the job's deadline.
    """

    def __init__(self, worker: GradientWorker, *, deadline: float | None = None) -> None:
        self.worker = worker
        self.deadline = deadline
        self._connection: innet.Replay | None = None
        self._staging: dict[torch.device, Tensor] = {}

    @classmethod
    def join(
        cls,
        address: str,
        job: str,
        *,
        worker: int | None = None,
        workers: int | None = None,
        world: int | None = None,
        arithmetic: Literal["float32", "fixed"] = "float32",
        deadline: float = 30.0,
        token: str | None = None,
        tls_ca: str | None = None,
    ) -> Self:
        """Connects to a server and joins a job there.

        Args:
            address: `innet://host:port` or `innets://host:port` of a server with `--gradients`.
            job: The job's name, the same in all workers and used by no other job.
            worker: This worker's number, from 0; `None` is the rank in the default process group.
            workers: Number of workers; `None` is the size of that group.
            world: Number of workers at all servers, if the server is one of several below another: `worker` and
                `workers` then count the workers of this server. `None` is `workers`.
            arithmetic: `float32`, or `fixed`, whose sums do not depend on the order of arrival.
            deadline: Seconds that an operation may wait for a worker.
            token: As in `innet_drl.connect`.
            tls_ca: As in `innet_drl.connect`.

        Raises:
            innet_drl.ReplayError: The server cannot be reached, takes no gradients, or refuses the job.
        """
        number = dist.get_rank() if worker is None else worker
        count = dist.get_world_size() if workers is None else workers
        # The display name is the global rank; the worker's number may differ within its server.
        name = f"rank {dist.get_rank() if dist.is_initialized() else number}"
        connection = innet.connect(address, token=token, tls_ca=tls_ca, timeout=deadline)
        try:
            joined = connection.join_gradients(
                job, number, count, world=world, name=name, arithmetic=arithmetic, deadline=deadline
            )
        except BaseException:
            connection.close()
            raise
        state = cls(joined)
        state._connection = connection
        return state

    def close(self) -> None:
        """Leaves the job."""
        self.__exit__(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exception: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        try:
            # After an exception in the block, leaving must not wait.
            self.worker.__exit__(kind, exception, traceback)
        finally:
            if self._connection is not None:
                self._connection.close()

    def mean(self, values: Tensor) -> Tensor:
        """Replaces values by their mean over all workers, and returns them.

        Args:
            values: float32, float16 or bfloat16 of any shape, contiguous, on any device; as many in all workers.

        Raises:
            TypeError: Another dtype.
            innet_drl.ReplayError: The mean failed.
        """
        return summed(self.worker, values, mean=True, deadline=self.deadline, staging=self._staging)


def hook(state: State, bucket: GradBucket) -> Future[Tensor]:
    """Returns the mean of a bucket: for `model.register_comm_hook(state, hook)`."""
    buffer = bucket.buffer()
    on_device: list[int | str | torch.device] = [] if buffer.device.type == "cpu" else [buffer.device]
    future: Future[Tensor] = Future(devices=on_device)
    future.set_result(state.mean(buffer))
    return future


def summed(
    worker: GradientWorker,
    values: Tensor,
    *,
    mean: bool,
    deadline: float | None = None,
    staging: dict[torch.device, Tensor] | None = None,
) -> Tensor:
    """Replaces values by their sum or mean over all workers, and returns them.

    Args:
        worker: Worker of the job.
        values: float32, float16 or bfloat16, contiguous, on any device.
        mean: Divide by the number of workers.
        deadline: Seconds; `None` is the job's deadline.
        staging: Page-locked buffers by device, kept between calls.

    Raises:
        TypeError: Another dtype.
        innet_drl.ReplayError: The sum failed.
    """
    if values.dtype == torch.float32 and values.device.type == "cpu":
        worker.sum(values.detach().numpy(), mean=mean, deadline=deadline)
        return values
    if values.dtype != torch.float32 and values.dtype not in NARROW:
        raise TypeError(
            f"{values.dtype} would be rounded to float32 in the network: train in float32, float16 or bfloat16 "
            "(model.float()), or leave these gradients to another backend"
        )
    here = _staged(values, {} if staging is None else staging)
    # The copy from a GPU synchronizes with the kernels that write the values; so does the copy back.
    here.copy_(values.detach())
    worker.sum(here.numpy(), mean=mean, deadline=deadline)
    with torch.no_grad():
        values.copy_(here)
    return values


def _staged(values: Tensor, staging: dict[torch.device, Tensor]) -> Tensor:
    """Returns a float32 buffer on the CPU of the shape of the values; page-locked if they are on a GPU."""
    kept = staging.get(values.device)
    if kept is None or kept.numel() < values.numel():
        kept = torch.empty(values.numel(), dtype=torch.float32, pin_memory=values.device.type == "cuda")
        staging[values.device] = kept
    return kept[: values.numel()].view(values.shape)
