"""The measured tasks, equal for all systems: a task sets a system up, checks its answers, and measures rounds.

A task runs in a worker process (`benchmarks/worker.py`) with the Python of the system's environment. `contest.py` lets
the tasks of several systems take turns.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks import recording
from benchmarks.clients import PUSH, Clients
from benchmarks.processes import cpu_seconds, resident_bytes
from benchmarks.relay import RelayProcess
from benchmarks.systems import Service
from benchmarks.trajectories import Tokens

PARAMETERS = 3_292_837
"""Float32 parameters of the paper's network for four actions: 13.17 MB."""

CHECKED = 64
"""Batch size of checks."""
LARGEST_BATCH = 512
"""Largest number of transitions pending in an incomplete batch (echo)."""
PATIENCE_S = 5.0
"""Seconds for transitions in flight to arrive before a server's count is read."""
LEAST = 1_600
"""Transitions pushed before the first sample."""

Round = dict[str, Any]
"""Result of a round: `count` units in `elapsed` seconds, and `times_ms` of single calls, if any."""


class Task(Protocol):
    """One system set up for one benchmark."""

    def check(self) -> None:
        """Raises an `AssertionError` if the system's answers are wrong."""

    def measure(self, seconds: float) -> Round:
        """Measures for about `seconds`."""

    def close(self) -> None:
        """Ends all started processes."""


class _Here:
    """A task in this process."""

    def close(self) -> None:
        """Does nothing: it has started no process."""


class _OnServer:
    """A task on the system's server, which counts CPU seconds of client and server."""

    def __init__(self, system: ModuleType, capacity: int, server: dict[str, Any] | None = None) -> None:
        self.system = system
        self.service: Service = system.serve(capacity, **(server or {}))

    def timed(self, call: Callable[[], Any], seconds: float = math.inf, **more: Any) -> Round:
        return timed(call, seconds, server=self.service.process.pid, **more)

    def close(self) -> None:
        self.service.close()


class _Fed(_OnServer):
    """A task that pushes transitions, and checks the server's count and its samples."""

    streams = recording.STREAMS
    """Upper bound on the streams of all writers."""
    distinct = 0.5
    """Least share of distinct observations in a batch."""
    sent = 0

    def check(self) -> None:
        self.check_count()
        # A system without readers checks the contents on arrival.
        for reader in list(getattr(self.system, "READERS", {}).values())[:1]:
            with contextlib.closing(reader(self.service.address, CHECKED)) as opened:
                recording.load().check(opened.sample(), CHECKED, self.distinct)

    def check_count(self) -> None:
        """Checks that the server has inserted all sent transitions."""
        # Not inserted: the last steps of a stream, an incomplete batch, and the rows after a game's end (below 1 %).
        # A writer of many streams may be some rows ahead.
        least = 0.99 * self.sent - recording.N * self.streams - LARGEST_BATCH
        give_up = time.monotonic() + PATIENCE_S
        while (inserted := self.service.inserted()) < least and time.monotonic() < give_up:
            time.sleep(0.01)
        told = f"{self.sent} transitions were pushed, the server took in {inserted}"
        assert least <= inserted <= self.sent + self.streams, told


class _FedHere(_Fed):
    """One writer, in this process, whose pushes cost bytes."""

    def __init__(
        self,
        system: ModuleType,
        transitions: int,
        capacity: int,
        *,
        through: bool,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(system, capacity, server)
        self.transitions = transitions
        self.link = RelayProcess(self.service.address) if through else None
        self.writer = system.Writer(self.link.address if self.link else self.service.address, **settings)
        # The first pushes include connecting and opening, which are not measured.
        self.push(LEAST)

    def grown(self, count: Callable[[], int]) -> Round:
        """Pushes, and returns how much the bytes grew."""
        before = count()
        result = self.push(self.transitions)
        return result | {"bytes": count() - before}

    def push(self, transitions: int) -> Round:
        """Times pushes of 50 transitions."""
        calls = transitions // PUSH
        result = self.timed(lambda: self.writer.push(PUSH), calls=calls, warm_up=0, finish=self.writer.flush)
        self.sent += calls * PUSH
        return result | {"count": calls * PUSH}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.writer.close()
        if self.link:
            self.link.close()
        super().close()


class _FedByClients(_Fed):
    """Writers in processes of their own."""

    clients: Clients

    def counted(self, push: Callable[[], Round], unit: int = 1) -> Round:
        """Runs pushes of `unit` transitions, with the server's CPU seconds."""
        server = cpu_seconds(self.service.process.pid)
        result = push()
        result["server_cpu_s"] = cpu_seconds(self.service.process.pid) - server
        self.sent += unit * result["count"]
        self.check_count()
        return result

    def close(self) -> None:
        self.clients.close()
        super().close()


class Push(_FedByClients):
    """Rate of actors in processes of their own, up to the last acknowledged transition."""

    def __init__(
        self,
        system: ModuleType,
        processes: int = 1,
        capacity: int = 100_000,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(system, capacity, server)
        self.streams *= processes
        self.clients = Clients(system.__name__, self.service.address, processes, 1, settings)
        self.sent += self.clients.push(5_000)

    def measure(self, seconds: float) -> Round:
        return self.counted(lambda: self.clients.saturate(seconds))


class Sample(_OnServer):
    """Samples batches from a server, as arrays ready for a network."""

    def __init__(
        self,
        system: ModuleType,
        reader: str = "client",
        batch: int = 512,
        items: int = 50_000,
        writer_settings: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(system, items)
        self.batch = batch
        writer = system.Writer(self.service.address, **(writer_settings or {}))
        writer.push(items)
        writer.flush()
        writer.close()
        self.reader = system.READERS[reader](self.service.address, batch, **settings)

    def check(self) -> None:
        recording.load().check(self.reader.sample(), self.batch)

    def measure(self, seconds: float) -> Round:
        # The warm-up uses up batches that were prefetched before this turn.
        return self.timed(self.reader.sample, seconds, warm_up=8)

    def close(self) -> None:
        self.reader.close()
        super().close()


class SampleInProcess(_Here):
    """Samples batches from a memory in the learner's process."""

    def __init__(self, system: ModuleType, batch: int = 512, items: int = 50_000, **settings: Any) -> None:
        self.batch = batch
        self.memory = system.Memory(batch, items, **settings)
        self.memory.push(items)
        self.memory.flush()

    def check(self) -> None:
        recording.load().check(self.memory.sample(), self.batch)

    def measure(self, seconds: float) -> Round:
        return timed(self.memory.sample, seconds)


class Vectors(_Here):
    """Samples transitions of vectors by priority, and sets the priorities of each batch."""

    def __init__(self, system: ModuleType, items: int = 1_000_000, batch: int = 256, **settings: Any) -> None:
        random = np.random.default_rng(0)
        observations = random.normal(size=(items + 1, 17)).astype(np.float32)
        # Exact in float32: it tells the transition.
        observations[:, 0] = np.arange(items + 1)
        self.data = {
            "observation": observations[:-1],
            "action": random.normal(size=(items, 6)).astype(np.float32),
            "reward": random.normal(size=items).astype(np.float32),
            "next_observation": observations[1:],
        }
        self.batch = batch
        self.memory = system.Vectors(self.data, batch, **settings)
        self.fresh = [random.random(batch) + 0.01 for _ in range(64)]
        self.turn = 0

    def check(self) -> None:
        ids, batch = self.memory.sample()
        found = {name: np.asarray(batch[name]).reshape(self.batch, *self.data[name].shape[1:]) for name in self.data}
        items = found["observation"][:, 0].astype(int)
        for name, values in found.items():
            np.testing.assert_array_equal(values, self.data[name][items], err_msg=name)
        assert len(np.unique(items)) > self.batch // 2
        # An item that is in the batch once gets half of the mass of all others, as far as a priority goes.
        unique, counts = np.unique(items, return_counts=True)
        one = int(np.flatnonzero(np.isin(items, unique[counts == 1]))[0])
        mass = min(len(self.data["reward"]) / 2, 2**19)
        priorities = np.ones(self.batch)
        priorities[one] = mass ** (1 / 0.6)
        self.memory.rewrite(ids, priorities)
        samples = [np.asarray(self.memory.sample()[1]["observation"]) for _ in range(40)]
        share = float((np.concatenate(samples).reshape(-1, 17)[:, 0] == items[one]).mean())
        expected = mass / (mass + len(self.data["reward"]))
        # Other priorities are below 1 once a measurement has set them.
        assert 0.6 < share / expected < 2, f"an item has {share:.3f} of the samples, and {expected:.3f} of the mass"
        self.memory.rewrite(ids, np.ones(self.batch))

    def measure(self, seconds: float) -> Round:
        return timed(self._sample_and_rewrite, seconds, warm_up=20)

    def _sample_and_rewrite(self) -> None:
        self.turn += 1
        ids, _ = self.memory.sample()
        self.memory.rewrite(ids, self.fresh[self.turn % len(self.fresh)])


class Tree(_Here):
    """Samples indexes by priority, and updates their priorities."""

    def __init__(self, system: ModuleType, items: int = 1 << 20, batch: int = 512, **settings: Any) -> None:
        random = np.random.default_rng(0)
        self.batch, self.items = batch, items
        # For the check: the second half has three times the priority of the first.
        self.priorities = np.where(np.arange(items) < items // 2, 1.0, 3.0)
        self.tree = system.Tree(items, batch, self.priorities, **settings)
        self.fresh = [random.random(batch) + 0.01 for _ in range(64)]
        self.turn = 0

    def check(self) -> None:
        # Measured rounds have changed priorities.
        everything = np.arange(self.items)
        self.tree.rewrite(everything, self.priorities)
        sampled = self._samples()
        assert sampled.min() >= 0, f"index {sampled.min()} was sampled"
        assert sampled.max() < self.items, f"index {sampled.max()} of {self.items} was sampled"
        share = float((sampled >= self.items // 2).mean())
        assert abs(share - 0.75) < 0.01, f"items with 3/4 of the mass have {share:.3f} of {len(sampled)} samples"
        self.tree.rewrite(everything, np.where(everything == 7, 1.0, 2.0**-17))
        share, mass = float((self._samples() == 7).mean()), 1.0 / (1.0 + 2.0**-17 * (self.items - 1))
        assert abs(share - mass) < 0.01, f"an item with {mass:.3f} of the mass has {share:.3f} of the samples"
        self.tree.rewrite(everything, self.priorities)

    def _samples(self) -> NDArray[np.int64]:
        return np.concatenate([np.asarray(self.tree.sample()) for _ in range(100_000 // self.batch)])

    def measure(self, seconds: float) -> Round:
        return timed(self._sample_and_rewrite, seconds, warm_up=20)

    def _sample_and_rewrite(self) -> None:
        self.turn += 1
        self.tree.rewrite(self.tree.sample(), self.fresh[self.turn % len(self.fresh)])


class Parameters(_OnServer):
    """Putting or getting the paper's network."""

    def __init__(self, system: ModuleType, what: str = "get", **settings: Any) -> None:
        super().__init__(system, 1_000)
        self.weights = np.random.default_rng(0).random(PARAMETERS, np.float32)
        self.store = system.Store(self.service.address, **settings)
        self.what = what
        self.store.put(self.weights)

    def check(self) -> None:
        assert np.array_equal(self.store.get(), self.weights), "the parameters that came back are not those put"

    def measure(self, seconds: float) -> Round:
        return self.timed((lambda: self.store.put(self.weights)) if self.what == "put" else self.store.get, seconds)

    def close(self) -> None:
        self.store.close()
        super().close()


class Wire(_FedHere):
    """TCP payload bytes of a transition in both directions, counted by a relay."""

    def __init__(self, system: ModuleType, transitions: int = 8_000, **settings: Any) -> None:
        super().__init__(system, transitions, 20_000, through=True, **settings)

    def measure(self, seconds: float) -> Round:
        link = self.link
        assert link is not None
        return self.grown(lambda: link.bytes)


class Memory(_FedHere):
    """Growth of a server's resident memory with pushed transitions."""

    def __init__(self, system: ModuleType, transitions: int = 50_000, **settings: Any) -> None:
        super().__init__(system, transitions, transitions + 20_000, through=False, **settings)

    def measure(self, seconds: float) -> Round:
        return self.grown(lambda: resident_bytes(self.service.process.pid))


class Connections(_FedByClients):
    """Latency of pushes of 50 transitions from many connections in open loop, at a fixed total load.

    Pushes are due at fixed times, and latency counts from the due time, so that a stall of the server also counts for
    the pushes that it delays (no coordinated omission). Without a rate, connections push at full speed.
    """

    # All connections push the same stream from its beginning.
    distinct = 0.1

    def __init__(
        self,
        system: ModuleType,
        connections: int = 8,
        pushes_per_s: float = 100.0,
        server: dict[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(system, 100_000, server)
        self.streams = connections
        self.pushes_per_s = pushes_per_s
        processes = min(2, connections)
        assert connections % processes == 0, f"{connections} connections cannot be shared by {processes} processes"
        self.clients = Clients(
            system.__name__, self.service.address, processes, connections // processes, {**settings, "streams": 1}
        )
        self.sent += self.clients.push(max(PUSH, LEAST // connections))

    def measure(self, seconds: float) -> Round:
        if self.pushes_per_s:
            return self.counted(lambda: self.clients.offer(seconds, self.pushes_per_s, PUSH), PUSH)
        return self.counted(lambda: self.clients.saturate(seconds))


class Windows(_Here):
    """Samples windows of other shapes: sequences of a given length, or frames of a given size."""

    def __init__(self, system: ModuleType, batch: int, side: int = 84, length: int | None = None) -> None:
        self.windows = system.Windows(batch, side, length)
        self.shape = (batch, length + 1 if length else recording.STACK, side, side)

    def check(self) -> None:
        sampled = self.windows.sample()
        assert sampled.shape == self.shape, f"sampled {sampled.shape}, not {self.shape}"
        assert sampled.any(axis=(1, 2, 3)).all(), "sampled empty windows"
        frames = {recording.checksum(frame) for window in sampled for frame in window}
        assert frames <= self.windows.frames, "sampled frames that were never pushed"

    def measure(self, seconds: float) -> Round:
        return timed(self.windows.sample, seconds)


class Limit(_Here):
    """The best possible result of the machine."""

    def __init__(self, system: ModuleType, what: str) -> None:
        self.limit = system.LIMITS[what]()

    def check(self) -> None:
        self.limit.check()

    def measure(self, seconds: float) -> Round:
        result = timed(self.limit.call, seconds)
        return result | {"count": self.limit.count * result["count"]}


_ALL = (
    Push,
    Sample,
    SampleInProcess,
    Vectors,
    Tree,
    Parameters,
    Wire,
    Memory,
    Connections,
    Windows,
    Limit,
    Tokens,
)
TASKS: dict[str, Callable[..., Task]] = {each.__name__: each for each in _ALL}


def timed(
    call: Callable[[], Any],
    seconds: float = math.inf,
    warm_up: int = 2,
    server: int | None = None,
    calls: float = math.inf,
    finish: Callable[[], Any] = lambda: None,
) -> Round:
    """Times repeated calls, up to a duration or a number of calls, and `finish`, which completes work in flight."""
    for _ in range(warm_up):
        call()
    spent: list[float] = []
    served = cpu_seconds(server) if server else 0.0
    cpu = time.process_time()
    start = time.perf_counter()
    while ((begin := time.perf_counter()) < start + seconds and len(spent) < calls) or not spent:
        call()
        spent.append(time.perf_counter() - begin)
    finish()
    elapsed = time.perf_counter() - start
    return {
        "count": len(spent),
        "elapsed": elapsed,
        "times_ms": [1e3 * each for each in spent],
        "client_cpu_s": time.process_time() - cpu,
        # A memory in this process has no server.
        "server_cpu_s": cpu_seconds(server) - served if server else 0.0,
    }
