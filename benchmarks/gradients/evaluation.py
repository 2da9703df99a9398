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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro
from numpy.typing import NDArray

import innet_drl as innet
from benchmarks import results, services
from benchmarks.crew import Crew
from benchmarks.flags import GradientsFlags
from benchmarks.gradients import parameter_server
from benchmarks.gradients.links import MACHINE_DEVICE, enter, links
from benchmarks.gradients.losses import lose
from innet_drl.train.machine import cores, cpu_seconds

Row = results.Row
Values = NDArray[np.float32]

SYSTEMS = {
    "innet": "innet-replay serve --gradients, float32",
    "innet-fixed": "the same in fixed point",
    "innet-memif": "the same as innet over DPDK's memif at both ends, where it was built with DPDK",
    "gloo": "Gloo's all-reduce, a ring over TCP",
    "gather": "Gloo's gather, a sum, Gloo's broadcast",
    "parameter-server": "a parameter server over TCP",
}
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


def gradients(flags: Annotated[GradientsFlags, tyro.conf.arg(name="")]) -> None:
    """Measures all cases, prints and writes the results.

    Raises:
        SystemExit: An unusable flag, or: A case cannot be measured, or a sum is wrong.
    """
    sizes = results.numbers(flags.sizes, "sizes")
    systems = results.names(flags.systems, SYSTEMS, "systems")
    losses = _losses(flags.loss)
    if flags.link_mbit and "innet-memif" in systems:
        raise SystemExit("--link-mbit: leave out innet-memif, which goes another way")
    print(f"workers, the aggregator and the parameter server share {cores()} cores of this machine")
    rows: list[Row] = []
    for workers in results.numbers(flags.workers, "workers"):
        with _Bench(workers, max(*sizes, MAX_TRAINED_BYTES), systems, losses, flags.link_mbit) as bench:
            for size in sizes:
                for row in bench.measure(4 * (size // 4), systems, flags):
                    rows.append(row)
                    print(_line(row), flush=True)
            if workers == flags.training_workers:
                for row in bench.train(systems, flags):
                    rows.append(row)
                    print(_training_line(row), flush=True)
        if flags.json is not None:
            results.write(flags.json, rows, results.settings(flags))
    print()
    print(tables(rows))
    if flags.json is not None:
        print(f"rows: {flags.json}")


class _Bench:
    """The servers and workers of one number of workers."""

    def __init__(self, workers: int, max_bytes: int, systems: list[str], losses: list[float], mbit: int) -> None:
        self._workers, self._max_bytes, self._systems, self._losses = workers, max_bytes, systems, losses
        self._mbit = mbit
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
            made = running.enter_context(links(self._workers + 1, self._mbit)) if self._mbit else None
            switch = None if made is None else made.switch
            self._aggregator = running.enter_context(services.aggregator(switch))
            server, self._servers["innet"] = self._aggregator.address, self._aggregator.process.pid
            servers = [server if made is None else server.replace("0.0.0.0", made.switch_address(n)) for n in workers]
            # The parameter server has its own link, like a worker.
            host = ("127.0.0.1", None) if made is None else (made.address(len(workers)), made.machine(len(workers)))
            parameters = crew.start(_serve_parameters, self._workers, self._max_bytes, *host)
            sums_at, self._servers["parameter-server"] = crew.receive(parameters)
            memifs = None
            if "innet-memif" in self._systems:
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

    def measure(self, size: int, systems: list[str], flags: GradientsFlags) -> Iterator[Row]:
        """Yields the rows of one size: trials of all systems in turn, for a number of rounds."""
        cases: list[tuple[str, float | None]] = [(system, None) for system in systems]
        if "innet" in systems and self._losses:
            cases += [("innet", loss) for loss in (0.0, *self._losses)]
        counts = {}
        for system, loss in cases:
            took, _ = self._run_trial(Trial(system, size, loss, MIN_SUMS), 60.0)
            counts[system, loss] = int(np.clip(flags.seconds / np.median(took), MIN_SUMS, MAX_SUMS))
        times: dict[Any, list[float]] = {case: [] for case in cases}
        cpu = dict.fromkeys(cases, 0.0)
        counted = {system: np.zeros(3) for system in systems if system in TRANSPORTS and not self._mbit}
        for _ in range(flags.rounds):
            for system, loss in cases:
                direct = loss is None and system in counted
                before = self._counters(system) if direct else 0.0
                took, used = self._run_trial(Trial(system, size, loss, counts[system, loss]), flags.seconds)
                if direct:
                    counted[system] += self._counters(system) - before
                times[system, loss] += took
                cpu[system, loss] += used
        for system, loss in cases:
            all_of_it = times[system, loss]
            p50, p99 = (round(1e3 * float(np.percentile(all_of_it, share)), 4) for share in (50, 99))
            path = f"{self._mbit} Mbit/s" if self._mbit else "loopback"
            yield {
                "system": system,
                "bytes": size,
                "workers": self._workers,
                "loss": loss or 0.0,
                "path": path if loss is None else f"{path}, one by one",
                "p50_ms": p50,
                "p99_ms": p99,
                "count": len(all_of_it),
                "cpu_ms": round(1e3 * cpu[system, loss] / len(all_of_it), 4),
                "cpu_ns_per_byte": round(1e9 * cpu[system, loss] / len(all_of_it) / (size * self._workers), 3),
            }
        for system, (received, sent, used) in counted.items():
            yield {
                "transport": TRANSPORTS[system],
                "bytes": size,
                "workers": self._workers,
                "received_per_s": round(received / used),
                "sent_per_s": round(sent / used),
                "packets_per_s": round((received + sent) / used),
            }

    def _counters(self, system: str) -> NDArray[np.float64]:
        """Datagrams received and sent by the system's server, and its processor time in seconds."""
        seen = self._connections[system].stats()["gradients"]
        return np.array(
            [seen["received"], seen["sums"] * self._workers, cpu_seconds(self._servers[system])], np.float64
        )

    def train(self, systems: list[str], flags: GradientsFlags) -> Iterator[Row]:
        """Yields a row of each system: one training to the goal."""
        self._aggregator.lose(None)
        for system in systems:
            for pipe in self._pipes:
                pipe.send(Training(system, flags.training_goal, flags.training_seconds))
            messages = [self._crew.receive(pipe, flags.training_seconds) for pipe in self._pipes]
            first = messages[0]
            yield {
                "system": system,
                "what": "training: A2C on CartPole",
                "bytes": first.bytes,
                "workers": self._workers,
                "updates_per_s": round(first.updates / first.seconds, 2),
                "communication": round(float(np.mean([each.communication for each in messages])), 4),
                "score": round(first.score, 1),
                "goal": flags.training_goal,
                "seconds_to_goal": round(first.seconds, 2) if first.score >= flags.training_goal else None,
            }

    def _run_trial(self, trial: Trial, seconds: float) -> tuple[list[float], float]:
        """Returns the seconds of each sum, by its slowest worker, and the processor time of workers and server."""
        server = self._servers.get({"innet-fixed": "innet"}.get(trial.system, trial.system))
        self._aggregator.lose(trial.loss)
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

                lose(None)
                sum_once = sums.of(Trial(trial.system, 0, None, 0))
                pipe.send(training.train(sum_once, rank, endpoints.workers, goal=trial.goal, seconds=trial.seconds))
                continue
            sum_once = sums.of(trial)
            # After the join, which opens the socket.
            lose(trial.loss)
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


def _losses(text: str) -> list[float]:
    def holds(losses: list[float]) -> bool:
        return all(0 < loss < 1 for loss in losses)

    return results.values(text, "loss", float, holds, "shares below 1, such as 0.001,0.01") if text else []


@functools.lru_cache(maxsize=64)
def _values(rank: int, size: int) -> Values:
    return np.random.default_rng(rank).standard_normal(size // 4, np.float32)


def _name(row: Row) -> str:
    name = str(row["system"])
    return f"{name}, one by one, {row['loss']:.1%} lost" if row["path"].endswith("one by one") else name


def _line(row: Row) -> str:
    if "transport" in row:
        return (
            f"{row['bytes']:,} bytes, {row['workers']} workers, {row['transport']}: {row['received_per_s']:,} "
            f"datagrams received and {row['sent_per_s']:,} sent for each second of the server's processor time"
        )
    return (
        f"{row['bytes']:,} bytes, {row['workers']} workers, {_name(row)}: {row['p50_ms']:.3f} ms "
        f"(p99 {row['p99_ms']:.3f}), {row['cpu_ms']:.3f} ms of processor time"
    )


def _training_line(row: Row) -> str:
    reached = row["seconds_to_goal"]
    end = f"score {row['score']:g}" if reached is None else f"score {row['goal']:g} after {reached:.1f} s"
    return (
        f"A2C, a gradient of {row['bytes']:,} bytes, {row['workers']} workers, {row['system']}: {end}, "
        f"{row['updates_per_s']:.1f} updates/s, communication {row['communication']:.0%}"
    )


def tables(rows: list[Row]) -> str:
    """Returns the figures as Markdown: a table for each number of workers."""
    parts = []
    rows = [row for row in rows if "what" not in row and "transport" not in row]
    for workers in dict.fromkeys(row["workers"] for row in rows):
        by_name: dict[str, dict[int, str]] = {}
        for row in rows:
            if row["workers"] == workers:
                cell = f"{row['p50_ms']:.2f} / {row['p99_ms']:.2f} / {row['cpu_ms']:.2f}"
                by_name.setdefault(_name(row), {})[row["bytes"]] = cell
        sizes = list(next(iter(by_name.values())))
        head = [f"{workers} workers: p50 / p99 / processor, ms", *(f"{size:,} bytes" for size in sizes)]
        parts.append(
            results.markdown(head, [[name, *(cells[size] for size in sizes)] for name, cells in by_name.items()])
        )
    return "\n".join(parts)
