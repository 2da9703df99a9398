"""The baseline: a Redis between actors and learner, as Furukawa and Matsutani (2022) and their like have it.

Actors append messages of experience to a list and read the parameters from a key. The learner has a thread that takes
every message off the list and puts it into a replay memory in its own process, where it draws. A message and the
parameters are the arrays of a `Layout` as they lie in memory, packed with LZ4 where the format says so.

Needs the extra `redis`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import lz4.block
import redis
from loguru import logger
from numpy.typing import NDArray
from redis.connection import Encoder, PythonRespSerializer

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.bench.messages import Format, Layout
from innet_drl.train.errors import ConfigurationError, RedisError

POLL_SECONDS = 0.01
"""From one look at the list to the next, where it had nothing, or was too long."""
ANSWER_SECONDS = 60.0
"""A Redis that has not answered by then is lost."""
READ_BYTES = 1 << 18
"""Received at a time: values have megabytes, and redis-py's own 64 KiB cost a tenth more."""
PULLED = 8
"""Messages that are taken off the list at a time, at most."""
_VERSION = Layout({"version": ("uint64", ())})


class SharedParameters:
    """One version of parameters, as `innet_drl.Parameters`."""

    def __init__(self, version: int, tensors: dict[str, NDArray[Any]]) -> None:
        self.version = version
        self.tensors = tensors


class RedisMemory:
    """The experience list and the parameters of one run on a Redis.

    Args:
        address: `redis://host:port` or `redis://host:port/database`.
        run: Tells the keys of runs apart.
        password: Of the Redis; empty for none.
        parameters: Names, dtypes and shapes of the parameters.

    Raises:
        ConfigurationError: No such address.
        RedisError: Nobody answers there, or asks for another password.
    """

    def __init__(self, address: str, run: str, password: str, parameters: Mapping[str, NDArray[Any]]) -> None:
        _check(address)
        self.address = address
        self._experience = f"innet:{run}:experience"
        self._parameters = f"innet:{run}:parameters"
        arrays = {name: (array.dtype.name, array.shape) for name, array in parameters.items()}
        self._layout = Layout({**_VERSION.columns, **arrays})
        self._client = redis.Redis.from_url(
            address,
            password=password or None,
            socket_timeout=ANSWER_SECONDS,
            socket_read_size=READ_BYTES,
            # hiredis, the default where it is installed, copies what it packs: a push of 45 MB takes twice as long.
            command_packer=PythonRespSerializer(6_000, Encoder("utf-8", "strict", False).encode),
            # A command whose answer was lost would be sent twice: a push is not to count twice.
            retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
        )
        self._ask(self._client.ping)

    def version(self) -> str:
        """The release of the Redis."""
        return str(self._ask(lambda: self._client.info("server"))["redis_version"])

    def holds_experience(self) -> bool:
        """Whether anybody pushed under this run's name."""
        return bool(self._ask(lambda: self._client.exists(self._experience, self._parameters)))

    def clear(self) -> None:
        """Removes what the run has there."""
        self._ask(lambda: self._client.delete(self._experience, self._parameters))

    def push(self, message: bytes | bytearray) -> int:
        """Appends a message, and returns how many there are."""
        # redis-py copies a value into its command, unless it is a memoryview.
        return int(self._ask(lambda: self._client.rpush(self._experience, memoryview(message))))

    def waiting(self) -> int:
        """Messages that nobody has taken yet."""
        return int(self._ask(lambda: self._client.llen(self._experience)))

    def pull(self, most: int = PULLED) -> list[bytes]:
        """Takes the oldest messages off the list: none where there are none."""
        pipeline = self._client.pipeline(transaction=True)
        pipeline.lrange(self._experience, 0, most - 1)
        pipeline.ltrim(self._experience, most, -1)
        messages: list[bytes] = self._ask(pipeline.execute)[0]
        return messages

    def put_parameters(self, version: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Stores the parameters in place of those that were there."""
        value = bytearray(self._layout.nbytes)
        for name, array in self._layout.views(value).items():
            array[...] = version if name == "version" else tensors[name]
        self._ask(lambda: self._client.set(self._parameters, memoryview(value)))

    def get_parameters(self, name: str, newer_than: int = 0) -> SharedParameters | None:
        """The parameters, or `None` where they are not newer."""
        head = self._ask(lambda: self._client.getrange(self._parameters, 0, _VERSION.nbytes - 1))
        if not head or int(self._views(_VERSION, head, whole=False)["version"]) <= newer_than:
            return None
        value = self._ask(lambda: self._client.get(self._parameters))
        if value is None:
            return None
        tensors = self._views(self._layout, value)
        return SharedParameters(int(tensors.pop("version")), tensors)

    def _views(self, layout: Layout, value: bytes, *, whole: bool = True) -> dict[str, NDArray[Any]]:
        if len(value) < layout.nbytes or (whole and len(value) > layout.nbytes):
            raise self.foreign(f"{self._parameters} has {len(value):,} bytes in place of {layout.nbytes:,}")
        return layout.views(value)

    def foreign(self, what: str) -> RedisError:
        """The error of a value that this run did not write."""
        return RedisError(
            f"{self.address} holds something that this run did not write ({what}): choose another --out, whose last "
            "part names the keys, or delete them"
        )

    def close(self) -> None:
        """Ends the connections."""
        self._client.close()

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except redis.AuthenticationError as error:
            raise RedisError(
                f"{self.address} asks for a password, or for another one ({error}): set INNET_TOKEN"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise RedisError(
                f"the Redis at {self.address} does not answer ({error}): see that it runs and can be reached"
            ) from error
        except redis.RedisError as error:
            raise RedisError(f"the Redis at {self.address} refused a command ({error})") from error


def _check(address: str) -> None:
    try:
        parts = urlsplit(address)
        usable = parts.scheme == "redis" and bool(parts.hostname) and (parts.port or 0) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"--replay {address}: it is redis://host:port, with the port of the Redis")
    if parts.password or parts.username:
        raise ConfigurationError(
            "--replay redis://...: leave the password away and set INNET_TOKEN: a run's settings are written to its "
            "config.yaml"
        )
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise ConfigurationError(f"--replay {address}: what comes after the port is the number of a database")


class Pushes:
    """An actor's way to the list.

    Args:
        memory: Where messages go.
        messages: Their format.
        most_waiting: Messages that may wait on the list. While there are more, the actor does not play on: so the
            learner's replay ratio holds back the actors, and the list stays short.
    """

    def __init__(self, memory: RedisMemory, messages: Format, most_waiting: int) -> None:
        self._memory = memory
        self._packed = messages.packed
        self._most_waiting = most_waiting

    def push(self, message: bytearray) -> None:
        """Hands over a message."""
        waiting = self._memory.push(lz4.block.compress(message, store_size=False) if self._packed else message)
        while waiting > self._most_waiting:
            time.sleep(POLL_SECONDS)
            waiting = self._memory.waiting()


class RedisWriter:
    """What an actor writes to, in place of `innet_drl.Writer`: collects rows and pushes them.

    Args:
        memory: Where messages go.
        messages: Their format.
        actor: Index of the actor.
        most_waiting: Messages that may wait on the list.
    """

    def __init__(self, memory: RedisMemory, messages: Format, actor: int, most_waiting: int) -> None:
        self._pushes = Pushes(memory, messages, most_waiting)
        self._collector = messages.collector(actor)
        self._buffer = bytearray(messages.layout.nbytes)
        self._arrays = messages.layout.views(self._buffer)

    def append(self, **row: Any) -> None:
        """Takes a row, and pushes what is complete with it."""
        self._collector.add(row)
        while self._collector.take(self._arrays):
            self._pushes.push(self._buffer)

    def flush(self) -> None:
        """Nothing is under way: a push is answered before `append` returns."""

    def close(self, timeout: float | None = None) -> None:
        """Drops what does not fill a message."""


class RedisReplay:
    """The learner's side: its own replay, filled from the list by a thread. Use it as a context manager.

    Args:
        memory: The list and the parameters.
        messages: The format of the messages.
        replay: The learner's own replay, which has the format's table.
        publications: Of the parameters, in earlier sessions.
    """

    def __init__(self, memory: RedisMemory, messages: Format, replay: innet.Replay, publications: int) -> None:
        self._memory = memory
        self._messages = messages
        self._replay = replay
        self._publications = publications
        self._failure: Exception | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._pull, name="redis pull", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def put_parameters(self, name: str, tensors: Mapping[str, Any]) -> int:
        """Publishes the parameters."""
        self._publications += 1
        self._memory.put_parameters(self._publications, tensors)
        return self._publications

    def stats(self) -> dict[str, Any]:
        """Of the learner's own replay."""
        return self._replay.stats()

    def save(self, path: Any) -> None:
        """Writes the learner's own replay to a file."""
        self._replay.save(path)

    def update_priorities(self, table: str, key: Any, priority: Any) -> innet.UpdateReceipt:
        """Sets priorities in the learner's own replay."""
        return self._replay.update_priorities(table, key, priority)

    @contextlib.contextmanager
    def batches(
        self, table: str, count: int, view: Any, *, beta: float, prefetch: int, device: str, timeout: float | None
    ) -> Iterator[Iterator[TorchBatch]]:
        """Batches of the learner's own replay, with the view of its format in place of `view`.

        What the thread failed with is raised by the next batch.
        """
        own = self._messages.view
        with self._replay.batches(
            table, count, own, beta=beta, prefetch=prefetch, device=device, timeout=timeout
        ) as batches:
            yield _Drawn(batches, self._messages, lambda: self._failure)

    def _pull(self) -> None:
        try:
            intake = self._messages.intake(self._replay)
            while not self._stopped.is_set():
                messages = self._memory.pull()
                for message in messages:
                    for writer, row in intake.appends(unpack(self._memory, self._messages, message)):
                        self._append(writer, row)
                if not messages:
                    self._stopped.wait(POLL_SECONDS)
        except Exception as error:
            self._failure = error

    def _append(self, writer: innet.Writer, row: dict[str, Any]) -> None:
        """Waits for the replay ratio, and for nothing once the run has ended."""
        while not self._stopped.is_set():
            try:
                writer.append(**row, timeout=10 * POLL_SECONDS)
            except innet.errors.DeadlineError:
                logger.trace("the list waits for the replay ratio")
            else:
                return


def unpack(memory: RedisMemory, messages: Format, message: bytes) -> dict[str, NDArray[Any]]:
    """The arrays of a message that was taken off the list.

    Raises:
        RedisError: It is of another format.
    """
    size = messages.layout.nbytes
    if messages.packed:
        try:
            message = lz4.block.decompress(message, uncompressed_size=size)
        except lz4.block.LZ4BlockError as error:
            raise memory.foreign(f"a message of {len(message):,} bytes does not unpack") from error
    if len(message) != size:
        raise memory.foreign(f"a message has {len(message):,} bytes in place of {size:,}")
    return messages.layout.views(message)


class _Drawn:
    """Batches as the learner reads them, for as long as the thread that fills the memory has not failed."""

    def __init__(
        self, batches: Iterator[TorchBatch], messages: Format, failure: Callable[[], Exception | None]
    ) -> None:
        self._batches, self._messages, self._failure = batches, messages, failure

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> TorchBatch:
        failure = self._failure()
        if failure is not None:
            raise failure
        batch = next(self._batches)
        return TorchBatch(len(batch), self._messages.batch(batch))


def connect(
    address: str, run: str, password: str, parameters: Mapping[str, NDArray[Any]], *, fresh: bool
) -> RedisMemory:
    """The learner's connection, to keys of which no old message or parameter is left.

    Raises:
        ConfigurationError: A new run finds the keys of another one.
    """
    memory = RedisMemory(address, run, password, parameters)
    if fresh and memory.holds_experience():
        memory.close()
        raise ConfigurationError(
            f"{address} holds the keys of another run named {run!r}: go on with that run (--resume), choose another "
            f"--out, whose last part names the keys, or delete them (redis-cli del innet:{run}:experience "
            f"innet:{run}:parameters)"
        )
    memory.clear()
    return memory
