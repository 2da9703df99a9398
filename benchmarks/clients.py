"""Pushing actors in processes of their own, each with one or more connections and a thread for each."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.crew import Crew
from benchmarks.systems import Address

PUSH = 50
"""Transitions of one push."""
SECONDS = 600.0
"""Longest command."""


class Clients:
    """`processes` times `connections` writers of a system, which receive commands over pipes and start together."""

    def __init__(
        self, system: str, address: Address, processes: int, connections: int, settings: dict[str, Any]
    ) -> None:
        self._crew = Crew()
        self._pipes = [
            self._crew.start(_serve, system, address, connections, index, processes, settings)
            for index in range(processes)
        ]
        for pipe in self._pipes:
            self._crew.receive(pipe)

    def push(self, count: int) -> int:
        """Pushes `count` transitions from each writer; returns the total that the server has acknowledged."""
        return int(sum(each["count"] for each in self._all("push", count)))

    def saturate(self, seconds: float) -> dict[str, Any]:
        """Pushes from every writer at full speed; counts acknowledged transitions.

        `times_ms` are the durations of pushes of 50, until the writer accepts the next one.
        """
        results = self._all("saturate", seconds)
        return self._sum(results) | {"elapsed": max(each["elapsed"] for each in results)}

    def offer(self, seconds: float, pushes_per_s: float, transitions: int) -> dict[str, Any]:
        """Pushes `pushes_per_s` times a second in total, evenly spread over writers and time."""
        return self._sum(self._all("offer", seconds, pushes_per_s, transitions)) | {"elapsed": seconds}

    def close(self) -> None:
        """Ends the processes."""
        self._crew.__exit__()

    def _all(self, what: str, *arguments: Any) -> list[dict[str, Any]]:
        # A common start time in the near future.
        begin = time.monotonic() + 0.05
        for pipe in self._pipes:
            pipe.send((what, begin, *arguments))
        return [self._crew.receive(pipe, SECONDS) for pipe in self._pipes]

    @staticmethod
    def _sum(results: list[dict[str, Any]]) -> dict[str, Any]:
        times = [time_ms for each in results for time_ms in each["times_ms"]]
        return {name: sum(each[name] for each in results) for name in ("count", "client_cpu_s")} | {"times_ms": times}


def _serve(
    system: str,
    address: Address,
    connections: int,
    index: int,
    processes: int,
    settings: dict[str, Any],
    pipe: Connection,
) -> None:
    """Main function of a client process: executes the commands of the pipe."""
    make = importlib.import_module(system).Writer
    writers = [make(address, **settings) for _ in range(connections)]
    pipe.send("ready")
    while True:
        what, begin, *arguments = pipe.recv()
        time.sleep(max(0.0, begin - time.monotonic()))
        cpu = time.process_time()
        if what == "push":
            result = _push(writers, *arguments)
        elif what == "saturate":
            result = _saturate(writers, *arguments)
        else:
            result = _offer(writers, begin, index, processes, *arguments)
        pipe.send(result | {"client_cpu_s": time.process_time() - cpu})


def _push(writers: list[Any], count: int) -> dict[str, Any]:
    def push(writer: Any) -> None:
        writer.push(count)
        writer.flush()

    _together(push, writers)
    return {"count": count * len(writers)}


def _saturate(writers: list[Any], seconds: float) -> dict[str, Any]:
    times: list[float] = []

    def push(writer: Any) -> None:
        now = begin
        while now < end:
            writer.push(PUSH)
            before, now = now, time.perf_counter()
            times.append(1e3 * (now - before))
        writer.flush()

    begin = time.perf_counter()
    end = begin + seconds
    _together(push, writers)
    return {"count": PUSH * len(times), "elapsed": time.perf_counter() - begin, "times_ms": times}


def _offer(
    writers: list[Any], begin: float, index: int, processes: int, seconds: float, pushes_per_s: float, transitions: int
) -> dict[str, Any]:
    every = processes * len(writers) / pushes_per_s
    times: list[float] = []

    def push(writer: Any) -> None:
        place = index + processes * writers.index(writer)
        due = begin + place / pushes_per_s
        while due < begin + seconds:
            time.sleep(max(0.0, due - time.monotonic()))
            writer.push(transitions)
            writer.flush()
            times.append(1e3 * (time.monotonic() - due))
            due += every

    _together(push, writers)
    return {"count": len(times), "times_ms": times}


def _together(call: Callable[[Any], None], writers: list[Any]) -> None:
    """Calls with each writer in a thread of its own; a single writer needs none."""
    if len(writers) == 1:
        return call(writers[0])
    with ThreadPoolExecutor(len(writers)) as pool:
        list(pool.map(call, writers))
    return None
