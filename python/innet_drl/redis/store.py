"""The experience list and the parameters of a run on Redis, as in Furukawa and Matsutani (2022) and others.

Actors append messages of experience to a list and read the parameters from a key; the learner pops messages and sets
the key. The parameters are concatenated arrays, uncompressed.

Needs the extra `redis`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import lz4.block
import numpy as np
import redis
from numpy.typing import NDArray

from innet_drl.redis.client import connect
from innet_drl.redis.messages import FORMATS, TRANSITIONS, Arrays, MessageFormat, layout_of, views
from innet_drl.train.errors import ConfigurationError, ReplayMemoryError

POLL_SECONDS = 0.01
"""Period at which an empty list, or one above its limit, is checked again."""
MAX_PULLED = 8
"""Largest number of messages popped at a time."""
MAX_REPORTS = 4096
"""Largest number of reports popped at a time."""
_VERSION = {"version": ("uint64", ())}


@dataclass(frozen=True)
class RedisParameters:
    """One version of parameters, like `innet_drl.Parameters`."""

    version: int
    tensors: dict[str, NDArray[Any]]


class RedisStore:
    """A connection to the experience list and the parameters of one run.

    Args:
        address: `redis://host:port` or `redis://host:port/database`; options after a question mark are not used here.
        run: Name of the run, which is part of its keys.
        password: Password of the Redis; empty for none.
        parameters: Tensors of the names, dtypes and shapes of the parameters.

    Raises:
        ConfigurationError: The address is invalid.
        ReplayMemoryError: The Redis does not answer, or refuses the password.
    """

    def __init__(self, address: str, run: str, password: str, parameters: Mapping[str, NDArray[Any]]) -> None:
        server, *_ = parse_address(address)
        self.address = address
        self._experience = f"innet:{run}:experience"
        self._parameters = f"innet:{run}:parameters"
        self._reports = f"innet:{run}:reports"
        arrays = {name: (array.dtype.name, array.shape) for name, array in parameters.items()}
        self._layout = layout_of({**_VERSION, **arrays})
        self._client = connect(server, password)
        self._call(self._client.ping)

    def holds_experience(self) -> bool:
        """Whether keys of this run's name exist."""
        return bool(self._call(lambda: self._client.exists(self._experience, self._parameters)))

    def clear(self) -> None:
        """Removes the run's keys."""
        self._call(lambda: self._client.delete(self._experience, self._parameters, self._reports))

    def pull(self, most: int = MAX_PULLED) -> list[bytes]:
        """Pops the oldest messages of the list; none if it is empty."""
        return self._pop(self._experience, most)

    def _pop(self, key: str, most: int) -> list[bytes]:
        pipeline = self._client.pipeline(transaction=True)
        pipeline.lrange(key, 0, most - 1)
        pipeline.ltrim(key, most, -1)
        messages: list[bytes] = self._call(pipeline.execute)[0]
        return messages

    def push_report(self, report: bytes) -> None:
        """Appends an actor's report."""
        self._call(lambda: self._client.rpush(self._reports, report))

    def pull_reports(self) -> list[bytes]:
        """Pops the actors' reports, the oldest first."""
        return self._pop(self._reports, MAX_REPORTS)

    def put_parameters(self, version: int, tensors: Mapping[str, NDArray[Any]]) -> None:
        """Replaces the parameters."""
        value = bytearray(self._layout.itemsize)
        for name, array in views(self._layout, value).items():
            array[...] = version if name == "version" else tensors[name]
        self._call(lambda: self._client.set(self._parameters, memoryview(value)))

    def get_parameters(self, newer_than: int = 0) -> RedisParameters | None:
        """Returns the parameters, or `None` if their version is not above `newer_than`."""
        version = layout_of(_VERSION)
        head = self._call(lambda: self._client.getrange(self._parameters, 0, version.itemsize - 1))
        if not head or int(self._views(version, head, self._parameters)["version"]) <= newer_than:
            return None
        value = self._call(lambda: self._client.get(self._parameters))
        if value is None:
            return None
        tensors = self._views(self._layout, value, self._parameters)
        return RedisParameters(int(tensors.pop("version")), tensors)

    def _views(self, layout: np.dtype[np.void], value: bytes, what: str) -> Arrays:
        if len(value) != layout.itemsize:
            raise self._foreign(f"{what} has {len(value):,} bytes instead of {layout.itemsize:,}")
        return views(layout, value)

    def send(self, messages: MessageFormat, message: bytearray, most_waiting: int) -> None:
        """Pushes a message, and waits while the list is longer than `most_waiting`.

        This backpressure makes actors follow the learner's replay ratio, and keeps the list short.
        """
        # redis-py copies a value into its command, unless it is a memoryview.
        value = memoryview(lz4.block.compress(message, store_size=False) if messages.compressed else message)
        waiting = self._call(lambda: self._client.rpush(self._experience, value))
        while waiting > most_waiting:
            time.sleep(POLL_SECONDS)
            waiting = self._call(lambda: self._client.llen(self._experience))

    def unpack(self, messages: MessageFormat, message: bytes) -> Arrays:
        """Returns the arrays of a message from the list.

        Raises:
            ReplayMemoryError: The message has another format.
        """
        if messages.compressed:
            try:
                message = lz4.block.decompress(message, uncompressed_size=messages.layout.itemsize)
            except lz4.block.LZ4BlockError as error:
                raise self._foreign(f"a message of {len(message):,} bytes does not unpack") from error
        return self._views(messages.layout, message, "a message")

    def _foreign(self, what: str) -> ReplayMemoryError:
        """Makes the error of a value that this run did not write."""
        return ReplayMemoryError(
            f"{self.address} holds something that this run did not write ({what}): choose another folder, whose last "
            "part names the keys, or delete them"
        )

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _call(self, command: Callable[[], Any]) -> Any:
        try:
            return command()
        except redis.AuthenticationError as error:
            raise ReplayMemoryError(
                f"{self.address} asks for a password, or for another one ({error}): set INNET_TOKEN"
            ) from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise ReplayMemoryError(
                f"the Redis at {self.address} does not answer ({error}): see that it runs and can be reached"
            ) from error
        except redis.RedisError as error:
            raise ReplayMemoryError(f"the Redis at {self.address} refused a command ({error})") from error


def parse_address(address: str) -> tuple[str, type[MessageFormat], int]:
    """Returns the address of the Redis, and the format and the transitions of a message, options after a question mark.

    Raises:
        ConfigurationError: The address or an option is invalid.
    """
    try:
        parts = urlsplit(address)
        usable = parts.scheme == "redis" and bool(parts.hostname) and (parts.port or 0) > 0
    except ValueError:
        usable = False
    if not usable:
        raise ConfigurationError(f"replay {address}: it is redis://host:port, with the port of the Redis")
    if parts.password or parts.username:
        raise ConfigurationError(
            "replay redis://...: omit the password and set INNET_TOKEN: settings are written to the run's config.yaml"
        )
    if parts.path.strip("/") and not parts.path.strip("/").isdecimal():
        raise ConfigurationError(f"replay {address}: the path after the port is the number of a database")
    given = dict(parse_qsl(parts.query, keep_blank_values=True))
    message, transitions = given.pop("message", "frames"), given.pop("transitions", str(TRANSITIONS))
    if given or message not in FORMATS or not transitions.isdecimal() or int(transitions) < 1:
        raise ConfigurationError(
            f"replay {address}: the options are message={' or '.join(FORMATS)} and transitions, at "
            f"least 1: redis://host:port?message=stacks&transitions={TRANSITIONS}"
        )
    return urlunsplit(parts._replace(query="", fragment="")), FORMATS[message], int(transitions)
