"""`python -m benchmarks gradients`: gradient all-reduce by innet-drl and other systems, in turn.

Every worker process is a member of all systems. A trial is a series of sums by one system.
`docs/reports/2026-11-22-gradients.md` defines the figures.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

import innet_drl as innet
from benchmarks import report, services
from benchmarks.crew import Crew
from benchmarks.gradients import parameter_server
from benchmarks.gradients.links import MACHINE_DEVICE, enter, links
from benchmarks.gradients.losses import lose
from benchmarks.processes import cpu_seconds

Values = NDArray[np.float32]

System = Literal["innet", "innet-fixed", "innet-memif", "gloo", "gather", "parameter-server"]
TRANSPORTS = {"innet": "kernel UDP", "innet-memif": "DPDK memif"}
"""Transport of a system's datagrams."""
TOLERANCE = 1e-5
"""Allowed error of a sum, relative to the largest value."""
MIN_SUMS, MAX_SUMS = 8, 4000
"""Bounds on the sums of a trial."""
MAX_TRAINED_BYTES = 8 << 20
"""Upper bound on the bytes of the training's gradient."""


@dataclass(frozen=True)
class Endpoints:
    """Servers that a worker connects to."""

    workers: int
    servers: list[str]
    """URL of the innet-replay server, by worker."""
    namespaces: list[str | None]
    """Network namespaces, by worker; `None` where all share the machine's."""
    parameter_server: str
    """Address of the parameter server."""
    memifs: services.Memifs | None
    """`None` if memif is not measured."""
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
    goal: float
    seconds: float


@dataclass(frozen=True)
class TrialTimes:
    """Times of one worker in a trial."""

    seconds: list[float]
    cpu_seconds: float


@dataclass(frozen=True)
class GradientsFlags:
    """The sum of learners' gradients by innet-drl, by Gloo, and by a parameter server."""

    workers: tuple[int, ...] = (2, 4, 8)
    """Numbers of workers."""
    sizes: tuple[int, ...] = (6_410_000, 3_310_000, 157_520, 40_020)
    """Bytes of a gradient; the paper has DQN, A2C, DDPG and PPO."""
    systems: tuple[System, ...] = ("innet", "innet-fixed", "gloo", "gather", "parameter-server")
    """`innet` sums float32, `innet-fixed` fixed point; `gloo` is its all-reduce, `gather` its gather and broadcast;
    `innet-memif` goes over DPDK, where it was built with it."""
    loss: tuple[float, ...] = (0.001, 0.01)
    """Shares of datagrams that `innet` loses at each end, where the kernel drops them and passes the others on one by
    one: also measured without loss. May be empty."""
    link_mbit: int = 0
    """Mbit/s of links, in network namespaces, from each worker and the parameter server to a switch, in which the
    innet-replay server runs. 0 uses loopback, which has no such limit. Needs root."""
    rounds: int = 3
    """Trials of each system."""
    seconds: float = 1.0
    """Approximate duration of a trial."""
    training_workers: int = 4
    """Number of workers that also train A2C on CartPole with each system. 0 for no training."""
    training_goal: float = 195.0
    """Mean score of the last 20 games of all workers, at which a training ends."""
    training_seconds: float = 120.0
    """Seconds after which a training ends."""


def gradients(flags: Annotated[GradientsFlags, tyro.conf.arg(name="")]) -> None:
    """The sum of learners' gradients by innet-drl, by Gloo, and by a parameter server.

    Raises:
        SystemExit: An unusable flag, a case cannot be measured, or a sum is wrong.
    """
    if flags.link_mbit and "innet-memif" in flags.systems:
        raise SystemExit("--link-mbit: leave out innet-memif, which goes another way")
    if min(flags.workers, default=0) < 1 or min(flags.sizes, default=0) < 4:
        raise SystemExit("--workers and --sizes: at least 1 worker, and vectors of at least 4 bytes")
    if not all(0 < loss < 1 for loss in flags.loss):
        raise SystemExit("--loss: shares below 1, such as 0.001 0.01")
    report.shared_cores("workers, the aggregator and the parameter server")
    for workers in flags.workers:
        with _Bench(workers, flags) as bench:
            for size in flags.sizes:
                bench.measure(4 * (size // 4))
            if workers == flags.training_workers:
                bench.train()


class _Bench:
    """The servers and workers of one number of workers."""

    def __init__(self, workers: int, flags: GradientsFlags) -> None:
        self._workers, self._flags = workers, flags
        self._running = contextlib.ExitStack()
        self._pipes: list[Connection] = []
        self._connections: dict[str, innet.Replay] = {}
        """Connections to the innet-replay servers, for their statistics."""
        self._servers: dict[str, int] = {}
        """Process ids of the servers, for their processor time."""

    def __enter__(self) -> _Bench:
        with contextlib.ExitStack() as running:
            folder = running.enter_context(tempfile.TemporaryDirectory(prefix="innet-"))
            crew = running.enter_context(Crew())
            workers = range(self._workers)
            mbit = self._flags.link_mbit
            made = running.enter_context(links(self._workers + 1, mbit)) if mbit else None
            switch = None if made is None else made.switch
            self._aggregator = running.enter_context(services.aggregator(switch))
            server, self._servers["innet"] = self._aggregator.address, self._aggregator.pid
            servers = [server if made is None else server.replace("0.0.0.0", made.switch_address(n)) for n in workers]
            # The parameter server has its own link, like a worker.
            host = ("127.0.0.1", None) if made is None else (made.address(len(workers)), made.machine(len(workers)))
            largest = max(*self._flags.sizes, MAX_TRAINED_BYTES)
            parameters = crew.start(_serve_parameters, self._workers, largest, *host)
            sums_at, self._servers["parameter-server"] = crew.receive(parameters)
            memifs = None
            if "innet-memif" in self._flags.systems:
                memifs = running.enter_context(services.memif_aggregator(Path(folder), self._workers))
                self._servers["innet-memif"] = memifs.process
            store = str(Path(folder) / "store")
            namespaces = [None if made is None else made.machine(number) for number in workers]
            endpoints = Endpoints(self._workers, servers, namespaces, sums_at, memifs, store)
            self._crew = crew
            self._pipes = [crew.start(_work, endpoints, rank) for rank in workers]
            for pipe in self._pipes:
                crew.receive(pipe)
            if made is None:
                self._connections["innet"] = running.enter_context(innet.connect(server))
            if memifs is not None:
                self._connections["innet-memif"] = running.enter_context(innet.connect(memifs.server))
            self._running = running.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def measure(self, size: int) -> None:
        """Prints the results of one size: trials of all systems in turn, for a number of rounds."""
        flags = self._flags
        cases: list[tuple[str, float | None]] = [(system, None) for system in flags.systems]
        if "innet" in flags.systems and flags.loss:
            cases += [("innet", loss) for loss in (0.0, *flags.loss)]
        counts = {}
        for system, loss in cases:
            took, _ = self._run_trial(Trial(system, size, loss, MIN_SUMS), 60.0)
            counts[system, loss] = int(np.clip(flags.seconds / np.median(took), MIN_SUMS, MAX_SUMS))
        times: dict[Any, list[float]] = {case: [] for case in cases}
        cpu = dict.fromkeys(cases, 0.0)
        counted: dict[str, NDArray[np.float64]]
        counted = {system: np.zeros(3) for system in flags.systems if system in TRANSPORTS and not flags.link_mbit}
        for _ in range(flags.rounds):
            for system, loss in cases:
                direct = loss is None and system in counted
                before = self._counters(system) if direct else 0.0
                took, used = self._run_trial(Trial(system, size, loss, counts[system, loss]), flags.seconds)
                if direct:
                    counted[system] += self._counters(system) - before
                times[system, loss] += took
                cpu[system, loss] += used
        about = {"workers": self._workers, "bytes": size}
        for system, loss in cases:
            taken = 1e3 * np.array(times[system, loss])
            p50, p99 = np.percentile(taken, (50, 99))
            path = f"{flags.link_mbit} Mbit/s" if flags.link_mbit else "loopback"
            report.line(
                "gradients",
                system,
                float(p50),
                "ms",
                **about,
                loss=loss or 0.0,
                path=path if loss is None else f"{path}, one by one",
                p99_ms=round(float(p99), 4),
                count=len(taken),
                cpu_ms=round(1e3 * cpu[system, loss] / len(taken), 4),
                cpu_ns_per_byte=round(1e9 * cpu[system, loss] / len(taken) / (size * self._workers), 3),
            )
        for system, (received, sent, used) in counted.items():
            rates = {"received_per_s": round(received / used), "sent_per_s": round(sent / used)}
            packets = (received + sent) / used
            report.line("gradients", TRANSPORTS[system], packets, "packets for a second of processor", **about, **rates)

    def _counters(self, system: str) -> NDArray[np.float64]:
        """Datagrams received and sent by the system's server, and its processor time in seconds."""
        seen = self._connections[system].stats()["gradients"]
        return np.array(
            [seen["received"], seen["sums"] * self._workers, cpu_seconds(self._servers[system])], np.float64
        )

    def train(self) -> None:
        """Prints the result of one training to the goal by each system."""
        self._lose(None)
        flags = self._flags
        for system in flags.systems:
            for pipe in self._pipes:
                pipe.send(Training(system, flags.training_goal, flags.training_seconds))
            messages = [self._crew.receive(pipe, flags.training_seconds) for pipe in self._pipes]
            first = messages[0]
            report.line(
                "gradients",
                system,
                first.updates / first.seconds,
                "updates/s",
                workers=self._workers,
                bytes=first.bytes,
                training="A2C on CartPole",
                communication=round(float(np.mean([each.communication for each in messages])), 4),
                score=round(first.score, 1),
                goal=flags.training_goal,
                seconds_to_goal=round(first.seconds, 2) if first.score >= flags.training_goal else None,
            )

    def _lose(self, share: float | None) -> None:
        """Makes the aggregator lose datagrams; workers do so themselves."""
        lose(share, self._aggregator.pid)

    def _run_trial(self, trial: Trial, seconds: float) -> tuple[list[float], float]:
        """Returns the seconds of each sum, by its slowest worker, and the processor time of workers and server."""
        server = self._servers.get({"innet-fixed": "innet"}.get(trial.system, trial.system))
        self._lose(trial.loss)
        before = 0.0 if server is None else cpu_seconds(server)
        for pipe in self._pipes:
            pipe.send(trial)
        messages: list[TrialTimes] = [self._crew.receive(pipe, 10 * seconds) for pipe in self._pipes]
        used = sum(each.cpu_seconds for each in messages)
        used += 0.0 if server is None else cpu_seconds(server) - before
        return [max(sums) for sums in zip(*(each.seconds for each in messages), strict=True)], used


def _serve_parameters(workers: int, max_bytes: int, host: str, namespace: str | None, pipe: Connection) -> None:
    enter(namespace)
    parameter_server.serve(workers, max_bytes, host, pipe)


def _work(endpoints: Endpoints, rank: int, pipe: Connection) -> None:
    """The main function of a worker, for trials of all systems."""
    namespace = endpoints.namespaces[rank]
    enter(namespace)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if namespace is None else MACHINE_DEVICE
    with _Sums(endpoints, rank) as sums:
        pipe.send("ready")
        while True:
            trial: Trial | Training = pipe.recv()
            if isinstance(trial, Training):
                from benchmarks.gradients import training

                lose(None, os.getpid())
                sum_once = sums.of(Trial(trial.system, 0, None, 0))
                pipe.send(training.train(sum_once, rank, endpoints.workers, goal=trial.goal, seconds=trial.seconds))
                continue
            sum_once = sums.of(trial)
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
            expected = np.sum(
                [_values(each, trial.bytes) for each in range(endpoints.workers)], axis=0, dtype=np.float64
            )
            if not np.allclose(values, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()):
                raise SystemExit(f"{trial.system} gave a wrong sum of {trial.bytes} bytes")
            pipe.send(TrialTimes(seconds, cpu))


class _Sums:
    """A worker's connections to all systems."""

    def __init__(self, endpoints: Endpoints, rank: int) -> None:
        self._endpoints, self._rank = endpoints, rank
        self._running = contextlib.ExitStack()
        self._joined: dict[tuple[str, float | None], Any] = {}

    def __enter__(self) -> _Sums:
        import torch
        import torch.distributed as dist
        from torch._C._distributed_c10d import FileStore

        torch.set_num_threads(1)
        endpoints = self._endpoints
        store = FileStore(endpoints.store, endpoints.workers)
        dist.init_process_group("gloo", store=store, rank=self._rank, world_size=endpoints.workers)
        self._running.callback(dist.destroy_process_group)
        self._parameters = parameter_server.ParameterWorker(endpoints.parameter_server)
        self._running.callback(self._parameters.close)
        self._replay = self._running.enter_context(innet.connect(endpoints.servers[self._rank]))
        return self

    def __exit__(self, *_: object) -> None:
        self._running.close()

    def of(self, trial: Trial) -> Callable[[Values], Any]:
        """Returns a function that replaces values by their sum over all workers."""
        match trial.system:
            case "gloo":
                return self._all_reduce
            case "gather":
                return self._gather
            case "parameter-server":
                return self._parameters.sum
        joined: Callable[[Values], Any] = self._worker(trial).sum
        return joined

    def _worker(self, trial: Trial) -> Any:
        key = (trial.system, trial.loss)
        if key not in self._joined:
            replay, station = self._replay, None
            if trial.system == "innet-memif":
                assert self._endpoints.memifs is not None
                replay = self._running.enter_context(innet.connect(self._endpoints.memifs.server))
                station = self._endpoints.memifs.station(self._rank)
            self._joined[key] = self._running.enter_context(
                replay.join_gradients(
                    f"bench-{trial.system}-{trial.loss}",
                    self._rank,
                    self._endpoints.workers,
                    arithmetic="fixed" if trial.system == "innet-fixed" else "float32",
                    station=station,
                )
            )
        return self._joined[key]

    def _all_reduce(self, values: Values) -> None:
        import torch
        import torch.distributed as dist

        dist.all_reduce(torch.from_numpy(values))

    def _gather(self, values: Values) -> None:
        import torch
        import torch.distributed as dist

        own = torch.from_numpy(values)
        if self._rank:
            dist.gather(own)
        else:
            parts = [torch.empty_like(own) for _ in range(self._endpoints.workers)]
            dist.gather(own, parts)
            own.zero_()
            for part in parts:
                own += part
        dist.broadcast(own, 0)


@functools.lru_cache(maxsize=64)
def _values(rank: int, size: int) -> Values:
    return np.random.default_rng(rank).standard_normal(size // 4, np.float32)
