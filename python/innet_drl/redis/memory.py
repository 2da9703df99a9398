"""The baseline: a memory in the learner's process, with Redis as the transport of experience.

A thread of the learner pops every message of the Redis list and appends its rows to a replay memory in this process,
from which the learner samples.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from typing import Any, Self

from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.redis.messages import MessageFormat, MessageReader, views
from innet_drl.redis.store import POLL_SECONDS, RedisParameters, RedisStore, parse_address
from innet_drl.torch_batches import TorchBatch
from innet_drl.train.errors import ConfigurationError, ReplayMemoryError
from innet_drl.train.memory import MemorySettings, ReplayMemory, make_replay
from innet_drl.train.observe.metrics import ActorReport
from innet_drl.train.published_run import RunPublisher, decoded_report, encoded_report
from innet_drl.train.settings.slices import ReplaySettings

logger = logging.getLogger(ReplayMemory.__module__)
"""The logger of the interface, which the console of a run shows from level INFO on."""


class RedisMemory(ReplayMemory):
    """The memory of `redis://` addresses, with a replay of the learner's own, which no other process reaches."""

    in_learner = True

    def __init__(self, store: RedisStore, settings: MemorySettings, own: innet.Replay | None) -> None:
        self._messages = _message_format(settings)
        super().__init__(own, settings, settings.address, self._messages.view)
        self._store = store
        self._version = 0

    @classmethod
    def check(cls, config: ReplaySettings, token: str) -> None:
        """Connects to the Redis. Refuses several learners and `max_version_lag`, which Redis does not support."""
        for name, only in (("learners", 1), ("max_version_lag", 0)):
            if (value := getattr(config, name)) != only:
                raise ConfigurationError(f"{name} {value}: it must be {only} with replay {config.replay}")
        RedisStore(config.replay, "", token, {}).close()

    @classmethod
    @contextlib.contextmanager
    def create(cls, settings: MemorySettings) -> Iterator[Self]:
        """Opens the learner's side on empty keys, which it deletes at the end.

        Raises:
            ConfigurationError: A new run finds the keys of another one.
        """
        with cls._connect(settings) as store:
            if not settings.resumed and store.holds_experience():
                name = settings.table.name
                raise ConfigurationError(
                    f"{settings.address} holds the keys of another run named {name!r}: continue that run (resume), "
                    "choose another folder, whose last part names the keys, or delete them (redis-cli del "
                    f"innet:{name}:experience innet:{name}:parameters)"
                )
            store.clear()
            with make_replay(settings, _message_format(settings).table) as own:
                logger.info(
                    "experience and parameters go through the Redis at %s, the learner samples here", settings.address
                )
                yield cls(store, settings, own)
            # The Redis may have ended.
            with contextlib.suppress(ReplayMemoryError):
                store.clear()

    @classmethod
    @contextlib.contextmanager
    def join(cls, settings: MemorySettings) -> Iterator[Self]:
        """Opens an actor's side."""
        with cls._connect(settings) as store:
            yield cls(store, settings, None)

    @staticmethod
    def _connect(settings: MemorySettings) -> contextlib.closing[RedisStore]:
        store = RedisStore(settings.address, settings.table.name, settings.token, settings.parameters)
        return contextlib.closing(store)

    def writer(self, actor: int) -> RedisWriter:
        """Opens the writer of one actor's environments."""
        return RedisWriter(self._store, self._messages, actor, most_waiting=self._settings.config.playing_actors)

    def get_parameters(self, newer_than: int = 0) -> RedisParameters | None:
        """Returns the parameters, or `None` if their version is not above `newer_than`."""
        return self._store.get_parameters(newer_than)

    def put_parameters(self, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Publishes parameters."""
        self._version += 1
        self._store.put_parameters(self._version, tensors)

    def write_report(self, report: ActorReport, timeout: float) -> None:
        """Sends the learner an actor's report."""
        self._store.push_report(encoded_report(report))

    def published_run(self) -> contextlib.nullcontext[RunPublisher]:
        """The learner's side of the reports."""
        return contextlib.nullcontext(_Reports(self._store, self.replay, self._name, self._settings.config))

    @contextlib.contextmanager
    def batches(
        self, device: str, timeout: float, writers_timeout: float | None = None
    ) -> Iterator[Iterator[TorchBatch]]:
        """Samples batches of the learner's own replay, which a thread fills until the iterator is closed.

        An error of the thread is raised by the next batch.
        """
        filler = _Filler(self._store, self._messages, self.replay)
        with filler, super().batches(device, timeout, writers_timeout) as batches:

            def next_batch() -> TorchBatch:
                if filler.error is not None:
                    raise filler.error
                batch = next(batches)
                return TorchBatch(len(batch), self._messages.batch(batch.as_dict()))

            # Unlike a generator, it continues after a `DeadlineError`.
            yield iter(next_batch, None)


def _message_format(settings: MemorySettings) -> MessageFormat:
    _, kind, transitions = parse_address(settings.address)
    return kind(settings, transitions)


class _Reports(RunPublisher):
    """Reports that are in a list of the Redis."""

    def __init__(self, store: RedisStore, replay: innet.Replay, name: str, config: ReplaySettings) -> None:
        super().__init__(replay, name, config)
        self._store = store

    def reports(self) -> list[ActorReport]:
        """Returns new reports without waiting."""
        return [report for each in self._store.pull_reports() if (report := decoded_report(each)) is not None]


class RedisWriter:
    """An actor's writer, instead of `innet_drl.Writer`: collects rows in messages and pushes them.

    The actor waits while the list is longer than `most_waiting`.
    """

    def __init__(self, store: RedisStore, messages: MessageFormat, actor: int, most_waiting: int) -> None:
        self._store, self._messages, self._most_waiting = store, messages, most_waiting
        self._builder = messages.builder(actor)
        self._buffer = bytearray(messages.layout.itemsize)
        self._arrays = views(messages.layout, self._buffer)

    def append(self, *, timeout: float | None = None, **row: Any) -> None:
        """Takes a row, and pushes the messages that it completes.

        Raises:
            ConfigurationError: The row has last observations of a SAME_STEP environment.
        """
        if "final_frame" in row:
            raise ConfigurationError(
                "environment: a Redis takes environments of the mode NEXT_STEP, and this one has SAME_STEP: make it in "
                "the other mode, or use another replay"
            )
        self._builder.add(row)
        while self._builder.fill(self._arrays):
            self._store.send(self._messages, self._buffer, self._most_waiting)

    def flush(self, timeout: float | None = None) -> None:
        """Does nothing: `append` waits for the answer of each push."""

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
        for writer, row in reader.rows(self._store.unpack(self._messages, message)):
            # Waits for the replay ratio until the run ends.
            while not self._stopped.is_set():
                with contextlib.suppress(innet.errors.DeadlineError):
                    writer.append(**row, timeout=10 * POLL_SECONDS)
                    break
