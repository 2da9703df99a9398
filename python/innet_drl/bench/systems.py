"""The systems, as an actor and as the learner use them.

| | push | what the learner's sampling is |
| --- | --- | --- |
| `redis` | a message to a list | pull every message, store it in the learner's replay, draw there |
| `shared` | the same as one step of a FIFO table | the same, from the table |
| `sampling` | rows or transitions to a prioritized table | one request: the server draws |
| `ahead` | the same | taking a batch that was asked for while the last one was trained on, as `innet-drl train` does |
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.bench.messages import Format
from innet_drl.bench.settings import BATCH, STREAMS, TRANSITIONS, Case, parameters

POLICY = "policy"
QUEUE = "experience"
_PREFIX = "message_"
"""Of the queue's columns: `Writer.append` has arguments that are named as parts of a message."""
PULLED = 4
"""Messages that one draw takes from a FIFO table, at most: of stacks they are 181 MB."""
MADE = 4
"""Different messages of an actor: of stacks they are 181 MB."""
ROW = innet.Window(before=0, after=0)

Rows = list[dict[str, Any]]


class Clock:
    """Milliseconds of each thing that was done, by its name."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Books the time since the last lap."""
        now = time.perf_counter()
        self.laps.setdefault(name, []).append(1e3 * (now - self._last))
        self._last = now


class Actor(Protocol):
    """A connection of an actor."""

    def push(self, number: int) -> None:
        """Hands over 200 transitions, and returns when they are there."""

    def pull(self) -> None:
        """Takes the newest parameters, as arrays."""


class Learner(Protocol):
    """The learner's connection."""

    def receive(self, clock: Clock) -> None:
        """Takes in what actors pushed, where the learner has a replay of its own."""

    def sample(self, clock: Clock) -> Any:
        """A batch as arrays, with its keys; laps are the parts of the way to it."""

    def update(self, keys: Any, priorities: NDArray[np.float64]) -> None:
        """Sets the priorities of a batch."""

    def publish(self, tensors: dict[str, NDArray[Any]]) -> None:
        """Sets the parameters."""


@contextlib.contextmanager
def actor(case: Case, address: str, index: int, rows: Rows) -> Iterator[Actor]:
    """The connection of one actor; what it pushes is in memory already."""
    messages = case.messages()
    if case.system == "redis":
        with _redis(address) as memory:
            yield _RedisActor(memory, messages, _messages(messages, rows, index), case.actors)
        return
    url, options = case.stack.connection(address, 1 + index)
    with innet.connect(url, **options) as replay:
        if case.system == "shared":
            yield _SharedActor(replay, messages, _messages(messages, rows, index))
        else:
            yield _SamplingActor(replay, case, messages, index, rows)


@contextlib.contextmanager
def learner(case: Case, address: str) -> Iterator[Learner]:
    """The learner's connection, and its own replay where it has one."""
    messages = case.messages()
    if case.system == "redis":
        with _redis(address) as memory, innet.Replay([messages.table]) as own:
            pull = _from_redis(memory, messages, case.actors)
            yield _PullingLearner(messages, own, pull, lambda tensors: memory.put_parameters(1, tensors))
        return
    url, options = case.stack.connection(address, 0)
    tables = [_queue(messages, case.actors) if case.system == "shared" else messages.table]
    with innet.connect(url, tables=tables, **options) as replay:

        def publish(tensors: dict[str, NDArray[Any]]) -> None:
            replay.put_parameters(POLICY, tensors)

        if case.system == "sampling":
            yield _DrawingLearner(messages, replay, publish)
            return
        if case.system == "ahead":
            with replay.batches(messages.table.name, BATCH, messages.view, prefetch=1) as batches:
                yield _TakingLearner(messages, replay, publish, batches)
            return
        with innet.Replay([messages.table]) as own:
            yield _PullingLearner(messages, own, _from_queue(replay, messages, case.actors), publish)


def _redis(address: str) -> Any:
    from innet_drl.bench.redis_memory import RedisMemory

    return contextlib.closing(RedisMemory(address, "bench", "", parameters()))


def _messages(messages: Format, rows: Rows, index: int) -> list[bytearray]:
    """The pushes of an actor, made beforehand: what an actor has in hand when it pushes."""
    collector, made = messages.collector(index), list[bytearray]()
    buffer = bytearray(messages.layout.nbytes)
    for row in rows:
        collector.add(row)
        if collector.take(messages.layout.views(buffer)):
            made.append(buffer)
            if len(made) == MADE:
                break
            buffer = bytearray(messages.layout.nbytes)
    return made


class _RedisActor:
    def __init__(self, memory: Any, messages: Format, made: list[bytearray], most_waiting: int) -> None:
        from innet_drl.bench.redis_memory import Pushes

        self._memory, self._made = memory, made
        self._pushes = Pushes(memory, messages, most_waiting)

    def push(self, number: int) -> None:
        self._pushes.push(self._made[number % len(self._made)])

    def pull(self) -> None:
        self._memory.get_parameters(POLICY)


def _queue(messages: Format, actors: int) -> innet.Table:
    """A FIFO table of which one step is one message: what a list is to a Redis.

    As there, actors wait while it holds more messages than there are actors.
    """
    columns = {
        _PREFIX + name: innet.Column(dtype, shape, codec="lz4" if messages.packed and np.prod(shape) > 64 else "none")
        for name, (dtype, shape) in messages.layout.columns.items()
    }
    return innet.Table(
        QUEUE,
        columns,
        4 * actors + PULLED,
        sampler="fifo",
        max_times_sampled=1,
        samples_per_insert=1.0,
        slack=actors + 1.0,
    )


class _SharedActor:
    def __init__(self, replay: innet.Replay, messages: Format, made: list[bytearray]) -> None:
        self._replay = replay
        self._writer = replay.writer(QUEUE, 1, ROW, chunk_steps=1)
        views = [messages.layout.views(message) for message in made]
        self._made: Rows = [{_PREFIX + name: array[None] for name, array in arrays.items()} for arrays in views]

    def push(self, number: int) -> None:
        message = self._made[number % len(self._made)]
        self._writer.append(**message, terminated=[False], truncated=[False], first=[True])
        self._writer.flush()

    def pull(self) -> None:
        self._replay.get_parameters(POLICY)


class _SamplingActor:
    def __init__(self, replay: innet.Replay, case: Case, messages: Format, index: int, rows: Rows) -> None:
        self._replay = replay
        steps = TRANSITIONS // STREAMS
        if case.format == "frames":
            self._pushes = [rows[first : first + steps] for first in range(0, len(rows), steps)]
            self._writer = replay.writer(
                messages.table.name, STREAMS, messages.view, name=f"actor {index}", chunk_steps=steps
            )
            return
        intake = messages.intake(replay)
        made = [list(intake.appends(messages.layout.views(message))) for message in _messages(messages, rows, index)]
        self._writer = made[0][0][0]
        self._pushes = [[row for _, row in appends] for appends in made]

    def push(self, number: int) -> None:
        for row in self._pushes[number % len(self._pushes)]:
            self._writer.append(**row)
        self._writer.flush()

    def pull(self) -> None:
        self._replay.get_parameters(POLICY)


Pull = Callable[[], list[dict[str, NDArray[Any]]]]
"""The messages that are there, one of each actor at most, as arrays."""


def _from_redis(memory: Any, messages: Format, most: int) -> Pull:
    from innet_drl.bench.redis_memory import unpack

    return lambda: [unpack(memory, messages, message) for message in memory.pull(most)]


def _from_queue(replay: innet.Replay, messages: Format, most: int) -> Pull:
    def pull() -> list[dict[str, NDArray[Any]]]:
        taken: list[dict[str, NDArray[Any]]] = []
        while len(taken) < most:
            wanted = min(PULLED, most - len(taken))
            try:
                batch = replay.sample(QUEUE, wanted, ROW, allow_short=True, timeout=0)
            except (innet.errors.DeadlineError, innet.errors.EmptyError):
                break
            columns = {name: batch[_PREFIX + name] for name in messages.layout.columns}
            taken += [{name: column[index, 0] for name, column in columns.items()} for index in range(len(batch))]
            if len(batch) < wanted:
                break
        return taken

    return pull


class _PullingLearner:
    """A learner with a replay of its own."""

    def __init__(
        self, messages: Format, own: innet.Replay, pull: Pull, publish: Callable[[dict[str, NDArray[Any]]], None]
    ) -> None:
        self._messages, self._own, self._pull = messages, own, pull
        self._intake = messages.intake(own)
        self._table = messages.table.name
        self.publish = publish

    def receive(self, clock: Clock) -> None:
        taken = self._pull()
        clock.lap("pull")
        for message in taken:
            for writer, row in self._intake.appends(message):
                writer.append(**row)
            writer.flush()
        clock.lap("store")

    def sample(self, clock: Clock) -> Any:
        self.receive(clock)
        batch = self._own.sample(self._table, BATCH, self._messages.view)
        clock.lap("draw")
        return self._messages.batch(dict(batch.items()))

    def update(self, keys: Any, priorities: NDArray[np.float64]) -> None:
        self._own.update_priorities(self._table, keys, priorities)


class _DrawingLearner:
    """A learner that has batches drawn where the experience is."""

    def __init__(
        self, messages: Format, replay: innet.Replay, publish: Callable[[dict[str, NDArray[Any]]], None]
    ) -> None:
        self._messages, self._replay = messages, replay
        self._table = messages.table.name
        self.publish = publish

    def receive(self, clock: Clock) -> None:
        """The server has it."""

    def sample(self, clock: Clock) -> Any:
        batch = self._next()
        clock.lap("draw")
        return self._messages.batch(dict(batch.items()))

    def _next(self) -> innet.Batch:
        return self._replay.sample(self._table, BATCH, self._messages.view)

    def update(self, keys: Any, priorities: NDArray[np.float64]) -> None:
        self._replay.update_priorities(self._table, keys, priorities)


class _TakingLearner(_DrawingLearner):
    """The same, one batch ahead of the training: its priorities count from the batch after the next."""

    def __init__(
        self,
        messages: Format,
        replay: innet.Replay,
        publish: Callable[[dict[str, NDArray[Any]]], None],
        batches: innet.Batches,
    ) -> None:
        super().__init__(messages, replay, publish)
        self._batches = batches

    def _next(self) -> innet.Batch:
        return next(self._batches)
