"""This project: `innet-replay serve`, and the memory in process."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from benchmarks import recording
from benchmarks.recording import STREAMS, Row
from benchmarks.systems import Address, Service, free_port, wait_for

VIEW = innet.NStep(stack=recording.STACK, n=recording.N, gamma=recording.GAMMA, observation="frame")
VERSION = f"innet-drl {innet.__version__}"
# Writers use default settings. Longer chunks would take fewer bytes for each step.
SWEEP: dict[str, list[dict[str, Any]]] = {
    "client": [{"threads": 1}, {"threads": 2}],
    "prefetching": [{"threads": 1}, {"threads": 2}],
    "Memory": [{"threads": 1}, {"threads": 2}],
}


def table(capacity: int) -> innet.Table:
    """The table of a Breakout run."""
    return innet.Table(
        "breakout",
        {"frame": ("uint8", (84, 84)), "action": "uint8", "reward": "float32"},
        capacity,
        priority_exponent=0.6,
    )


def start() -> tuple[Address, subprocess.Popen[bytes]]:
    """Starts a server without tables."""
    beside = Path(sysconfig.get_path("scripts")) / "innet-replay"
    command = str(beside) if beside.exists() else shutil.which("innet-replay")
    assert command is not None, "innet-replay is not installed: run `make build`"
    address = ("127.0.0.1", free_port())
    process = subprocess.Popen([command, "serve", "--listen", url(address), "--log-level", "warn"])
    wait_for(address, process)
    return address, process


def serve(capacity: int) -> Service:
    address, process = start()
    client = innet.connect(url(address), tables=[table(capacity)])
    return Service(address, process, lambda: int(client.stats()["tables"]["breakout"]["inserted_items"]))


def url(address: Address) -> str:
    """URL for `innet.connect`."""
    return f"innet://{address[0]}:{address[1]}"


def rows(streams: int) -> Iterator[Row]:
    """Repeats the recording forever, with its first `streams` streams."""
    for row in itertools.chain.from_iterable(itertools.repeat(recording.load().rows)):
        yield row if streams == STREAMS else {name: column[:streams] for name, column in row.items()}


class Writer:
    def __init__(self, address: Address, streams: int = STREAMS, chunk_steps: int = 50) -> None:
        self._replay = innet.connect(url(address))
        self._feed = _Feed(self._replay, streams, chunk_steps)
        self.push, self.flush = self._feed.push, self._feed.flush

    def close(self) -> None:
        self._feed.close()
        self._replay.close()


class _Feed:
    """Appends the recording's rows."""

    def __init__(self, replay: innet.Replay, streams: int, chunk_steps: int) -> None:
        self._writer = replay.writer("breakout", streams, VIEW, chunk_steps=chunk_steps)
        self._streams = streams
        self._rows = rows(streams)
        self._ahead = 0
        self.flush = self._writer.flush
        self.close = self._writer.close

    def push(self, count: int) -> None:
        """Appends rows with `count` steps; surplus steps of the last row count for the next call."""
        while self._ahead < count:
            self._writer.append(**next(self._rows))
            self._ahead += self._streams
        self._ahead -= count


class _Samples:
    def __init__(self, replay: innet.Replay, batch: int, threads: int = 2) -> None:
        self._replay, self._batch, self._threads = replay, batch, threads

    def sample(self) -> dict[str, NDArray[Any]]:
        return _arrays(self._replay.sample("breakout", self._batch, VIEW, threads=self._threads))


class Reader(_Samples):
    """`Replay.sample` on a server."""

    def __init__(self, address: Address, batch: int, threads: int = 2) -> None:
        super().__init__(innet.connect(url(address)), batch, threads)

    def close(self) -> None:
        self._replay.close()


class PrefetchingReader:
    """`Replay.batches` on a server."""

    def __init__(self, address: Address, batch: int, threads: int = 2) -> None:
        self._replay = innet.connect(url(address))
        self._batches = self._replay.batches("breakout", batch, VIEW, prefetch=4, threads=threads)

    def sample(self) -> dict[str, NDArray[Any]]:
        return _arrays(next(self._batches))

    def close(self) -> None:
        self._batches.close()
        self._replay.close()


READERS = {"client": Reader, "prefetching": PrefetchingReader}


class Memory(_Samples):
    """`Replay` in process."""

    def __init__(self, batch: int, capacity: int, threads: int = 2) -> None:
        super().__init__(innet.Memory([table(capacity)]), batch, threads)
        feed = _Feed(self._replay, STREAMS, chunk_steps=50)
        self.push, self.flush = feed.push, feed.flush

    def batches(self, device: str | None) -> Any:
        """An iterator over batches, or over tensors on a device."""
        return self._replay.batches("breakout", self._batch, VIEW, prefetch=3, device=device)


class Windows:
    """Sequences of `length` steps, or transitions, with frames of another size."""

    def __init__(self, batch: int, side: int, length: int | None) -> None:
        self._batch = batch
        self._view = innet.Sequences(length, observation="frame") if length else VIEW
        columns = {"frame": innet.Column("uint8", (side, side)), "action": innet.Column("uint8")}
        self._replay = innet.Memory([innet.Table("breakout", {**columns, "reward": innet.Column("float32")}, 50_000)])
        # Stacks begin with blank frames.
        self.frames = {recording.checksum(np.zeros((side, side), np.uint8))}
        """Checksums of all stored frames, and of the blank frame."""
        with self._replay.writer("breakout", STREAMS, self._view) as writer:
            for row in recording.load().rows:
                frames = _scaled(row["frame"], side)
                self.frames.update(map(recording.checksum, frames))
                writer.append(**{**row, "frame": frames, "q": None, "priority": None})

    def sample(self) -> NDArray[Any]:
        observation: NDArray[Any] = self._replay.sample("breakout", self._batch, self._view, threads=2).observation
        return observation


def _scaled(frame: NDArray[np.uint8], side: int) -> NDArray[np.uint8]:
    """Scales frames [streams, 84, 84] by dropping or repeating pixels."""
    if side < 84:
        return np.ascontiguousarray(frame[:, :: 84 // side, :: 84 // side])
    return frame.repeat(side // 84, 1).repeat(side // 84, 2)


def _arrays(batch: innet.Batch) -> dict[str, NDArray[Any]]:
    return {name: getattr(batch, name) for name in ("observation", "next_observation", "action", "reward", "discount")}


class Vectors:
    """`Replay` in process, of transitions of vectors."""

    def __init__(self, data: dict[str, NDArray[Any]], batch: int, device: str | None = None) -> None:
        self._batch, self._device, items = batch, device, len(data["reward"])
        columns = {name: (data[name].dtype, data[name].shape[1:]) for name in ("observation", "action", "reward")}
        view = innet.NStep()
        self._replay = innet.Memory(innet.Table("vectors", columns, items, priority_exponent=0.6, view=view))
        # Episodes go on: a truncated one would store its last observation, too.
        steps: dict[str, Any] = {name: data[name][:, None] for name in columns}
        ends = np.zeros((items, 1), bool)
        with self._replay.writer("vectors", 1) as writer:
            writer.extend(**steps, terminated=ends, truncated=ends)

    def sample(self) -> tuple[NDArray[np.uint64], Any]:
        sampled: Any = self._replay.sample("vectors", self._batch, beta=0.4, device=self._device)
        # Made when they are first asked for.
        sampled.keys()
        return sampled.ids, sampled

    def rewrite(self, ids: NDArray[np.uint64], priorities: NDArray[np.float64]) -> None:
        self._replay.update_priorities("vectors", ids, priorities)


class Tree:
    """`SumTree` alone."""

    def __init__(self, items: int, batch: int, priorities: NDArray[np.float64]) -> None:
        # Alpha is 1, as priorities are given after the exponent.
        self._tree = innet.SumTree(items, priority_exponent=1.0)
        self._batch = batch
        self.rewrite = self._tree.update
        self.rewrite(np.arange(items), priorities)

    def sample(self) -> NDArray[np.int64]:
        return self._tree.sample(self._batch).indexes


class Store:
    def __init__(self, address: Address) -> None:
        self._replay = innet.connect(url(address))

    def put(self, weights: NDArray[np.float32]) -> None:
        self._replay.put_parameters("policy", {"weights": weights})

    def get(self) -> NDArray[Any]:
        got = self._replay.get_parameters("policy")
        assert got is not None
        weights: NDArray[Any] = got.tensors["weights"]
        return weights

    def close(self) -> None:
        self._replay.close()
