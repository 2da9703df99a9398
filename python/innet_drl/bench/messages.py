"""What an actor of a run on a Redis sends in one push, and what the learner makes of it.

A Redis knows no columns and no windows: a push is one value of bytes, the arrays of a `Layout` one after the other,
which both ends know from the settings. There are two formats: `Frames` sends rows as they are, each frame once;
`Stacks` sends whole transitions of stacked float32 observations, as Furukawa and Matsutani (2022) did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.train.actor import make_table, make_view, table_of
from innet_drl.train.config import Config
from innet_drl.train.environments import Spec

Row = Mapping[str, NDArray[Any]]
"""One step of an actor's environments, named as the arguments of `innet.Writer.append`: arrays [S, ...]."""
Arrays = dict[str, NDArray[Any]]

STACKS_SHARE = 0.9
"""Of `max_bytes`, what the learner's own replay of stacks keeps: as many steps as have room there."""


@dataclass(frozen=True)
class Layout:
    """Arrays of fixed dtype and shape, one after the other in one piece of memory."""

    columns: Mapping[str, tuple[str, tuple[int, ...]]]
    """dtype and shape by name."""

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in self.columns.values())

    def views(self, buffer: bytes | bytearray | memoryview, offset: int = 0) -> Arrays:
        """The arrays in a piece of memory of at least `offset + nbytes` bytes, which they share."""
        arrays: Arrays = {}
        for name, (dtype, shape) in self.columns.items():
            arrays[name] = np.frombuffer(buffer, dtype, math.prod(shape), offset).reshape(shape)
            offset += arrays[name].nbytes
        return arrays


class Collector(Protocol):
    """An actor's side: rows come in, messages go out."""

    def add(self, row: Row) -> None:
        """Takes a row; its arrays are copied."""

    def take(self, message: Arrays) -> bool:
        """Fills the arrays of a message, once there is enough for it, and says whether it did."""


class Intake(Protocol):
    """The learner's side: messages come in and go to its own replay."""

    def appends(self, message: Arrays) -> Iterator[tuple[innet.Writer, dict[str, Any]]]:
        """The rows of a message, each with the writer that takes it."""


class Format(Protocol):
    """A format of messages."""

    layout: Layout
    packed: bool
    """Whether a message is packed with LZ4 on its way."""
    table: innet.Table
    """The learner's own replay."""

    @property
    def view(self) -> innet.NStep | innet.Window:
        """How batches are drawn from it."""

    def collector(self, actor: int) -> Collector:
        """For the actor of this index."""

    def intake(self, replay: innet.Replay) -> Intake:
        """For a replay that has the table."""

    def batch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of a batch, drawn with `view`, as the learner reads them."""


class Frames:
    """Rows as the environments gave them: each frame once, and packed.

    Args:
        config: The run's settings; a message has `message_transitions` of them, rounded up to whole rows.
        spec: The environment's spec.
        name: Of the table.
    """

    packed = True

    def __init__(self, config: Config, spec: Spec, name: str) -> None:
        self._config = config
        self.streams = config.environments
        self.rows = math.ceil(config.message_transitions / self.streams)
        self.table = make_table(config, spec, name)
        self.view = make_view(config, spec)
        flags = dict.fromkeys(("terminated", "truncated", "first", "final"), ("bool", ()))
        columns: dict[str, tuple[str, tuple[int, ...]]] = {
            "frame": (spec.frame_dtype, spec.frame_shape),
            "action": (spec.action_dtype, ()),
            "reward": ("float32", ()),
            "q": ("float32", (spec.actions,)),
            **flags,
        }
        rows = {name: (dtype, (self.rows, self.streams, *shape)) for name, (dtype, shape) in columns.items()}
        self.layout = Layout({"actor": ("int32", ()), **rows})

    def collector(self, actor: int) -> Collector:
        """For the actor of this index."""
        return _FrameCollector(actor, self.layout, self.rows)

    def intake(self, replay: innet.Replay) -> Intake:
        """For a replay that has the table."""
        return _FrameIntake(self, replay, self._config.chunk_steps)

    def batch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """As they are."""
        return dict(arrays)


class _FrameCollector:
    def __init__(self, actor: int, layout: Layout, rows: int) -> None:
        self._arrays = layout.views(bytearray(layout.nbytes))
        self._arrays["actor"][...] = actor
        self._rows, self._filled = rows, 0

    def add(self, row: Row) -> None:
        for name, values in row.items():
            self._arrays[name][self._filled] = values
        self._filled += 1

    def take(self, message: Arrays) -> bool:
        if self._filled < self._rows:
            return False
        for name, values in self._arrays.items():
            message[name][...] = values
        self._filled = 0
        return True


class _FrameIntake:
    """A writer for each actor: its environments are streams of their own."""

    def __init__(self, frames: Frames, replay: innet.Replay, chunk_steps: int) -> None:
        self._frames, self._replay, self._chunk_steps = frames, replay, chunk_steps
        self._writers: dict[int, innet.Writer] = {}

    def appends(self, message: Arrays) -> Iterator[tuple[innet.Writer, dict[str, Any]]]:
        actor = int(message["actor"])
        if actor not in self._writers:
            self._writers[actor] = self._replay.writer(
                self._frames.table.name,
                self._frames.streams,
                self._frames.view,
                name=f"actor {actor}",
                chunk_steps=self._chunk_steps,
            )
        for index in range(self._frames.rows):
            yield self._writers[actor], {name: rows[index] for name, rows in message.items() if name != "actor"}


class Stacks:
    """Transitions of two whole observations in float32, with return, discount and priority, as the paper sends them.

    Args:
        config: The run's settings; a message has `message_transitions` of them.
        spec: The environment's spec.
        name: Of the table.
        codec: Of the observations in the learner's replay. LZ4 keeps a Breakout transition in 4 KB, where its two
            observations take 225,792 bytes.
    """

    packed = False

    def __init__(self, config: Config, spec: Spec, name: str, codec: Literal["lz4", "none"] = "lz4") -> None:
        self.transitions = config.message_transitions
        self._config, self._spec = config, spec
        images = len(spec.frame_shape) == 2
        observation = innet.Column("float32", spec.observation_shape, codec=codec if images else "none")
        columns = {
            "observation": observation,
            "next_observation": observation,
            "action": innet.Column(spec.action_dtype),
            "reward": innet.Column("float32"),
            "discount": innet.Column("float32"),
        }
        room = int(STACKS_SHARE * config.max_bytes)
        self.table = table_of(columns, config, name, room if images else 0)
        self.view = innet.Window(before=0, after=0)
        columns["priority"] = innet.Column("float32")
        self.layout = Layout(
            {name: (column.dtype.name, (self.transitions, *column.shape)) for name, column in columns.items()}
        )

    def collector(self, actor: int) -> Collector:
        """For any actor: a transition needs no other of its stream."""
        return _StackCollector(self._config, self._spec, self.transitions)

    def intake(self, replay: innet.Replay) -> Intake:
        """For a replay that has the table."""
        return _StackIntake(self, replay)

    def batch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Without the dimension of a window's rows, of which there is one."""
        return {name: array[:, 0] if name in self.table.columns else array for name, array in arrays.items()}


@dataclass
class _Open:
    """A transition that still waits for its bootstrap."""

    observation: NDArray[Any]
    action: Any
    q: float
    reward: float = 0.0
    steps: int = 0


class _StackCollector:
    """Makes transitions of n steps: Sutton & Barto (2018), equation 7.1, with the actor's own TD error."""

    def __init__(self, config: Config, spec: Spec, transitions: int) -> None:
        self._n, self._gamma, self._transitions = config.n_step, config.gamma, transitions
        self._stack = spec.stack
        stacked = (spec.stack, *spec.frame_shape)
        self._observation = np.zeros((config.environments, *stacked), spec.frame_dtype)
        self._open: list[deque[_Open]] = [deque() for _ in range(config.environments)]
        self._ready: list[dict[str, Any]] = []

    def add(self, row: Row) -> None:
        # Before an episode's first frame there is nothing, as AtariVectorEnv stacks.
        self._observation[row["first"]] = 0
        self._observation[:, :-1] = self._observation[:, 1:]
        self._observation[:, -1] = row["frame"]
        for stream, waiting in enumerate(self._open):
            self._step(waiting, stream, row)

    def _step(self, waiting: deque[_Open], stream: int, row: Row) -> None:
        observation = self._observation[stream].copy() if self._stack > 1 else self._observation[stream, 0].copy()
        q = row["q"][stream]
        if row["first"][stream]:
            # A reset that no end announced leaves nothing to bootstrap from.
            waiting.clear()
        if waiting and waiting[0].steps == self._n:
            self._close(waiting.popleft(), observation, float(q.max()))
        if row["final"][stream]:
            while waiting:
                self._close(waiting.popleft(), observation, float(q.max()))
            return
        action = row["action"][stream]
        waiting.append(_Open(observation, action, float(q[action])))
        for each in waiting:
            each.reward += self._gamma**each.steps * float(row["reward"][stream])
            each.steps += 1
        if row["terminated"][stream]:
            while waiting:
                self._close(waiting.popleft(), observation, None)

    def _close(self, ended: _Open, next_observation: NDArray[Any], value: float | None) -> None:
        """Books a transition; without a value it ended an episode or a life."""
        discount = 0.0 if value is None else self._gamma**ended.steps
        self._ready.append(
            {
                "observation": ended.observation,
                "next_observation": next_observation,
                "action": ended.action,
                "reward": ended.reward,
                "discount": discount,
                "priority": abs(ended.reward + discount * (value or 0.0) - ended.q),
            }
        )

    def take(self, message: Arrays) -> bool:
        if len(self._ready) < self._transitions:
            return False
        for index, transition in enumerate(self._ready[: self._transitions]):
            for name, value in transition.items():
                message[name][index] = value
        del self._ready[: self._transitions]
        return True


class _StackIntake:
    """One writer for all actors: each place in a message is a stream, and each transition a row of its own."""

    def __init__(self, stacks: Stacks, replay: innet.Replay) -> None:
        count = stacks.transitions
        self._writer = replay.writer(stacks.table.name, count, stacks.view, name="actors", chunk_steps=1)
        no, yes = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        self._flags = {"terminated": no, "truncated": no, "first": yes}

    def appends(self, message: Arrays) -> Iterator[tuple[innet.Writer, dict[str, Any]]]:
        yield self._writer, {**message, **self._flags}


def message_format(config: Config, spec: Spec, name: str) -> Format:
    """The format of a run's settings."""
    return Frames(config, spec, name) if config.message == "frames" else Stacks(config, spec, name)
