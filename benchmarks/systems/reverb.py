"""DeepMind Reverb: its server in a process of its own, its writers for actors, its client and its dataset.

A transition is an item with its own priority, in one of the tables of `FORMS`:

| table | written by | an item |
| --- | --- | --- |
| `transitions` | `Client.writer` | one timestep: both stacks |
| `sequences` | `Client.writer` | the 7 timesteps of a window, which share their frames with other windows |
| `frames` | `Client.trajectory_writer` | the 7 frames of a window, which other windows share |
| `structured` | `Client.structured_writer` | as `frames`, made by a pattern in C++ |

Action, return and discount share the column `outcome`: each column costs a chunk, and a tensor in each sample.
"""

from __future__ import annotations

import functools
import importlib.metadata
import itertools
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import reverb
import tensorflow as tf
from numpy.typing import NDArray
from reverb import structured_writer as patterns

from benchmarks import recording
from benchmarks.recording import GAMMA, STACK, STREAMS, N, Row
from benchmarks.systems import Address, Service, free_port, wait_for

WINDOW = STACK + N
"""Frames of a transition: an observation and the one `N` steps later."""

DISTINCT_TRANSITIONS = 2_000
"""Whole transitions, made before the measurement: 113 MB."""

PARAMETERS = "parameters"

VERSION = f"Reverb {importlib.metadata.version('dm-reverb')}, TensorFlow {tf.__version__}"
WHOLE = {"form": "transitions", "chunk_length": 1}
"""Chunks of one item: a sample sends every chunk that it touches whole."""

SWEEP: dict[str, list[dict[str, Any]]] = {
    "Writer": [
        {"form": "sequences", "chunk_length": 14},
        {"form": "sequences", "chunk_length": 7},
        {"form": "sequences", "chunk_length": 14, "in_flight": 25},
        {"form": "sequences", "chunk_length": 14, "delta_encoded": True},
        {"form": "sequences", "chunk_length": 14, "streams": 1},
        {"form": "structured"},
        {"form": "frames", "chunk_length": 7},
        WHOLE,
    ],
    "Wire": [
        {"form": "frames", "chunk_length": 28},
        {"form": "frames", "chunk_length": 7},
        {"form": "structured"},
        {"form": "sequences", "chunk_length": 14},
        WHOLE,
    ],
    "Resident": [
        {"form": "frames", "chunk_length": 28},
        {"form": "frames", "chunk_length": 7},
        {"form": "sequences", "chunk_length": 14},
    ],
    "client": [
        {"writer_settings": WHOLE, "threads": 8},
        {"writer_settings": WHOLE, "threads": 1},
        {"writer_settings": {"form": "frames", "chunk_length": 7}, "threads": 8},
    ],
    "dataset": [
        {"writer_settings": WHOLE, "workers": 4},
        {"writer_settings": WHOLE, "workers": 1},
        {"writer_settings": WHOLE, "workers": 2, "in_flight": 128},
        {"writer_settings": WHOLE, "workers": 1, "datasets": 2},
        {"writer_settings": {"form": "frames", "chunk_length": 7}, "workers": 4},
        {"writer_settings": {"form": "sequences", "chunk_length": 7}, "workers": 2},
    ],
    "get": [{}, {"tensorflow": True}],
    "put": [{}, {"tensorflow": True}],
}
"""`Wire` and `Resident` have their own settings of `Writer`: the fastest pushes do not take the fewest bytes. Settings
of readers are arguments of the task `Sample`."""


def serve(capacity: int) -> Service:
    address = ("127.0.0.1", free_port())
    arguments = ["serve", str(address[1]), str(capacity)]
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.systems.reverb", *arguments])
    wait_for(address, process)
    client = reverb.Client(_target(address))
    return Service(address, process, lambda: _inserted(client))


def _serve(port: int, capacity: int) -> None:
    """Serves a table for each form and a table of the parameters; without checkpoints nothing is written to disk."""
    tables = [
        reverb.Table(
            name,
            sampler=reverb.selectors.Prioritized(0.6),
            remover=reverb.selectors.Fifo(),
            max_size=capacity,
            rate_limiter=reverb.rate_limiters.MinSize(1),
            signature=signature,
        )
        for name, signature in _signatures().items()
    ]
    parameters = reverb.Table(
        PARAMETERS,
        sampler=reverb.selectors.Uniform(),
        remover=reverb.selectors.Fifo(),
        max_size=1,
        rate_limiter=reverb.rate_limiters.MinSize(1),
    )
    reverb.Server([*tables, parameters], port=port).wait()


def _signatures() -> dict[str, dict[str, Any]]:
    """Shape of a sample of each table."""
    stack = tf.TensorSpec((STACK, 84, 84), tf.uint8)
    frames = tf.TensorSpec((WINDOW, 84, 84), tf.uint8)
    outcome = tf.TensorSpec((3,), tf.float32)
    return {
        "transitions": {"observation": stack, "next_observation": stack, "outcome": outcome},
        "sequences": {"frame": frames, "outcome": tf.TensorSpec((WINDOW, 3), tf.float32)},
        "frames": {"frame": frames, "outcome": outcome},
        "structured": {"frame": frames, "outcome": outcome, "priority": tf.TensorSpec((), tf.float32)},
    }


def _target(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _held(client: Any) -> dict[str, int]:
    """Items by table."""
    tables = client.server_info()
    return {name: int(tables[name].current_size) for name in FORMS}


def _inserted(client: Any) -> int:
    """Items inserted into all tables; each form uses one table."""
    tables = client.server_info()
    return sum(int(tables[name].rate_limiter_info.insert_stats.completed) for name in FORMS)


@dataclass(frozen=True)
class _Step:
    """Data of an actor at one step of an environment."""

    data: Row
    first: bool = False
    """Whether it is the first step of an episode."""
    whole: bool = False
    """Whether the last `WINDOW` frames are a transition, with action, return and discount in `outcome`."""


@functools.cache
def _steps(stream: int) -> list[_Step]:
    """The steps of one stream; each episode begins with the blank frames of its first stacks."""
    played = recording.load()
    rows = len(played.rows)
    whole = np.zeros(rows, bool)
    whole[[row + N for row, of in played.transitions if of == stream]] = True
    rewards = np.concatenate([np.zeros(N, np.float32), played.columns["reward"][:, stream]])
    actions = np.concatenate([np.zeros(N, np.uint8), played.columns["action"][:, stream]])
    blank = {"frame": np.zeros((84, 84), np.uint8), "outcome": np.zeros(3, np.float32)}
    steps: list[_Step] = []
    for row in range(rows):
        if played.columns["first"][row, stream]:
            steps += [_Step(blank, first=place == 0) for place in range(STACK - 1)]
        outcome = (actions[row], sum(GAMMA**k * rewards[row + k] for k in range(N)), GAMMA**N)
        data = {"frame": played.columns["frame"][row, stream], "outcome": np.array(outcome, np.float32)}
        steps.append(_Step(data, whole=bool(whole[row])))
    return steps


@functools.cache
def _transitions() -> list[Row]:
    whole = recording.load().stacked(DISTINCT_TRANSITIONS)
    outcomes = np.stack([whole[name].astype(np.float32) for name in ("action", "reward", "discount")], axis=1)
    columns = {**{name: whole[name] for name in ("observation", "next_observation")}, "outcome": outcomes}
    return [{name: column[index] for name, column in columns.items()} for index in range(DISTINCT_TRANSITIONS)]


class Writer:
    """Steps `streams` environments in turn. Each has its own Reverb writer, which keeps the history of one episode."""

    def __init__(
        self,
        address: Address,
        form: str = "sequences",
        streams: int = STREAMS,
        chunk_length: int = 2 * WINDOW,
        in_flight: int = 100,
        **settings: Any,
    ) -> None:
        client = reverb.Client(_target(address))
        self._feeds = [FORMS[form](client, stream, chunk_length, in_flight, **settings) for stream in range(streams)]
        self._turns = itertools.cycle(self._feeds)

    def push(self, count: int) -> None:
        """Steps environments until they have made `count` items."""
        while count:
            count -= next(self._turns).step()

    def flush(self) -> None:
        for feed in self._feeds:
            feed.flush()

    def close(self) -> None:
        for feed in self._feeds:
            feed.close()


class _Feed(ABC):
    """The writer of one environment."""

    def __init__(self, client: Any, stream: int, chunk_length: int, in_flight: int, **settings: Any) -> None:
        self._in_flight = in_flight
        self._priorities = itertools.cycle((np.random.default_rng(stream).random(1_000) + 0.01).tolist())
        self._steps = itertools.cycle(_steps(stream))
        self._writer: Any = self._open(client, chunk_length, **settings)

    @abstractmethod
    def _open(self, client: Any, chunk_length: int, **settings: Any) -> Any:
        """Reverb's writer."""

    @abstractmethod
    def step(self) -> bool:
        """Appends a step; returns whether it completed an item."""

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Timesteps(_Feed):
    def flush(self) -> None:
        # The first call sends pending items; the second waits for the server.
        self._writer.flush()
        self._writer.flush()


class _Sequences(_Timesteps):
    def _open(self, client: Any, chunk_length: int, **settings: Any) -> Any:
        # A flush ends a chunk early, but Reverb drops old chunks by their nominal length. This history keeps `WINDOW`
        # chunks: with fewer, Reverb makes items that cannot be sampled.
        return client.writer(
            WINDOW * chunk_length, chunk_length=chunk_length, max_in_flight_items=self._in_flight, **settings
        )

    def step(self) -> bool:
        step = next(self._steps)
        self._writer.append(step.data)
        if step.whole:
            self._writer.create_item("sequences", WINDOW, next(self._priorities))
        return step.whole


class _Transitions(_Timesteps):
    def _open(self, client: Any, chunk_length: int, **settings: Any) -> Any:
        self._whole = itertools.cycle(_transitions())
        return client.writer(chunk_length, chunk_length=chunk_length, max_in_flight_items=self._in_flight, **settings)

    def step(self) -> bool:
        self._writer.append(next(self._whole))
        self._writer.create_item("transitions", 1, next(self._priorities))
        return True


class _Frames(_Feed):
    def _open(self, client: Any, chunk_length: int, **settings: Any) -> Any:
        writer = client.trajectory_writer(WINDOW, **settings)
        # With a length of 0 Reverb chooses the chunk length.
        for column in ("frame", "outcome") if chunk_length else ():
            writer.configure((column,), num_keep_alive_refs=max(WINDOW, chunk_length), max_chunk_length=chunk_length)
        return writer

    def step(self) -> bool:
        step = next(self._steps)
        if step.first and self._writer.episode_steps:
            self._writer.end_episode()
        self._writer.append(step.data)
        if step.whole:
            history = self._writer.history
            trajectory = {"frame": history["frame"][-WINDOW:], "outcome": history["outcome"][-1]}
            self._writer.create_item("frames", next(self._priorities), trajectory)
            self._writer.flush(block_until_num_items=self._in_flight)
        return step.whole


class _Structured(_Feed):
    def _open(self, client: Any, chunk_length: int, **settings: Any) -> Any:
        self._begun = False
        structure = {"frame": None, "outcome": None, "priority": None, "whole": None}
        step = patterns.create_reference_step(structure)
        pattern = {"frame": step["frame"][-WINDOW:], "outcome": step["outcome"][-1], "priority": step["priority"][-1]}
        config = patterns.create_config(
            pattern,
            "structured",
            conditions=[patterns.Condition.data(structure)["whole"] == 1],
            priority=patterns.td_error(1.0, structure, lambda step: step["priority"]),
        )
        return client.structured_writer([config])

    def step(self) -> bool:
        step = next(self._steps)
        if step.first and self._begun:
            self._writer.end_episode()
        self._begun = True
        priority = np.float32(next(self._priorities)) if step.whole else np.float32(0)
        self._writer.append({**step.data, "priority": priority, "whole": np.int32(step.whole)})
        if step.whole:
            self._writer.flush(block_until_num_items=self._in_flight)
        return step.whole

    def close(self) -> None:
        self._writer.end_episode()
        del self._writer


FORMS: dict[str, Callable[..., _Feed]] = {
    "transitions": _Transitions,
    "sequences": _Sequences,
    "frames": _Frames,
    "structured": _Structured,
}


def _form(address: Address) -> str:
    """The form whose table has items."""
    held = _held(reverb.Client(_target(address)))
    return max(held, key=lambda name: held[name])


def _batch(data: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Names the parts of a batch, as views."""
    outcome = data["outcome"] if data["outcome"].ndim == 2 else data["outcome"][:, -1]
    windows = data.get("frame")
    return {
        "observation": data["observation"] if windows is None else windows[:, :STACK],
        "next_observation": data["next_observation"] if windows is None else windows[:, N:],
        "action": outcome[:, 0].astype(np.uint8),
        "reward": outcome[:, 1],
        "discount": outcome[:, 2],
    }


class ClientReader:
    """`Client.sample`."""

    def __init__(self, address: Address, batch: int, threads: int = 8) -> None:
        self._client = reverb.Client(_target(address))
        self._form = _form(address)
        self._columns = sorted(_signatures()[self._form])
        self._shares = [len(share) for share in np.array_split(np.arange(batch), threads)]
        self._threads = ThreadPoolExecutor(threads)

    def sample(self) -> dict[str, NDArray[Any]]:
        samples = itertools.chain.from_iterable(self._threads.map(self._sample, self._shares))
        together = np.concatenate if self._form == "transitions" else np.stack
        return _batch(dict(zip(self._columns, map(together, zip(*samples, strict=True)), strict=True)))

    def _sample(self, count: int) -> list[Any]:
        return [sample.data for sample in self._client.sample(self._form, count, emit_timesteps=False)]

    def close(self) -> None:
        self._threads.shutdown()


class DatasetReader:
    """`TrajectoryDataset`, or `TimestepDataset` for whole transitions, with batches sampled ahead by tf.data."""

    def __init__(
        self,
        address: Address,
        batch: int,
        workers: int = 4,
        in_flight: int = 1_024,
        datasets: int = 1,
        prefetch: int = 2,
    ) -> None:
        form, target = _form(address), _target(address)
        kind = reverb.TimestepDataset if form == "transitions" else reverb.TrajectoryDataset

        def dataset(_: Any) -> Any:
            samples = kind.from_table_signature(
                target, form, max_in_flight_samples_per_worker=in_flight, num_workers_per_iterator=workers
            )
            return samples.batch(batch, drop_remainder=True).map(lambda sample: sample.data)

        batches = tf.data.Dataset.range(datasets).interleave(
            dataset, cycle_length=datasets, num_parallel_calls=datasets, deterministic=False
        )
        self._batches = (batches if datasets > 1 else dataset(0)).prefetch(prefetch).as_numpy_iterator()

    def sample(self) -> dict[str, NDArray[Any]]:
        return _batch(next(self._batches))

    def close(self) -> None:
        del self._batches


READERS = {"client": ClientReader, "dataset": DatasetReader}


class Store:
    """A table with one item, the weights, as in TF-Agents' `ReverbVariableContainer`.

    `tensorflow` selects the client of TensorFlow operations, which TF-Agents uses.
    """

    def __init__(self, address: Address, tensorflow: bool = False) -> None:
        self._client = reverb.Client(_target(address))
        self._operations = reverb.TFClient(_target(address)) if tensorflow else None

    def put(self, weights: NDArray[np.float32]) -> None:
        if self._operations is None:
            self._client.insert([weights], {PARAMETERS: 1.0})
        else:
            self._operations.insert([tf.constant(weights)], tf.constant([PARAMETERS]), tf.constant([1.0], tf.float64))

    def get(self) -> NDArray[Any]:
        if self._operations is not None:
            sampled: NDArray[Any] = self._operations.sample(PARAMETERS, [tf.float32]).data[0].numpy()
            return sampled
        (sample,) = self._client.sample(PARAMETERS, emit_timesteps=False)
        weights: NDArray[Any] = sample.data[0][0]
        return weights

    def close(self) -> None:
        pass


if __name__ == "__main__":
    assert sys.argv[1] == "serve", "python -m benchmarks.systems.reverb serve PORT CAPACITY"
    _serve(*map(int, sys.argv[2:]))
