"""Redis 7 with its own Python client: the paper's baseline, a list of experience that a learner pulls from.

An actor appends a push of transitions as one value. Redis shares no frames between stacks and has no priorities: a
transition is sent and stored as two whole stacks, and the learner samples by priority from its own arrays.
"""

from __future__ import annotations

from typing import Any

import hiredis
import numpy as np
import redis
from numpy.typing import NDArray
from redis._parsers import _RESP3Parser

from benchmarks import recording
from benchmarks.recording import STACK, STREAMS
from benchmarks.services import start_redis
from benchmarks.systems import Address, Service, free_port
from innet_drl.redis import client as redis_client
from innet_drl.redis.messages import layout_of, views

VERSION = f"Redis 7, redis-py {redis.__version__}, hiredis {hiredis.__version__}"
SWEEP: dict[str, list[dict[str, Any]]] = {
    "Writer": [
        {"transitions_a_push": 50},
        {"transitions_a_push": 50, "protocol": 2},
        {"transitions_a_push": 50, "pushes_a_pipeline": 4},
        {"transitions_a_push": 50, "hiredis_packs": True},
    ],
    "baseline": [
        {"pushes_a_range": 1},
        {"pushes_a_range": 1, "protocol": 2},
        {"pushes_a_range": 7},
        {"pushes_a_range": 21},
        {"pushes_a_range": 1, "read_size": 1 << 16},
        {"pushes_a_range": 1, "read_size": 1 << 20},
        {"pushes_a_range": 1, "read_size": 1 << 22},
        {"pushes_a_range": 1, "hiredis_parses": False},
    ],
    "get": [
        {},
        {"read_size": 1 << 16},
        {"read_size": 1 << 20},
        {"read_size": 1 << 22},
        {"protocol": 2},
        {"hiredis_parses": False},
    ],
    "put": [{}, {"protocol": 2}, {"hiredis_packs": True}],
}
PREPARED = 2_000
"""Distinct transitions of an actor: 113 MB, made before the measurement."""
BATCHES = 100
"""Upper bound on the learner's replay, a copy of Redis' data, in batches."""
LIST, PARAMETERS, CAPACITY = "experience", "parameters", "capacity"
COLUMNS = {
    "reward": ("float32", ()),
    "discount": ("float32", ()),
    "action": ("uint8", ()),
    **dict.fromkeys(("observation", "next_observation"), ("uint8", (STACK, 84, 84))),
}
TRANSITION = layout_of(COLUMNS).itemsize


def serve(capacity: int) -> Service:
    address = ("127.0.0.1", free_port())
    process = start_redis(address[1])
    client = connect(address)
    client.set(CAPACITY, capacity)

    def inserted() -> int:
        pushes = client.info("commandstats").get("cmdstat_rpush", {}).get("calls", 0)
        return int(pushes) * len(unpack(client.lindex(LIST, 0))["action"]) if pushes else 0

    return Service(address, process, inserted)


def connect(
    address: Address,
    protocol: int = 3,
    hiredis_packs: bool = False,
    hiredis_parses: bool = True,
    read_size: int = redis_client.READ_BYTES,
) -> Any:
    """Makes a client, by default with the settings of the baseline of `python -m benchmarks paper`.

    Args:
        address: Address of the server.
        protocol: Version of Redis' protocol, 2 or 3.
        hiredis_packs: Whether hiredis encodes commands.
        hiredis_parses: Whether hiredis decodes replies, as it does by default where it is installed.
        read_size: Bytes received at a time.
    """
    options: dict[str, Any] = {} if hiredis_parses else {"parser_class": _RESP3Parser}
    if hiredis_packs:
        options["command_packer"] = None
    return redis_client.connect(
        "redis://{}:{}".format(*address),
        protocol=protocol,
        socket_read_size=read_size,
        **options,
    )


def unpack(value: bytes | bytearray) -> dict[str, NDArray[Any]]:
    """The columns of a push, as views of its bytes."""
    count = len(value) // TRANSITION
    return views(layout_of({name: (dtype, (count, *shape)) for name, (dtype, shape) in COLUMNS.items()}), value)


class Writer:
    def __init__(
        self,
        address: Address,
        streams: int = STREAMS,
        transitions_a_push: int = 50,
        pushes_a_pipeline: int = 1,
        **settings: Any,
    ) -> None:
        self._client = connect(address, **settings)
        self._pipeline = self._client.pipeline(transaction=False)
        self._transitions = recording.load().stacked(PREPARED)
        self._a_push, self._a_pipeline = transitions_a_push, pushes_a_pipeline
        self._keep = max(1, int(self._client.get(CAPACITY)) // transitions_a_push)
        # A buffer for each push of a pipeline.
        self._buffers = [bytearray(transitions_a_push * TRANSITION) for _ in range(pushes_a_pipeline)]
        self._columns = [unpack(buffer) for buffer in self._buffers]
        self._begin = self._collected = self._waiting = 0

    def push(self, count: int) -> None:
        """Sends full pushes; the remaining transitions wait for the next call."""
        self._collected += count
        while self._collected >= self._a_push:
            self._collected -= self._a_push
            for name, column in self._columns[self._waiting].items():
                column[:] = self._transitions[name][self._begin : self._begin + self._a_push]
            self._begin = (self._begin + self._a_push) % PREPARED
            self._pipeline.rpush(LIST, memoryview(self._buffers[self._waiting]))
            self._pipeline.ltrim(LIST, -self._keep, -1)
            self._waiting += 1
            if self._waiting == self._a_pipeline:
                self.flush()

    def flush(self) -> None:
        if self._waiting:
            self._pipeline.execute()
            self._waiting = 0

    def close(self) -> None:
        self._client.close()


class Baseline:
    """The learner of the paper's baseline: pulls the actors' pushes and samples from its own replay by priority.

    It reads the parts of the list in turn without trimming them. Otherwise an actor on the same cores would have to
    push as fast as the learner pulls. Redis is thus spared the trimming.
    """

    def __init__(
        self, address: Address, batch: int, pull: int = 1_024, pushes_a_range: int = 1, **settings: Any
    ) -> None:
        self._client = connect(address, **settings)
        self._batch, self._pull, self._a_range = batch, pull, pushes_a_range
        self._random = np.random.default_rng(0)
        self._a_push = len(unpack(self._client.lindex(LIST, 0))["action"])
        self._pushes = min(int(self._client.llen(LIST)), BATCHES * batch // self._a_push)
        items = self._pushes * self._a_push
        self._replay: dict[str, NDArray[Any]] = {
            name: np.empty((items, *shape), dtype) for name, (dtype, shape) in COLUMNS.items()
        }
        # After the exponent of 0.6.
        self._priorities = np.ones(items)
        self._place = self._due = 0
        self._store(0, self._pushes)

    def sample(self) -> dict[str, NDArray[Any]]:
        # Whole pushes are pulled, on average `pull` transitions for each sample.
        self._due += self._pull
        pushes, self._due = divmod(self._due, self._a_push)
        if self._place + pushes > self._pushes:
            self._place = 0
        self._store(self._place, pushes)
        self._place += pushes

        up_to = np.cumsum(self._priorities)
        index = np.searchsorted(up_to, self._random.random(self._batch) * up_to[-1], side="right")
        return {name: column[index] for name, column in self._replay.items()}

    def _store(self, first: int, pushes: int) -> None:
        """Pulls pushes into the replay, with the priority of new transitions."""
        begin = first * self._a_push
        for place in range(first, first + pushes, self._a_range):
            last = min(place + self._a_range, first + pushes) - 1
            for value in self._client.lrange(LIST, place, last):
                end = begin + self._a_push
                for name, column in unpack(value).items():
                    self._replay[name][begin:end] = column
                self._priorities[begin:end] = 1.0
                begin = end

    def close(self) -> None:
        self._client.close()


READERS = {"baseline": Baseline}


class Store:
    def __init__(self, address: Address, **settings: Any) -> None:
        self._client = connect(address, **settings)

    def put(self, weights: NDArray[np.float32]) -> None:
        self._client.set(PARAMETERS, weights.view(np.uint8).data)

    def get(self) -> NDArray[Any]:
        return np.frombuffer(self._client.get(PARAMETERS), np.float32)

    def close(self) -> None:
        self._client.close()
