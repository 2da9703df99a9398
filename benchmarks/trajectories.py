"""The task of `python -m benchmarks tokens`: two processes put trajectories into a queue, one reads batches of 64."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.crew import Crew
from benchmarks.systems.queues import BATCH, BLOCKS, Block, Trajectory, blocks, split

if TYPE_CHECKING:
    import psutil

SIZE = 4_096
"""Trajectories that a queue holds: 134 MB."""
PRODUCERS = 2
CHECKED = 16
"""Batches of a check."""
NUMBERS = 1 << 40
"""A producer's numbers begin at a multiple of it."""


class Tokens:
    """A queue, its producers and its consumer, in processes of their own."""

    def __init__(self, system: ModuleType, size: int = SIZE) -> None:
        address, self._end_store = system.store(size)
        self._crew = Crew()
        # Free places in blocks, because not every store makes a producer wait.
        told = (system.__name__, address, multiprocessing.get_context("spawn").Semaphore(size // BATCH))
        self._consumer = self._crew.start(_consume, *told)
        self._crew.receive(self._consumer)
        producers = [self._crew.start(_produce, *told, index) for index in range(PRODUCERS)]
        for pipe in producers:
            self._crew.receive(pipe)
        self._held = 0.0
        if getattr(system, "KEEPS", True):
            before = _resident_bytes()
            for pipe in producers:
                pipe.send(size // BATCH // PRODUCERS)
            payload = sum(self._crew.receive(pipe) for pipe in producers)
            # What is under way arrives.
            time.sleep(0.5)
            self._held = (_resident_bytes() - before) / payload
        for pipe in producers:
            pipe.send(-1)

    def check(self) -> None:
        """Compares batches with their source, and checks that no trajectory has come twice or is missing."""
        self._ask("check", CHECKED)

    def measure(self, seconds: float) -> dict[str, Any]:
        """Measures for some seconds: trajectories, their bytes, the times of batches, and CPU time of all processes."""
        before = _cpu_seconds()
        result = self._ask("measure", seconds)
        cpu = sum(spent - before.get(process, 0.0) for process, spent in _cpu_seconds().items())
        return {**result, "held": self._held, "cpu_s": cpu}

    def close(self) -> None:
        """Ends all processes."""
        self._crew.__exit__()
        self._end_store()

    def _ask(self, what: str, argument: float) -> Any:
        self._consumer.send((what, argument))
        return self._crew.receive(self._consumer, 10 * argument)


def compare(batch: list[Trajectory]) -> None:
    """Compares a batch with its source."""
    assert len(batch) == BATCH, f"a batch of {len(batch)}"
    for number, *arrays in batch:
        producer, count = divmod(number, NUMBERS)
        source = source_of(producer)[count // BATCH % BLOCKS]
        _, *right = split(source | {"numbers": np.arange(BATCH)})[count % BATCH]
        assert all(map(np.array_equal, arrays, right)), f"trajectory {number} differs from what was put"


def compare_numbers(received: list[int], held: int = SIZE) -> None:
    """Checks that each number has come once, and all but those that the store may hold still."""
    numbers, times = np.unique(received, return_counts=True)
    assert (times == 1).all(), f"trajectory {numbers[times > 1][0]} came {times.max()} times"
    for of in (numbers[numbers // NUMBERS == producer] % NUMBERS for producer in range(PRODUCERS)):
        missing = of.max(initial=-1) + 1 - len(of)
        assert missing <= held, f"{missing} trajectories are missing"


@functools.cache
def source_of(producer: int) -> list[Block]:
    """The blocks of a producer."""
    return blocks(seed=producer)


def _produce(system: str, address: Any, free: Semaphore, index: int, pipe: Connection) -> None:
    """A producer. The pipe brings numbers of blocks to put, and gets their bytes; a negative number has no end."""

    def source() -> Iterator[Block]:
        # Made before the memory is measured.
        own, number = source_of(index), index * NUMBERS
        pipe.send("ready")
        while True:
            left, payload = pipe.recv(), 0
            while left:
                block = own[number % NUMBERS // BATCH % BLOCKS]
                free.acquire()
                yield block | {"numbers": np.arange(number, number + BATCH)}
                number, left, payload = number + BATCH, left - 1, payload + 8 * len(block["tokens"])
            pipe.send(payload)

    importlib.import_module(system).produce(address, source())


def _consume(system: str, address: Any, free: Semaphore, pipe: Connection) -> None:
    """Reads as many batches as a check wants, or for the seconds of a measurement."""
    batches, received = importlib.import_module(system).consume(address), list[int]()
    pipe.send("ready")
    while True:
        what, argument = pipe.recv()
        times: list[float] = []
        checks, payload = what == "check", 0
        start = now = time.perf_counter()
        while len(times) < argument if checks else now < start + argument:
            batch = next(batches)
            free.release()
            received += [number for number, _, _ in batch]
            payload += sum(tokens.nbytes + log_probabilities.nbytes for _, tokens, log_probabilities in batch)
            if checks:
                compare(batch)
            before, now = now, time.perf_counter()
            times.append(1e3 * (now - before))
        if checks:
            compare_numbers(received)
        pipe.send({"count": BATCH * len(times), "bytes": payload, "elapsed": now - start, "times_ms": times})


def _processes() -> list[psutil.Process]:
    """This process and all that it has started."""
    # `psutil` is imported here, as the environments of peers lack it.
    import psutil

    return [psutil.Process(), *psutil.Process().children(recursive=True)]


def _cpu_seconds() -> dict[int, float]:
    return {each.pid: sum(each.cpu_times()[:2]) for each in _processes()}


def _resident_bytes() -> int:
    """Memory of all processes; what they share counts once."""
    return sum(each.memory_full_info().pss for each in _processes())
