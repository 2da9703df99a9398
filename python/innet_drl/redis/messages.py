"""Messages of a run over Redis: encoded by actors, decoded by the learner.

Redis has no columns or windows: a message is one byte string of concatenated arrays (`layout_of`), whose layout both
ends derive from the settings. `FrameFormat` sends rows with each frame once; `StackFormat` sends whole transitions of
stacked float32 observations, as Furukawa and Matsutani (2022) did.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.memory import MemorySettings

StepRow = Mapping[str, NDArray[Any]]
"""One step of an actor's environments, named as the arguments of `innet.Writer.append`: arrays [N, ...]."""
Arrays = dict[str, NDArray[Any]]

TRANSITIONS = 200
"""Transitions of a message, by default."""
STACKS_SHARE = 0.9
"""Share of `max_bytes` for the steps of the learner's own replay of stacks."""


def layout_of(columns: Mapping[str, tuple[str, tuple[int, ...]]]) -> np.dtype[np.void]:
    """Layout of a message: concatenated arrays of these dtypes and shapes."""
    return np.dtype([(name, *column) for name, column in columns.items()])


def views(layout: np.dtype[np.void], buffer: bytes | bytearray | memoryview) -> Arrays:
    """Returns the arrays as views of a buffer of at least `layout.itemsize` bytes."""
    whole = np.frombuffer(buffer, layout, 1)
    return {name: whole[name].reshape(layout[name].shape) for name in layout.names or ()}


def _own_table(settings: MemorySettings, transitions: int, **changes: Any) -> innet.Table:
    """The run's table with changes, and slack for whole messages in flight."""
    table = settings.table
    chunk = settings.config.chunk_steps * settings.config.environments
    extra_steps = settings.config.playing_actors * max(0, transitions - chunk)
    return replace(table, slack=table.slack + 2 * extra_steps * table.samples_per_insert, **changes)


class FrameFormat:
    """Rows as the environments return them: each frame once, and compressed. Messages have whole rows."""

    compressed = True
    """Messages are compressed with LZ4 for the transport."""

    def __init__(self, settings: MemorySettings, transitions: int = TRANSITIONS) -> None:
        spec = settings.spec
        self.streams = settings.config.environments
        self.chunk_steps = settings.config.chunk_steps
        self.message_rows = math.ceil(transitions / self.streams)
        self.table = _own_table(settings, transitions)
        """Table of the learner's own replay."""
        self.view = settings.view
        """View with which batches are sampled from the table."""
        flags = dict.fromkeys(("terminated", "truncated", "first", "final"), ("bool", ()))
        columns: dict[str, tuple[str, tuple[int, ...]]] = {
            "frame": (spec.frame_dtype, spec.frame_shape),
            "action": (spec.action_dtype, ()),
            "reward": ("float32", ()),
            "q": ("float32", (spec.actions,)),
            **flags,
        }
        rows = {name: (dtype, (self.message_rows, self.streams, *shape)) for name, (dtype, shape) in columns.items()}
        self.layout = layout_of({"actor": ("int32", ()), **rows})

    def builder(self, actor: int) -> MessageBuilder:
        """Makes the builder of the actor with this index."""
        return _FrameBuilder(actor, self)

    def reader(self, replay: innet.Replay) -> MessageReader:
        """Makes the reader for a replay that has the table."""
        return _FrameReader(self, replay)

    def batch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Converts the arrays of a batch sampled with `view` for the learner: here unchanged."""
        return dict(arrays)


class _FrameBuilder:
    """Builds an actor's messages from its rows."""

    def __init__(self, actor: int, frames: FrameFormat) -> None:
        self._arrays = views(frames.layout, bytearray(frames.layout.itemsize))
        self._arrays["actor"][...] = actor
        self._rows, self._filled = frames.message_rows, 0

    def add(self, row: StepRow) -> None:
        """Copies a row."""
        for name, values in row.items():
            self._arrays[name][self._filled] = values
        self._filled += 1

    def fill(self, message: Arrays) -> bool:
        """Fills a message and returns `True` if there are enough rows for one."""
        if self._filled < self._rows:
            return False
        for name, values in self._arrays.items():
            message[name][...] = values
        self._filled = 0
        return True


class _FrameReader:
    """Has a writer for each actor, with a stream for each environment."""

    def __init__(self, frames: FrameFormat, replay: innet.Replay) -> None:
        self._frames, self._replay = frames, replay
        self._writers: dict[int, innet.Writer] = {}

    def rows(self, message: Arrays) -> Iterator[tuple[innet.Writer, dict[str, Any]]]:
        """Yields the rows of a message, each with the writer to append it to."""
        frames, actor = self._frames, int(message["actor"])
        if actor not in self._writers:
            self._writers[actor] = self._replay.writer(
                frames.table.name,
                frames.streams,
                frames.view,
                name=f"actor {actor}",
                server=actor,
                chunk_steps=frames.chunk_steps,
            )
        for index in range(frames.message_rows):
            yield self._writers[actor], {name: rows[index] for name, rows in message.items() if name != "actor"}


class StackFormat:
    """Transitions of two whole observations in float32, with return, discount and priority, as in the paper.

    `codec` is that of the observations in the learner's replay: LZ4 stores the two observations of a Breakout
    transition, 225,792 bytes, in 4 KB.
    """

    compressed = False

    def __init__(
        self, settings: MemorySettings, transitions: int = TRANSITIONS, codec: Literal["lz4", "none"] = "lz4"
    ) -> None:
        self.settings = settings
        self.transitions = transitions
        spec = settings.spec
        if spec.parts:
            raise ConfigurationError("?message=stacks: dictionaries are no float32 arrays: take ?message=frames")
        images = spec.is_image
        observation = innet.Column("float32", spec.observation_shape, codec=codec if images else "none")
        columns = {
            "observation": observation,
            "next_observation": observation,
            "action": innet.Column(spec.action_dtype),
            "reward": innet.Column("float32"),
            "discount": innet.Column("float32"),
        }
        capacity_bytes = int(STACKS_SHARE * settings.config.max_bytes) if images else 0
        self.table = _own_table(settings, transitions, columns=columns, capacity_bytes=capacity_bytes)
        self.view = innet.Window(before=0, after=0)
        columns["priority"] = innet.Column("float32")
        self.layout = layout_of(
            {name: (column.dtype.name, (self.transitions, *column.shape)) for name, column in columns.items()}
        )

    def builder(self, actor: int) -> MessageBuilder:
        """Makes the builder of any actor: a transition does not depend on its stream."""
        return _StackBuilder(self.settings, self.transitions)

    def reader(self, replay: innet.Replay) -> MessageReader:
        """Makes the reader for a replay that has the table."""
        return _StackReader(self, replay)

    def batch(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
        """Drops the dimension of a window's rows, of size 1."""
        return {name: array[:, 0] if name in self.table.columns else array for name, array in arrays.items()}


@dataclass
class _OpenTransition:
    """A transition that waits for its bootstrap observation."""

    observation: NDArray[Any]
    action: Any
    q: float
    reward: float = 0.0
    steps: int = 0


class _StackBuilder:
    """Builds n-step transitions (Sutton & Barto, 2018, equation 7.1) with the actor's own TD error as priority."""

    def __init__(self, settings: MemorySettings, transitions: int) -> None:
        spec, streams = settings.spec, settings.config.environments
        self._n, self._gamma = settings.view.n, settings.view.gamma
        self._transitions = transitions
        self._stack = spec.stack
        self._observation = np.zeros((streams, spec.stack, *spec.frame_shape), spec.frame_dtype)
        self._open: list[deque[_OpenTransition]] = [deque() for _ in range(streams)]
        self._complete: list[dict[str, Any]] = []

    def add(self, row: StepRow) -> None:
        # Frames before an episode's first are zero, as in AtariVectorEnv.
        self._observation[row["first"]] = 0
        self._observation[:, :-1] = self._observation[:, 1:]
        self._observation[:, -1] = row["frame"]
        for stream, waiting in enumerate(self._open):
            self._step(waiting, stream, row)

    def _step(self, waiting: deque[_OpenTransition], stream: int, row: StepRow) -> None:
        observation = self._observation[stream].copy() if self._stack > 1 else self._observation[stream, 0].copy()
        q = row["q"][stream]
        if row["first"][stream]:
            # After a reset without an end of the episode there is no bootstrap observation.
            waiting.clear()
        if waiting and waiting[0].steps == self._n:
            self._complete_one(waiting.popleft(), observation, float(q.max()))
        if row["final"][stream]:
            while waiting:
                self._complete_one(waiting.popleft(), observation, float(q.max()))
            return
        action = row["action"][stream]
        waiting.append(_OpenTransition(observation, action, float(q[action])))
        for each in waiting:
            each.reward += self._gamma**each.steps * float(row["reward"][stream])
            each.steps += 1
        if row["terminated"][stream]:
            while waiting:
                self._complete_one(waiting.popleft(), observation, None)

    def _complete_one(self, ended: _OpenTransition, next_observation: NDArray[Any], value: float | None) -> None:
        """Completes a transition; `None` as the bootstrap value means that the episode or life terminated."""
        discount = 0.0 if value is None else self._gamma**ended.steps
        self._complete.append(
            {
                "observation": ended.observation,
                "next_observation": next_observation,
                "action": ended.action,
                "reward": ended.reward,
                "discount": discount,
                "priority": abs(ended.reward + discount * (value or 0.0) - ended.q),
            }
        )

    def fill(self, message: Arrays) -> bool:
        if len(self._complete) < self._transitions:
            return False
        for index, transition in enumerate(self._complete[: self._transitions]):
            for name, value in transition.items():
                message[name][index] = value
        del self._complete[: self._transitions]
        return True


class _StackReader:
    """Has one writer for all actors: each index of a message is a stream, and each transition one row."""

    def __init__(self, stacks: StackFormat, replay: innet.Replay) -> None:
        count = stacks.transitions
        self._writer = replay.writer(stacks.table.name, count, stacks.view, name="actors", chunk_steps=1)
        no, yes = np.zeros(count, np.bool_), np.ones(count, np.bool_)
        self._flags = {"terminated": no, "truncated": no, "first": yes}

    def rows(self, message: Arrays) -> Iterator[tuple[innet.Writer, dict[str, Any]]]:
        yield self._writer, {**message, **self._flags}


MessageFormat = FrameFormat | StackFormat
MessageBuilder = _FrameBuilder | _StackBuilder
MessageReader = _FrameReader | _StackReader

FORMATS: dict[str, type[FrameFormat | StackFormat]] = {"frames": FrameFormat, "stacks": StackFormat}
"""Formats by the option `message` of an address."""
