"""The measured systems: connections of actors and the learner in each.

| system | an actor's push | the learner's sampling |
| --- | --- | --- |
| `redis` | a message to a list | pull all messages, store them in the learner's own replay, sample there |
| `shared` | a message as one step of a FIFO table | pull all messages from the table, then as `redis` |
| `sampling` | rows or transitions to a prioritized table | one request: the server samples |
| `ahead`, `edge` | as `sampling` | take a batch requested while training on earlier ones, as `innet-drl train` does |
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from benchmarks import recording
from benchmarks.paper.cases import BATCH, STEPS, Workload, parameters
from innet_drl.redis.messages import MessageFormat, views

POLICY = "policy"
QUEUE = "experience"
_PREFIX = "message_"
"""Prefix of the queue's columns, which avoids clashes with arguments of `Writer.append`."""
PUSHES = 5
"""Distinct pushes of an actor, which then repeat. In the format `stacks` they fill 4 messages: 181 MB."""
SKIPPED = 100
"""Recorded steps before them, because games start alike."""
MAX_PULLED = 4
"""Largest number of messages sampled from the FIFO table at a time: 181 MB in the format `stacks`."""
ROW = innet.Window(before=0, after=0)

Rows = list[dict[str, Any]]


class Clock:
    """Records the duration of each lap in milliseconds, by the name of its activity."""

    def __init__(self) -> None:
        self.laps: dict[str, list[float]] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        """Records the time since the last lap."""
        now = time.perf_counter()
        self.laps.setdefault(name, []).append(1e3 * (now - self._last))
        self._last = now


@contextlib.contextmanager
def open_actor(work: Workload, address: str, index: int, rows: Rows) -> Iterator[ActorClient]:
    """Opens the connection of one actor, with its messages prepared."""
    messages = work.messages()
    if work.system == "redis":
        with _redis(address) as store:
            yield _RedisActor(store, messages, _messages(messages, rows, index), work.most_waiting)
        return
    url, options = work.stack.connection(address, 1 + index)
    with innet.connect(url, **options) as replay:
        if work.system == "shared":
            yield _shared_actor(replay, messages, _messages(messages, rows, index))
        else:
            yield _sampling_actor(replay, work, messages, index, rows)


@contextlib.contextmanager
def open_learner(work: Workload, address: str) -> Iterator[LearnerClient]:
    """Opens the learner's connection, and its own replay if it has one."""
    messages = work.messages()
    if work.system == "redis":
        with _redis(address) as store, innet.Memory([messages.table]) as own:
            pull = _from_redis(store, messages, work.most_waiting)
            yield _PullingLearner(messages, own, pull, lambda tensors: store.put_parameters(1, tensors))
        return
    url, options = work.stack.connection(address, 0)
    tables = [_queue(messages, work.most_waiting) if work.system == "shared" else messages.table]
    with innet.connect(url, tables=tables, **options) as replay:

        def publish(tensors: dict[str, NDArray[Any]]) -> None:
            replay.put_parameters(POLICY, tensors)

        if work.system == "sampling":
            sample = functools.partial(replay.sample, messages.table.name, BATCH, messages.view)
            yield _ServerSampledLearner(messages, replay, publish, sample, wait=True)
            return
        if work.system in ("ahead", "edge"):
            # With one batch ahead, new priorities take effect from the batch after the next.
            prefetch = 1 if work.delay_ms is None else 4
            with replay.batches(messages.table.name, BATCH, messages.view, prefetch=prefetch) as batches:
                yield _ServerSampledLearner(messages, replay, publish, batches.__next__, wait=False)
            return
        with innet.Memory([messages.table]) as own:
            yield _PullingLearner(messages, own, _from_queue(replay, messages, work.most_waiting), publish)


def recorded_rows(work: Workload) -> Rows:
    """Rows of `PUSHES` pushes of Breakout, the same for every system."""
    chosen = recording.load().rows[SKIPPED : SKIPPED + PUSHES * STEPS]
    rows = [{name: column[: work.streams] for name, column in row.items()} for row in chosen]
    # Episodes end before the rows repeat, so that a repetition cuts no window.
    rows[0]["first"] = np.ones(work.streams, np.bool_)
    rows[-1] |= {"terminated": ~rows[-1]["final"], "truncated": np.zeros(work.streams, np.bool_)}
    return rows


def _redis(address: str) -> Any:
    from innet_drl.redis.store import RedisStore

    return contextlib.closing(RedisStore(address, "bench", "", parameters()))


def _messages(messages: MessageFormat, rows: Rows, index: int) -> list[bytearray]:
    """Builds the messages of an actor before the measurement."""
    builder, made = messages.builder(index), list[bytearray]()
    buffer = bytearray(messages.layout.itemsize)
    for row in rows:
        builder.add(row)
        if builder.fill(views(messages.layout, buffer)):
            made.append(buffer)
            buffer = bytearray(messages.layout.itemsize)
    return made


class _RedisActor:
    def __init__(self, store: Any, messages: MessageFormat, made: list[bytearray], most_waiting: int) -> None:
        self._store, self._messages, self._made, self._most_waiting = store, messages, made, most_waiting

    def push(self, number: int) -> None:
        self._store.send(self._messages, self._made[number % len(self._made)], self._most_waiting)

    def pull(self) -> None:
        self._store.get_parameters()


def _queue(messages: MessageFormat, most_waiting: int) -> innet.Table:
    """A FIFO table that replaces the Redis list: one step is one message.

    As with the list, actors wait while it holds more than `most_waiting` messages.
    """
    columns = {
        _PREFIX + name: innet.Column(
            messages.layout[name].base,
            messages.layout[name].shape,
            codec="lz4" if messages.compressed and np.prod(messages.layout[name].shape) > 64 else "none",
        )
        for name in messages.layout.names or ()
    }
    return innet.Table(
        QUEUE,
        columns,
        4 * most_waiting + MAX_PULLED,
        sampler="fifo",
        max_times_sampled=1,
        samples_per_insert=1.0,
        slack=most_waiting + 1.0,
    )


class _ServerActor:
    """An actor whose pushes are rows of a table at a server."""

    def __init__(self, replay: innet.Replay, writer: innet.Writer, pushes: list[Rows]) -> None:
        self._replay, self._writer, self._pushes = replay, writer, pushes

    def push(self, number: int) -> None:
        """Sends a push, and returns when it has arrived."""
        for row in self._pushes[number % len(self._pushes)]:
            self._writer.append(**row)
        self._writer.flush()

    def pull(self) -> None:
        """Gets the newest parameters as arrays."""
        self._replay.get_parameters(POLICY)


def _shared_actor(replay: innet.Replay, messages: MessageFormat, made: list[bytearray]) -> _ServerActor:
    writer = replay.writer(QUEUE, 1, ROW, chunk_steps=1)
    flags = {"terminated": [False], "truncated": [False], "first": [True]}
    arrays_of = [views(messages.layout, message) for message in made]
    rows: Rows = [{_PREFIX + name: array[None] for name, array in arrays.items()} | flags for arrays in arrays_of]
    return _ServerActor(replay, writer, [[row] for row in rows])


def _sampling_actor(
    replay: innet.Replay, work: Workload, messages: MessageFormat, index: int, rows: Rows
) -> _ServerActor:
    if work.format == "frames":
        writer = replay.writer(
            messages.table.name, work.streams, messages.view, name=f"actor {index}", server=index, chunk_steps=STEPS
        )
        return _ServerActor(replay, writer, [rows[first : first + STEPS] for first in range(0, len(rows), STEPS)])
    reader = messages.reader(replay)
    made = [list(reader.rows(views(messages.layout, message))) for message in _messages(messages, rows, index)]
    return _ServerActor(replay, made[0][0][0], [[row for _, row in appends] for appends in made])


ActorClient = _RedisActor | _ServerActor
"""An actor's connection."""

Publish = Callable[[dict[str, NDArray[Any]]], None]
Pull = Callable[[], list[dict[str, NDArray[Any]]]]
"""Returns pending messages as arrays, at most `Workload.most_waiting`."""


def _from_redis(store: Any, messages: MessageFormat, most: int) -> Pull:
    return lambda: [store.unpack(messages, message) for message in store.pull(most)]


def _from_queue(replay: innet.Replay, messages: MessageFormat, most: int) -> Pull:
    def pull() -> list[dict[str, NDArray[Any]]]:
        taken: list[dict[str, NDArray[Any]]] = []
        while len(taken) < most:
            wanted = min(MAX_PULLED, most - len(taken))
            try:
                batch = replay.sample(QUEUE, wanted, ROW, allow_short=True, timeout=0)
            except (innet.errors.DeadlineError, innet.errors.EmptyError):
                break
            columns = {name: getattr(batch, _PREFIX + name) for name in messages.layout.names or ()}
            taken += [{name: column[index, 0] for name, column in columns.items()} for index in range(len(batch))]
            if len(batch) < wanted:
                break
        return taken

    return pull


class _PullingLearner:
    """A learner with a replay of its own."""

    def __init__(self, messages: MessageFormat, own: innet.Replay, pull: Pull, publish: Publish) -> None:
        self._messages, self._own, self._pull = messages, own, pull
        self._reader = messages.reader(own)
        self._table = messages.table.name
        self.publish = publish

    def receive(self, clock: Clock) -> None:
        """Stores pushed messages in the learner's own replay."""
        taken = self._pull()
        clock.lap("pull")
        for message in taken:
            for writer, row in self._reader.rows(message):
                writer.append(**row)
            writer.flush()
        clock.lap("store")

    def sample(self, clock: Clock) -> Any:
        self.receive(clock)
        batch = self._own.sample(self._table, BATCH, self._messages.view)
        clock.lap("sample")
        return self._messages.batch(batch.as_dict())

    def update(self, keys: Any, priorities: NDArray[np.float64]) -> None:
        self._own.update_priorities(self._table, keys, priorities)


class _ServerSampledLearner:
    """A learner whose batches the server samples."""

    def __init__(
        self,
        messages: MessageFormat,
        replay: innet.Replay,
        publish: Publish,
        sample: Callable[[], innet.Batch],
        *,
        wait: bool,
    ) -> None:
        self._messages, self._replay, self._sample, self._wait = messages, replay, sample, wait
        self._table = messages.table.name
        self.publish = publish
        """Sets the parameters."""

    def receive(self, clock: Clock) -> None:
        """Does nothing: the experience is on the server."""

    def sample(self, clock: Clock) -> Any:
        """Returns a batch as arrays, with its keys; times the steps of sampling."""
        batch = self._sample()
        clock.lap("sample")
        return self._messages.batch(batch.as_dict())

    def update(self, keys: Any, priorities: NDArray[np.float64]) -> None:
        """Sets the priorities of a batch."""
        self._replay.update_priorities(self._table, keys, priorities, wait=self._wait)


LearnerClient = _PullingLearner | _ServerSampledLearner
"""The learner's connection."""
