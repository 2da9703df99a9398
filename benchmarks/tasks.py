"""What is measured, the same way for each system: a task sets a system up, checks its answers, and measures rounds.

A task runs in a worker process (`benchmarks/worker.py`) with the Python of the system's environment. `contest.py` lets
the tasks of several systems take turns.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks import recording
from benchmarks.clients import Clients
from benchmarks.processes import cpu_seconds, own_cpu_seconds, resident_bytes
from benchmarks.proxy import CountingProxy
from benchmarks.systems import Service

PARAMETERS = 3_292_837
"""Float32 parameters of the paper's network for four actions: 13.17 MB."""

Round = dict[str, Any]
"""What a round gives: `count` of what, in `elapsed` seconds, with `times_ms` of single calls where there are such."""


class Task(Protocol):
    """One system set up for one benchmark."""

    def check(self) -> None:
        """Fails when the system's answers are wrong."""

    def measure(self, seconds: float) -> Round:
        """Measures for about `seconds`."""

    def close(self) -> None:
        """Ends what was started."""


class _OnServer:
    """A task on a server of the system; CPU seconds of client and server are counted."""

    def __init__(self, system: ModuleType, capacity: int) -> None:
        self.service: Service = system.serve(capacity)

    def timed(self, call: Callable[[], Any], seconds: float, warm_up: int = 2) -> Round:
        return timed(call, seconds, warm_up, self.service.process.pid)

    def close(self) -> None:
        self.service.close()


class Push:
    """Transitions a second of actors, each in a process of its own, until the server has them all."""

    def __init__(self, system: ModuleType, processes: int = 1, capacity: int = 100_000, **settings: Any) -> None:
        self.service: Service = system.serve(capacity)
        self.capacity = capacity
        self.clients = Clients(system.__name__, self.service.address, processes, 1, settings)

    def check(self) -> None:
        pushed = self.clients.push(5_000)
        held = self.service.held() if self.service.held else pushed
        # An item needs the steps after it, so the last few of each stream are none yet.
        least = min(pushed, self.capacity) - 2 * recording.STREAMS * (recording.STACK + recording.N) - 250
        assert held >= least, f"{pushed} transitions were pushed, the server has {held}"

    def measure(self, seconds: float) -> Round:
        server = cpu_seconds(self.service.process.pid)
        result = self.clients.saturate(seconds)
        return {**result, "server_cpu_s": cpu_seconds(self.service.process.pid) - server}

    def close(self) -> None:
        self.clients.close()
        self.service.close()


class Sample(_OnServer):
    """A batch from a server as arrays ready for a network."""

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
        recording.load().check(self.reader.draw(), self.batch)

    def measure(self, seconds: float) -> Round:
        # As many first as were drawn ahead while the others had their turn.
        return self.timed(self.reader.draw, seconds, warm_up=8)

    def close(self) -> None:
        self.reader.close()
        super().close()


class SampleInProcess:
    """A batch from a memory in the learner's process."""

    def __init__(self, system: ModuleType, batch: int = 512, items: int = 50_000, **settings: Any) -> None:
        self.batch = batch
        self.memory = system.Memory(batch, items, **settings)
        self.memory.push(items)
        self.memory.flush()

    def check(self) -> None:
        recording.load().check(self.memory.draw(), self.batch)

    def measure(self, seconds: float) -> Round:
        return timed(self.memory.draw, seconds)

    def close(self) -> None:
        pass


class Tree:
    """Draws a batch of indexes by priority, and gives them new priorities."""

    def __init__(self, system: ModuleType, items: int = 1 << 20, batch: int = 512, **settings: Any) -> None:
        random = np.random.default_rng(0)
        self.batch, self.items = batch, items
        # Halves of the tree that differ by three, for the check.
        self.priorities = np.where(np.arange(items) < items // 2, 1.0, 3.0)
        self.tree = system.Tree(items, batch, self.priorities, **settings)
        self.fresh = [random.random(batch) + 0.01 for _ in range(64)]
        self.turn = 0

    def check(self) -> None:
        # What was measured has rewritten some.
        everything = np.arange(self.items)
        self.tree.rewrite(everything, self.priorities)
        drawn = self._draws()
        assert drawn.min() >= 0, f"index {drawn.min()} was drawn"
        assert drawn.max() < self.items, f"index {drawn.max()} of {self.items} was drawn"
        share = float((drawn >= self.items // 2).mean())
        assert abs(share - 0.75) < 0.01, f"items with 3/4 of the mass have {share:.3f} of {len(drawn)} draws"
        self.tree.rewrite(everything, np.where(everything == 7, 1.0, 2.0**-17))
        share, mass = float((self._draws() == 7).mean()), 1.0 / (1.0 + 2.0**-17 * (self.items - 1))
        assert abs(share - mass) < 0.01, f"an item with {mass:.3f} of the mass has {share:.3f} of the draws"
        self.tree.rewrite(everything, self.priorities)

    def _draws(self) -> NDArray[np.int64]:
        return np.concatenate([np.asarray(self.tree.draw()) for _ in range(100_000 // self.batch)])

    def measure(self, seconds: float) -> Round:
        return timed(self._draw_and_rewrite, seconds, warm_up=20)

    def _draw_and_rewrite(self) -> None:
        self.turn += 1
        self.tree.rewrite(self.tree.draw(), self.fresh[self.turn % len(self.fresh)])

    def close(self) -> None:
        pass


class Parameters(_OnServer):
    """Putting or getting the paper's network."""

    def __init__(self, system: ModuleType, what: str = "get") -> None:
        super().__init__(system, 1_000)
        self.weights = np.random.default_rng(0).random(PARAMETERS, np.float32)
        self.store = system.Store(self.service.address)
        self.what = what
        self.store.put(self.weights)

    def check(self) -> None:
        assert np.array_equal(self.store.get(), self.weights), "the parameters that came back are not those put"

    def measure(self, seconds: float) -> Round:
        return self.timed((lambda: self.store.put(self.weights)) if self.what == "put" else self.store.get, seconds)

    def close(self) -> None:
        self.store.close()
        super().close()


class Wire(_OnServer):
    """Payload bytes of TCP for one transition, both directions, counted on the way."""

    def __init__(self, system: ModuleType, transitions: int = 8_000, **settings: Any) -> None:
        super().__init__(system, 20_000)
        self.transitions = transitions
        self.proxy = CountingProxy(self.service.address)
        self.writer = system.Writer(self.proxy.address, **settings)
        # Connecting and opening are not a transition's.
        self.writer.push(1_600)
        self.writer.flush()

    def check(self) -> None:
        pass

    def measure(self, seconds: float) -> Round:
        before = self.proxy.bytes
        self.writer.push(self.transitions)
        self.writer.flush()
        return {"count": self.transitions, "bytes": self.proxy.bytes - before}

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.writer.close()
        self.proxy.close()
        super().close()


class Memory(_OnServer):
    """Resident memory of a server that holds transitions, less that of the same server empty."""

    def __init__(self, system: ModuleType, transitions: int = 50_000, **settings: Any) -> None:
        super().__init__(system, transitions + 20_000)
        self.transitions = transitions
        self.writer = system.Writer(self.service.address, **settings)
        self.writer.push(1_600)
        self.writer.flush()

    def check(self) -> None:
        pass

    def measure(self, seconds: float) -> Round:
        before = resident_bytes(self.service.process.pid)
        self.writer.push(self.transitions)
        self.writer.flush()
        return {"count": self.transitions, "bytes": resident_bytes(self.service.process.pid) - before}

    def close(self) -> None:
        self.writer.close()
        super().close()


class Connections:
    """Time of a push of 50 transitions when many connections offer the same load together, in open loop.

    Each connection pushes at fixed times whether or not the last push has ended, and a push counts from the time that
    it was due: a server that stalls cannot hide it by making its clients wait. Without a rate they push as fast as
    they can.
    """

    def __init__(
        self,
        system: ModuleType,
        connections: int = 8,
        pushes_per_s: float = 100.0,
        transitions: int = 50,
        **settings: Any,
    ) -> None:
        self.service: Service = system.serve(100_000)
        self.pushes_per_s, self.transitions = pushes_per_s, transitions
        processes = 2
        self.clients = Clients(
            system.__name__, self.service.address, processes, connections // processes, {**settings, "streams": 1}
        )

    def check(self) -> None:
        self.clients.push(self.transitions)

    def measure(self, seconds: float) -> Round:
        server = cpu_seconds(self.service.process.pid)
        if self.pushes_per_s:
            result = self.clients.offer(seconds, self.pushes_per_s, self.transitions)
        else:
            result = self.clients.saturate(seconds)
        return {**result, "server_cpu_s": cpu_seconds(self.service.process.pid) - server}

    def close(self) -> None:
        self.clients.close()
        self.service.close()


class Windows:
    """Windows of another shape than a transition's: sequences of a length, or frames of a size."""

    def __init__(self, system: ModuleType, batch: int, side: int = 84, length: int | None = None) -> None:
        self.windows = system.Windows(batch, side, length)
        self.shape = (batch, length + 1 if length else recording.STACK, side, side)

    def check(self) -> None:
        drawn = self.windows.draw()
        assert drawn.shape == self.shape, f"drew {drawn.shape}, not {self.shape}"
        assert drawn.any(axis=(1, 2, 3)).all(), "drew empty windows"

    def measure(self, seconds: float) -> Round:
        return timed(self.windows.draw, seconds)

    def close(self) -> None:
        pass


class Limit:
    """What the machine can do at best."""

    def __init__(self, system: ModuleType, what: str) -> None:
        self.call, self.count = system.LIMITS[what]()

    def check(self) -> None:
        pass

    def measure(self, seconds: float) -> Round:
        result = timed(self.call, seconds)
        return result | {"count": self.count * result["count"]}

    def close(self) -> None:
        pass


_ALL = (Push, Sample, SampleInProcess, Tree, Parameters, Wire, Memory, Connections, Windows, Limit)
TASKS: dict[str, Callable[..., Task]] = {each.__name__: each for each in _ALL}


def timed(call: Callable[[], Any], seconds: float, warm_up: int = 2, server: int | None = None) -> Round:
    """Calls again and again."""
    for _ in range(warm_up):
        call()
    spent: list[float] = []
    served = cpu_seconds(server) if server else 0.0
    cpu = own_cpu_seconds()
    start = time.perf_counter()
    while (begin := time.perf_counter()) < start + seconds or not spent:
        call()
        spent.append(time.perf_counter() - begin)
    elapsed = time.perf_counter() - start
    result = {
        "count": len(spent),
        "elapsed": elapsed,
        "times_ms": [1e3 * each for each in spent],
        "client_cpu_s": own_cpu_seconds() - cpu,
    }
    return result | ({"server_cpu_s": cpu_seconds(server) - served} if server else {})
