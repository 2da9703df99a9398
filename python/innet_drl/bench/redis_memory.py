"""The baseline: a memory in the learner's process that a Redis relays experience to.

A thread of the learner takes every message off the Redis list and appends its rows to a replay memory in this
process, from which the learner samples.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.bench.messages import MessageFormat, MessageReader, message_format
from innet_drl.bench.redis_store import POLL_SECONDS, MessageSender, RedisParameters, RedisStore, unpack
from innet_drl.train.errors import ConfigurationError, RelayError
from innet_drl.train.memory import MemorySettings, make_replay

logger = logging.getLogger(__name__)


class RedisMemory:
    """An implementation of `innet_drl.train.memory.ReplayMemory` for `redis://` addresses."""

    def __init__(self, store: RedisStore, settings: MemorySettings, messages: MessageFormat) -> None:
        self.address = settings.address
        self._store = store
        self._settings = settings
        self._messages = messages
        self._name = settings.table.name
        self._own: innet.Replay | None = None
        """The learner's own replay; `None` in other processes."""
        self._version = 0

    @classmethod
    @contextlib.contextmanager
    def create(cls, settings: MemorySettings) -> Iterator[Self]:
        """Opens the learner's side, on keys without old messages or parameters, which go when it is closed.

        Raises:
            ConfigurationError: A new run finds the keys of another one.
        """
        messages = message_format(settings)
        with cls._connect(settings) as store:
            if not settings.resumed and store.holds_experience():
                name = settings.table.name
                raise ConfigurationError(
                    f"{settings.address} holds the keys of another run named {name!r}: go on with that run (--resume), "
                    f"choose another --out, whose last part names the keys, or delete them (redis-cli del "
                    f"innet:{name}:experience innet:{name}:parameters)"
                )
            store.clear()
            with make_replay(settings, messages.table) as own:
                logger.info(
                    "experience and parameters go through the Redis at %s, the learner draws here", settings.address
                )
                memory = cls(store, settings, messages)
                memory._own = own
                yield memory
            # The Redis may be gone by now.
            with contextlib.suppress(RelayError):
                store.clear()

    @classmethod
    @contextlib.contextmanager
    def join(cls, settings: MemorySettings) -> Iterator[Self]:
        """Opens an actor's side."""
        with cls._connect(settings) as store:
            yield cls(store, settings, message_format(settings))

    @staticmethod
    def _connect(settings: MemorySettings) -> contextlib.closing[RedisStore]:
        store = RedisStore(settings.address, settings.table.name, settings.token, settings.parameters)
        return contextlib.closing(store)

    def writer(self, actor: int) -> RedisWriter:
        """Opens the writer of one actor's environments."""
        return RedisWriter(self._store, self._messages, actor, most_waiting=self._settings.actors)

    def get_parameters(self, newer_than: int = 0) -> RedisParameters | None:
        """Returns the parameters, or `None` if their version is not above `newer_than`."""
        return self._store.get_parameters(newer_than)

    def put_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Publishes parameters."""
        self._version += 1
        self._store.put_parameters(self._version, tensors)

    @contextlib.contextmanager
    def batches(self, device: str, timeout: float) -> Iterator[Iterator[TorchBatch]]:
        """Samples batches of the learner's own replay, which a thread fills until the iterator is closed.

        An error of the thread is raised by the next batch.
        """
        settings, messages = self._settings, self._messages
        filler = _Filler(self._store, messages, self.replay)
        with (
            filler,
            self.replay.batches(
                self._name,
                settings.batch_size,
                messages.view,
                beta=settings.importance_exponent,
                prefetch=settings.prefetch,
                device=device,
                timeout=timeout,
            ) as batches,
        ):
            yield _FormattedBatches(batches, messages, lambda: filler.error)

    @property
    def replay(self) -> innet.Replay:
        """The learner's own replay."""
        assert self._own is not None, "an actor has no replay of its own"
        return self._own

    def update_priorities(self, keys: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        """Sets the priorities of sampled transitions."""
        self.replay.update_priorities(self._name, keys, priorities)

    def stats(self) -> dict[str, Any]:
        """Returns the counters of the learner's own table."""
        table: dict[str, Any] = self.replay.stats()["tables"][self._name]
        return table

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the learner's own replay to a file."""
        self.replay.save(path)

    def restore(self, path: str | PathLike[str]) -> None:
        """Reads a file that `save` wrote into the learner's own replay."""
        self.replay.restore(path)


class RedisWriter:
    """An actor's writer, in place of `innet_drl.Writer`: collects rows in messages and pushes them.

    Args:
        store: Connection to the list.
        messages: Format of the messages.
        actor: Index of the actor.
        most_waiting: Messages that may be on the list before the actor waits.
    """

    def __init__(self, store: RedisStore, messages: MessageFormat, actor: int, most_waiting: int) -> None:
        self._sender = MessageSender(store, messages, most_waiting)
        self._builder = messages.builder(actor)
        self._buffer = bytearray(messages.layout.nbytes)
        self._arrays = messages.layout.views(self._buffer)

    def append(self, **row: Any) -> None:
        """Takes a row, and pushes the messages that it completes."""
        self._builder.add(row)
        while self._builder.fill(self._arrays):
            self._sender.push(self._buffer)

    def flush(self) -> None:
        """Does nothing: pushes are answered before `append` returns."""

    def close(self, timeout: float | None = None) -> None:
        """Drops the rows of an incomplete message."""


class _Filler:
    """The thread that moves messages from the list to the learner's own replay."""

    def __init__(self, store: RedisStore, messages: MessageFormat, replay: innet.Replay) -> None:
        self.error: Exception | None = None
        self._store = store
        self._messages = messages
        self._replay = replay
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="redis pull", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            reader = self._messages.reader(self._replay)
            while not self._stopped.is_set():
                messages = self._store.pull()
                for message in messages:
                    self._insert(reader, message)
                if not messages:
                    self._stopped.wait(POLL_SECONDS)
        except Exception as error:
            self.error = error

    def _insert(self, reader: MessageReader, message: bytes) -> None:
        for writer, row in reader.rows(unpack(self._store, self._messages, message)):
            # Waits for the replay ratio, unless the run has ended.
            while not self._stopped.is_set():
                with contextlib.suppress(innet.errors.DeadlineError):
                    writer.append(**row, timeout=10 * POLL_SECONDS)
                    break


class _FormattedBatches:
    """Batches as the learner reads them, until the thread that fills the replay fails."""

    def __init__(
        self, batches: Iterator[TorchBatch], messages: MessageFormat, error: Callable[[], Exception | None]
    ) -> None:
        self._batches, self._messages, self._error = batches, messages, error

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TorchBatch:
        error = self._error()
        if error is not None:
            raise error
        batch = next(self._batches)
        return TorchBatch(len(batch), self._messages.batch(batch))
