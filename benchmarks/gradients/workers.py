"""A worker's process: a member of every system, for sums and trainings."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from benchmarks.gradients import parameter_server
from benchmarks.gradients.links import MACHINE_DEVICE, enter
from benchmarks.gradients.losses import lose

Values = NDArray[np.float32]

RACKS, ASYNC, NO_SUM = "innet-racks", "innet-async", "no-sum"
"""Systems: two levels of servers, workers that do not wait for each other, and workers that only compute."""
TOLERANCE = 1e-5
"""Allowed error of a sum, relative to the largest value."""


@dataclass(frozen=True)
class Place:
    """A worker's number, and where it finds the servers."""

    rank: int
    workers: int
    namespace: str | None
    """Network namespace; `None` for the machine's."""
    server: str
    """URL of the innet-replay server."""
    racks: int
    """Number of racks. Worker n is in rack n modulo `racks`."""
    rack_server: str
    """URL of the server of the worker's rack, if there are racks."""
    parameter_server: str
    """Address of the parameter server."""
    store: str
    """File of Gloo's rendezvous."""


@dataclass(frozen=True)
class Trial:
    """A series of sums of one vector by one system."""

    system: str
    bytes: int
    loss: float | None
    """Share of lost datagrams, with GRO off; `None` for no loss, with GRO on (`losses.lose`)."""
    count: int


@dataclass(frozen=True)
class Training:
    """A training with gradients summed by one system."""

    system: str
    bytes: int
    """Size of the gradient."""
    goal: float
    seconds: float
    job: str
    """Name of the asynchronous job, different for each training."""
    seed: int
    """Seed of networks and environments, with the worker's number."""


def work(place: Place, pipe: Connection) -> None:
    """The main function of a worker."""
    enter(place.namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if place.namespace is None else MACHINE_DEVICE
    with contextlib.ExitStack() as running:
        sums = _Sums(place, running)
        pipe.send("ready")
        while True:
            order: Trial | Training = pipe.recv()
            if isinstance(order, Trial):
                pipe.send(_time(order, sums.of(order.system, order.loss), place.rank, place.workers))
            else:
                from benchmarks.gradients import training

                lose(None, os.getpid())
                pipe.send(training.train(order, place, None if order.system == ASYNC else sums.of(order.system)))


def _time(trial: Trial, sum_once: Callable[[Values], Any], rank: int, workers: int) -> tuple[list[float], float]:
    """Returns the seconds of each sum, and the processor time of all."""
    # After the join, which opens the socket.
    lose(trial.loss, os.getpid())
    given = _values(rank, trial.bytes)
    values = given.copy()
    seconds, cpu = [], 0.0
    # The first sum is not timed, because it waits for workers that received the trial later.
    for number in range(trial.count + 1):
        np.copyto(values, given)
        began, cpu_began = time.perf_counter(), time.process_time()
        sum_once(values)
        if number:
            seconds.append(time.perf_counter() - began)
            cpu += time.process_time() - cpu_began
    expected = np.sum([_values(each, trial.bytes) for each in range(workers)], axis=0, dtype=np.float64)
    if not np.allclose(values, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()):
        raise SystemExit(f"{trial.system} gave a wrong sum of {trial.bytes} bytes")
    return seconds, cpu


class _Sums:
    """A worker's connections to all systems."""

    def __init__(self, place: Place, running: contextlib.ExitStack) -> None:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        torch.set_num_threads(1)
        store = FileStore(place.store, place.workers)
        dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.workers)
        running.callback(dist.destroy_process_group)
        self._all_reduce = lambda values: dist.all_reduce(torch.from_numpy(values))
        self._parameters = parameter_server.ParameterWorker(place.parameter_server)
        running.callback(self._parameters.close)
        self._place, self._running = place, running
        self._joined: dict[tuple[str, float | None], Any] = {}

    def of(self, system: str, loss: float | None = None) -> Callable[[Values], Any]:
        """Returns a function that replaces values by their sum over all workers."""
        match system:
            case "gloo":
                return self._all_reduce
            case "parameter-server":
                return self._parameters.sum
            case "no-sum":
                return lambda values: None
        if (system, loss) not in self._joined:
            self._joined[system, loss] = self._join(system, loss)
        return self._joined[system, loss].sum  # type: ignore[no-any-return]

    def _join(self, system: str, loss: float | None) -> Any:
        """Joins the system's job."""
        place, server, number, workers = self._place, self._place.server, self._place.rank, self._place.workers
        if system == RACKS:
            server, number = place.rack_server, place.rank // place.racks
            workers = len(range(place.rank % place.racks, place.workers, place.racks))
        replay = self._running.enter_context(innet.connect(server))
        arithmetic: Literal["float32", "fixed"] = "fixed" if system == "innet-fixed" else "float32"
        job = f"bench-{system}-{loss}"
        return self._running.enter_context(
            replay.join_gradients(job, number, workers, world=place.workers, arithmetic=arithmetic)
        )


@functools.lru_cache(maxsize=64)
def _values(rank: int, size: int) -> Values:
    return np.random.default_rng(rank).standard_normal(size // 4, np.float32)
