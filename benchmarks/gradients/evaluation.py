"""`python -m benchmarks gradients`: gradient all-reduce by innet-drl and other systems, in turn.

Every worker process is a member of all systems. `docs/explanation/gradient-papers.md` defines the figures.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Annotated, Any, Literal

import numpy as np
import tyro

import innet_drl as innet
from benchmarks import report, services
from benchmarks.crew import Crew
from benchmarks.gradients import figures, parameter_server
from benchmarks.gradients.links import RACK_TO_SWITCH, TO_RACK, TO_SWITCH, enter, links
from benchmarks.gradients.losses import lose
from benchmarks.gradients.workers import ASYNC, NO_SUM, RACKS, Place, Training, Trial, work
from benchmarks.processes import cpu_seconds
from benchmarks.repeated import Case, Figure, Measurements, RepeatFlags, figure, times

System = Literal["innet", "innet-fixed", "innet-racks", "innet-async", "gloo", "parameter-server", "no-sum"]
MAX_WORKERS = 64
"""Limit on the workers of a job."""
MIN_SUMS, MAX_SUMS = 8, 4000
"""Bounds on the sums of a trial."""
TRAINED_BYTES = 3_310_000
"""Bytes of the gradient in a training to the goal: the paper's for A2C."""


@dataclass(frozen=True)
class GradientsFlags(RepeatFlags):
    """The sum of learners' gradients by innet-drl, by Gloo, and by a parameter server."""

    workers: tuple[int, ...] = (2, 4, 8)
    """Numbers of workers."""
    sizes: tuple[int, ...] = (6_410_000, 3_310_000, 157_520, 40_020)
    """Bytes of a gradient; the paper has DQN, A2C, DDPG and PPO."""
    systems: tuple[System, ...] = System.__args__  # type: ignore[attr-defined]
    """`innet` sums float32, `innet-fixed` fixed point, `innet-racks` float32 on two levels of servers; `gloo` is its
    all-reduce. Only trained: `innet-async`, where workers do not wait for each other, and `no-sum`, without
    communication."""
    racks: int = 2
    """Racks of `innet-racks`, which is measured with more workers than racks."""
    loss: tuple[float, ...] = (0.001, 0.01)
    """Shares of datagrams that `innet` loses at each end, where the kernel drops them and passes the others on one by
    one: also measured without loss. May be empty."""
    link_mbit: int = 0
    """Mbit/s of links, in network namespaces, from each worker and the parameter server to a switch, in which the
    innet-replay server runs, and of a second one from each worker to the switch of its rack and from there to the
    first. 0 uses loopback, which has no such limit. Needs root."""
    seconds: float = 1.0
    """Approximate duration of a series of sums, or of training iterations."""
    training_workers: int = 4
    """One of the numbers of workers: these also train A2C on CartPole with each system. 0 for no training."""
    training_goal: float = 195.0
    """Mean score of the last 20 games of all workers, at which a training ends."""
    training_seconds: float = 60.0
    """Seconds after which a training ends."""


def gradients(flags: Annotated[GradientsFlags, tyro.conf.arg(name="")]) -> None:
    """The sum of learners' gradients by innet-drl, by Gloo, and by a parameter server.

    Raises:
        SystemExit: An unusable flag, a case cannot be measured, or a sum is wrong.
    """
    for workers in flags.workers or (0,):
        if not 1 <= workers <= MAX_WORKERS:
            raise SystemExit(f"--workers {workers}: 1 to {MAX_WORKERS}, the limit of a job")
    if min(flags.sizes, default=0) < 4 or flags.racks < 2:
        raise SystemExit("--sizes and --racks: vectors of at least 4 bytes, and at least 2 racks")
    if not all(0 < loss < 1 for loss in flags.loss):
        raise SystemExit("--loss: shares below 1, such as 0.001 0.01")
    if not (cases := list(_cases(flags))):
        raise SystemExit("nothing is left to measure: name more --systems, or --training-workers among --workers")
    path = f"links of {flags.link_mbit} Mbit/s" if flags.link_mbit else "loopback"
    output = functools.partial(figures.tables, path=path), functools.partial(figures.draw, path=path)
    with Measurements("gradients", flags, cases, *output) as kept:
        report.shared_cores("workers and servers")
        for workers in dict.fromkeys(flags.workers):
            if missing := list(kept.missing(workers=workers)):
                with _started(workers, flags) as bench:
                    for case, repeat in missing:
                        with kept.measurement(case, repeat) as measured:
                            measured += bench.measure(case, repeat)


def _cases(flags: GradientsFlags) -> Iterator[Case]:
    for workers in dict.fromkeys(flags.workers):
        systems = [each for each in dict.fromkeys(flags.systems) if each != RACKS or workers > flags.racks]
        sums: list[tuple[str, float | None]] = [(each, None) for each in systems if each not in (ASYNC, NO_SUM)]
        if "innet" in systems and flags.loss:
            sums += [("innet", loss) for loss in dict.fromkeys((0.0, *flags.loss))]
        for size in dict.fromkeys(4 * (size // 4) for size in flags.sizes):
            about = {"workers": workers, "bytes": size}
            yield from ({"task": "sum", **about, "system": system, "loss": loss} for system, loss in sums)
            if workers == flags.training_workers:
                yield from ({"task": "iterations", **about, "system": system} for system in systems)
        if workers == flags.training_workers:
            about["bytes"] = TRAINED_BYTES
            yield from ({"task": "training", **about, "system": system} for system in systems if system != NO_SUM)


@dataclass
class _Bench:
    """The servers and workers of one number of workers."""

    flags: GradientsFlags
    crew: Crew
    pipes: list[Connection]
    """One to each worker."""
    servers: dict[str, list[int]]
    """Process ids of each system's servers."""
    statistics_of: innet.Replay | None
    """Connection to the innet-replay server, unless that is in a network namespace."""
    counts: dict[Trial, int] = field(default_factory=dict)
    """Number of sums that take as long as they should, by the first trial."""
    trainings: int = 0

    def measure(self, case: Case, repeat: int) -> Iterator[Figure]:
        """Yields the figures of one case."""
        # Workers lose datagrams themselves.
        lose(case.get("loss"), *self.servers["innet"])
        return self._sum(case) if case["task"] == "sum" else self._train(case, repeat)

    def _sum(self, case: Case) -> Iterator[Figure]:
        """Yields the times of sums, by their slowest worker, and the processor time of workers and servers."""
        trial = Trial(case["system"], case["bytes"], case["loss"], MIN_SUMS)
        if trial not in self.counts:
            first, *_ = self._run_trial(trial, 60.0)
            self.counts[trial] = int(np.clip(self.flags.seconds / np.median(first), MIN_SUMS, MAX_SUMS))
        before = self._datagrams()
        took, used, by_servers = self._run_trial(replace(trial, count=self.counts[trial]), self.flags.seconds)
        yield times("sum", [1e3 * each for each in took])
        yield figure("processor", 1e3 * used / len(took), "ms")
        if self.statistics_of and case["system"] == "innet" and case["loss"] is None:
            yield figure("datagrams", (self._datagrams() - before) / by_servers, "datagrams/s")

    def _run_trial(self, trial: Trial, seconds: float) -> tuple[list[float], float, float]:
        """Returns the seconds of each sum, and the processor time of all and of the servers."""
        servers = self.servers[trial.system]
        before = sum(map(cpu_seconds, servers))
        took, used = zip(*self._order(trial, 10 * seconds), strict=True)
        by_servers = sum(map(cpu_seconds, servers)) - before
        return [max(each) for each in zip(*took, strict=True)], sum(used) + by_servers, by_servers

    def _datagrams(self) -> int:
        """Datagrams that the server received and sent."""
        seen = self.statistics_of.stats()["gradients"] if self.statistics_of else {"received": 0, "sums": 0}
        return int(seen["received"] + seen["sums"] * len(self.pipes))

    def _train(self, case: Case, repeat: int) -> Iterator[Figure]:
        """Yields the figures of a training: the means of all workers. Each repeat has its own seed, for all systems."""
        self.trainings += 1
        until = (np.inf, self.flags.seconds)
        if case["task"] == "training":
            until = (self.flags.training_goal, self.flags.training_seconds)
        order = Training(case["system"], case["bytes"], *until, f"bench-{self.trainings}", seed=repeat)
        found = {}
        for each in zip(*self._order(order, order.seconds), strict=True):
            found[each[0]["what"]] = {**each[0], "value": statistics.fmean(of_worker["value"] for of_worker in each)}
        # Of the means, which stand beside it, as workers' shares differ.
        found["share"]["value"] = found["communication"]["value"] / found["iteration"]["value"]
        yield from found.values()

    def _order(self, order: Trial | Training, seconds: float) -> list[Any]:
        """Sends an order to all workers, and returns their results."""
        for pipe in self.pipes:
            pipe.send(order)
        return [self.crew.receive(pipe, seconds) for pipe in self.pipes]


@contextlib.contextmanager
def _started(workers: int, flags: GradientsFlags) -> Iterator[_Bench]:
    """Starts servers and workers."""
    with contextlib.ExitStack() as running:
        folder = running.enter_context(tempfile.TemporaryDirectory(prefix="innet-"))
        crew = running.enter_context(Crew())
        racks = flags.racks if RACKS in flags.systems and workers > flags.racks else 0
        made = running.enter_context(links(workers, racks, flags.link_mbit))
        root = running.enter_context(services.aggregator(made.namespace("switch")))
        below = []
        for rack in range(racks):
            parent = f"--parent={made.at(root.address, RACK_TO_SWITCH, rack)}"
            started = services.aggregator(made.namespace(f"rack{rack}"), parent, f"--rack={rack}", f"--racks={racks}")
            below.append(running.enter_context(started))
        # The parameter server has its own link, like a worker. A trained network's gradient has about its bytes.
        most, host = 2 * max(*flags.sizes, TRAINED_BYTES), made.address(workers)
        sums_at, sums_by = crew.receive(crew.start(_serve, workers, most, host, made.namespace(workers)))
        pipes = []
        for rank in range(workers):
            server = made.at(root.address, TO_SWITCH, rank)
            rack_server = made.at(below[rank % racks].address, TO_RACK, rank) if racks else ""
            found = (server, racks, rack_server, sums_at, f"{folder}/store")
            pipes.append(crew.start(work, Place(rank, workers, made.namespace(rank), *found)))
        for pipe in pipes:
            crew.receive(pipe)
        servers = {"innet": [root.pid], "innet-fixed": [root.pid], "gloo": [], "parameter-server": [sums_by]}
        servers[RACKS] = [root.pid, *(each.pid for each in below)]
        statistics_of = None if flags.link_mbit else running.enter_context(innet.connect(root.address))
        yield _Bench(flags, crew, pipes, servers, statistics_of)


def _serve(workers: int, max_bytes: int, host: str, namespace: str | None, pipe: Connection) -> None:
    enter(namespace)
    parameter_server.serve(workers, max_bytes, host, pipe)
