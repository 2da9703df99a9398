"""Asynchronous training: every worker has a replica of the weights, and does not wait for the slowest gradient.

A worker computes a gradient of its weights, contributes it to the job, and applies the updates received meanwhile. An
update is the mean of any H gradients; all workers apply the same updates in the same order, so the replicas stay equal
bit for bit. A gradient whose weights are more than S updates old is dropped and counted. A worker that is too far
behind, like a new worker, pulls weights and optimizer state of a later update from the server, where the workers
publish them in turn (Li et al., 2019, describe the scheme for a switch).
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import innet_drl as innet
from innet_drl.errors import BehindError, ConfigError, DeadlineError, ReplicaError

KEPT_DIGESTS = 16
"""Number of a replica's last digests kept for comparison with other replicas."""
POLL_SECONDS = 0.02
"""Period at which a replica polls the server for weights and digests of other replicas."""
REPUBLISH_SECONDS = 0.5
"""Period at which a waiting replica checks that older weights have not replaced its published ones."""


@dataclass(frozen=True)
class Contributions:
    """Counters of one worker's gradients."""

    offered: int
    """Gradients contributed to the job."""
    counted: int
    """Gradients that updates include completely."""
    dropped: int
    """Gradients that were older than the staleness bound, at least in part."""
    late_segments: int
    """Segments of gradients that missed an update and are in a later one."""
    dropped_segments: int
    """Dropped segments of gradients."""
    restarts: int
    """How often this worker pulled the weights because it was too far behind."""


class Replica:
    """One worker's copy of the weights in an asynchronous job. Use it as a context manager.

    Only `step` may change the model's parameters or the optimizer's state. Buffers, such as the statistics of batch
    normalization, are not shared.

    Args:
        model: Model with parameters of float32.
        optimizer: Optimizer of the model's parameters; deterministic, and with the same settings in every worker.
        address: `innet://host:port` or `innets://host:port` of a server with `--gradients`.
        job: The job's name: equal in all workers, and different for each run.
        worker: This worker's number, from 0.
        workers: Number of workers, at most 64.
        updates: Updates after which the job ends; `None` for no end.
        staleness: Largest age of a gradient's weights, in updates (S).
        threshold: Gradients of an update (H); `None` is half of the workers, rounded up.
        apply: Applies the mean in the parameters' `grad`, and may clip it; `None` is `optimizer.step`.
        check_period: Updates between comparisons of the replicas; 0 for none.
        publish_period: Updates between publications of the weights; `None` is S + 1.
        deadline: Seconds that an operation may wait for other workers or the server: more than H gradients take.
        resume: An earlier job of this server, whose newest weights replace worker 0's own.
        token: As in `innet_drl.connect`.
        tls_ca: As in `innet_drl.connect`.

    Raises:
        innet_drl.ReplayError: The server cannot be reached, takes no gradients, or refuses the job; there are no
            weights of the job to resume.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        address: str,
        job: str,
        *,
        worker: int,
        workers: int,
        updates: int | None = None,
        staleness: int = 3,
        threshold: int | None = None,
        apply: Callable[[], object] | None = None,
        check_period: int = 100,
        publish_period: int | None = None,
        deadline: float = 30.0,
        resume: str | None = None,
        token: str | None = None,
        tls_ca: str | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.updates = updates
        self._apply = apply or optimizer.step
        self._check_period = check_period
        self._publish_period = staleness + 1 if publish_period is None else publish_period
        if self._publish_period < 1:
            raise ConfigError(f"publish_period {publish_period}: it is at least 1")
        self._deadline = deadline
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if any(parameter.dtype != torch.float32 for parameter in self._parameters):
            raise ConfigError("a replica's parameters are float32: convert the model with model.float()")
        sizes = [parameter.numel() for parameter in self._parameters]
        values = sum(sizes)
        self._gradient = np.zeros(values, np.float32)
        self._mean = np.zeros(values, np.float32)
        self._gradient_parts = torch.split(torch.from_numpy(self._gradient), sizes)
        self._mean_parts = torch.split(torch.from_numpy(self._mean), sizes)
        with contextlib.ExitStack() as stack:
            # The server answers these requests at once, so that no grace is needed.
            connection = innet.connect(address, token=token, tls_ca=tls_ca, timeout=deadline, grace=0)
            server = stack.enter_context(connection)
            self._board = _Board(server, job, worker, workers)
            self._updates = stack.enter_context(
                server.follow_gradients(
                    job,
                    worker,
                    workers,
                    values=values,
                    threshold=-(-workers // 2) if threshold is None else threshold,
                    staleness=staleness,
                    updates=updates,
                    name=f"replica {worker}",
                    deadline=deadline,
                )
            )
            self._begin(resume)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the job."""
        self._stack.close()

    @property
    def index(self) -> int:
        """Number of updates applied to the weights."""
        return self._updates.index

    @property
    def finished(self) -> bool:
        """Whether the job's last update has been applied."""
        return self.updates is not None and self.index >= self.updates

    @property
    def contributions(self) -> Contributions:
        """Counters of this worker's gradients."""
        return Contributions(**self._updates.contributions())

    def step(self) -> None:
        """Contributes the parameters' `grad`, computed at the current weights, and applies the received updates.

        Waits only until the previous gradient is in the sums.

        Raises:
            innet_drl.errors.GradientError: The job failed; the message names missing workers.
            innet_drl.errors.ReplicaError: Replicas differ.
            innet_drl.errors.DeadlineError: No update was completed in time.
        """
        index = self.index
        for parameter, part in zip(self._parameters, self._gradient_parts, strict=True):
            if parameter.grad is None:
                raise ConfigError(
                    "a parameter has no gradient: call backward() before step(), on a loss of all parameters"
                )
            part.copy_(parameter.grad.reshape(-1))
        while not self.finished:
            self._apply_updates()
            if self.finished or self._updates.offer(self._gradient, index):
                break
            self._wait(for_gradient=True)
        self._apply_updates()

    def finish(self) -> None:
        """Applies the job's updates up to its last one, and compares the replicas.

        Raises:
            innet_drl.errors.ConfigError: The job has no end: `updates` is `None`.
            innet_drl.errors.GradientError: The job failed; the message names missing workers.
            innet_drl.errors.ReplicaError: Replicas differ.
            innet_drl.errors.DeadlineError: A replica did not reach the last update in time.
        """
        if self.updates is None:
            raise ConfigError(
                f"job {self._board.job!r} has no last update to wait for: give Replica(updates=...), or call check"
            )
        while not self.finished:
            self._apply_updates()
            if not self.finished:
                self._wait(for_gradient=False)
        self.check()

    def check(self) -> None:
        """Waits until every replica has reached this update, and compares them.

        Raises:
            innet_drl.errors.ReplicaError: Replicas differ.
            innet_drl.errors.DeadlineError: A replica did not reach this update in time.
        """
        end = time.monotonic() + self._deadline
        self._publish_digest(self._deadline)
        republish = time.monotonic() + REPUBLISH_SECONDS
        for other in range(self._board.workers):
            while self._board.compare(other, _left(end)) < self.index:
                if time.monotonic() > republish:
                    self._republish(_left(end))
                    republish = time.monotonic() + REPUBLISH_SECONDS
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"replica {other} of job {self._board.job!r} did not come to update {self.index} within "
                        f"{self._deadline:g} s"
                    )
                time.sleep(POLL_SECONDS)

    def _wait(self, *, for_gradient: bool) -> None:
        end = time.monotonic() + self._deadline
        while (left := end - time.monotonic()) > 0:
            try:
                if self._updates.wait(min(left, REPUBLISH_SECONDS), for_gradient=for_gradient):
                    return
            except BehindError:
                # `_apply_updates` receives the error again and handles it.
                return
            self._republish(_left(end))
        raise DeadlineError(
            f"update {self.index + 1} of job {self._board.job!r} did not come within {self._deadline:g} s: are there "
            "enough workers that compute gradients, and has each run a job name of its own?"
        )

    def _apply_updates(self) -> None:
        while True:
            try:
                if self._updates.take(self._mean) is None:
                    return
            except BehindError:
                self._pull(newer_than=self.index)
                continue
            for parameter, part in zip(self._parameters, self._mean_parts, strict=True):
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                parameter.grad.copy_(part.view(parameter.shape))
            self._apply()
            self._after_update()

    def _after_update(self) -> None:
        index = self.index
        end = time.monotonic() + self._deadline
        if self._check_period and index % self._check_period == 0:
            self._publish_digest(_left(end))
            for other in range(self._board.workers):
                self._board.compare(other, _left(end))
        turn, rest = divmod(index, self._publish_period)
        # Every worker publishes the last update's weights, as the worker in turn may be behind.
        if self.finished or (rest == 0 and turn % self._board.workers == self._board.worker):
            self._publish(_left(end))

    def _begin(self, resume: str | None) -> None:
        """Publishes the weights of the first replica of a job, or pulls published weights."""
        if self._board.worker != 0 or self._board.newer(self._deadline) is not None:
            self._pull(newer_than=-1)
            return
        if resume is not None:
            earlier = self._board.weights_of(resume, self._deadline)
            if earlier is None:
                raise ConfigError(f"no replica of job {resume!r} left weights at this server: begin without resume")
            self._load(earlier.tensors)
        self._publish(self._deadline)

    def _publish(self, timeout: float) -> None:
        self._board.publish({**self._tensors(), "index": np.array(self.index)}, timeout)

    def _republish(self, timeout: float) -> None:
        if self._board.is_outdated(self.index, timeout):
            self._publish(timeout)

    def _pull(self, *, newer_than: int) -> None:
        """Waits for weights of a later update, and continues from them."""
        end = time.monotonic() + self._deadline
        while True:
            published = self._board.newer(_left(end))
            if published is not None:
                self._board.known = published.version
                index = int(published.tensors["index"])
                if index > newer_than:
                    self._load(published.tensors)
                    if index > self.index:
                        self._updates.restart(index)
                    return
            if time.monotonic() > end:
                raise DeadlineError(
                    f"no replica of job {self._board.job!r} left weights of an update after {newer_than} within "
                    f"{self._deadline:g} s: start worker 0, or raise the staleness bound where updates are so fast "
                    "that a worker is behind again before it has pulled the weights"
                )
            time.sleep(POLL_SECONDS)

    def _tensors(self) -> dict[str, NDArray[Any]]:
        state = self.optimizer.state_dict()["state"]
        model = {f"model.{name}": _array(value) for name, value in self.model.named_parameters()}
        moments = {
            f"optimizer.{index}.{name}": _array(value)
            for index, values in state.items()
            for name, value in values.items()
            if value is not None
        }
        return model | moments

    def _load(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        state = self.optimizer.state_dict()
        state["state"] = {}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(torch.tensor(tensors[f"model.{name}"]))
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "optimizer":
                number, moment = rest.split(".", 1)
                state["state"].setdefault(int(number), {})[moment] = torch.tensor(value)
        self.optimizer.load_state_dict(state)

    def _publish_digest(self, timeout: float) -> None:
        digest = hashlib.sha256()
        for parameter in self._parameters:
            digest.update(_array(parameter).tobytes())
        self._board.publish_digest(self.index, digest.digest(), timeout)


class _Board:
    """Weights and digests that the replicas of a job publish at the server for each other."""

    def __init__(self, server: innet.Replay, job: str, worker: int, workers: int) -> None:
        self.job, self.worker, self.workers = job, worker, workers
        self.known = 0
        """Version of the published weights that this worker pulled or published last."""
        self._server = server
        # Version and update of the newest published weights seen but not pulled.
        self._seen = (0, 0)
        self._digests: dict[int, bytes] = {}

    def weights_of(self, job: str, timeout: float, newer_than: int = 0) -> innet.Parameters | None:
        return self._get(f"{job}.weights", timeout, newer_than)

    def _get(self, name: str, timeout: float, newer_than: int = 0) -> innet.Parameters | None:
        # Another worker may publish them later, and `get_parameters` warns of a name that it does not know.
        known = newer_than > 0 or name in self._server.parameters(timeout=timeout)
        return self._server.get_parameters(name, newer_than=newer_than, timeout=timeout) if known else None

    def publish(self, tensors: dict[str, NDArray[Any]], timeout: float) -> None:
        self.known = self._server.put_parameters(f"{self.job}.weights", tensors, timeout=timeout)

    def newer(self, timeout: float) -> innet.Parameters | None:
        """Returns published weights, unless they are a version that this worker has pulled or published."""
        return self.weights_of(self.job, timeout, self.known)

    def is_outdated(self, index: int, timeout: float) -> bool:
        """Whether a slower replica has replaced the weights of this one, which are of update `index`, by older ones.

        Unless this one publishes again, a deadlock is possible: that replica waits for newer weights while all others
        wait for it.
        """
        published = self.weights_of(self.job, timeout, max(self.known, self._seen[0]))
        if published is not None:
            self._seen = published.version, int(published.tensors["index"])
        version, seen = self._seen
        return version > self.known and seen < index

    def publish_digest(self, index: int, digest: bytes, timeout: float) -> None:
        self._digests[index] = digest
        for old in list(itertools.islice(self._digests, max(0, len(self._digests) - KEPT_DIGESTS))):
            del self._digests[old]
        tensors = {"index": np.array(index), "digest": np.frombuffer(digest, np.uint8)}
        self._server.put_parameters(f"{self.job}.digest.{self.worker}", tensors, timeout=timeout)

    def compare(self, other: int, timeout: float) -> int:
        """Compares a replica's newest digest with this one's; returns its update, or -1 if there is none."""
        published = self._get(f"{self.job}.digest.{other}", timeout)
        if published is None:
            return -1
        index = int(published.tensors["index"])
        ours = self._digests.get(index)
        if ours is not None and ours != published.tensors["digest"].tobytes():
            raise ReplicaError(
                f"replicas {self.worker} and {other} of job {self.job!r} have other weights after update {index}: "
                "something but Replica.step changed them, or their optimizers, torch releases or processors compute "
                "differently"
            )
        return index


def _left(end: float) -> float:
    """Returns the seconds until `end`, and at least enough for an answer."""
    return max(POLL_SECONDS, end - time.monotonic())


def _array(value: Any) -> NDArray[Any]:
    if isinstance(value, Tensor):
        return value.detach().cpu().contiguous().numpy()
    return np.array(value)
