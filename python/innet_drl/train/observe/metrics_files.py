"""The files of metrics: `metrics.jsonl` and TensorBoard's events."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import socket
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams

from innet_drl.train.observe.metrics import METRICS, Metrics, parts, tags
from innet_drl.train.observe.panels import PANELS


class MetricsFiles:
    """`metrics.jsonl` and the TensorBoard events of a run, both appended to and flushed line by line.

    Args:
        folder: The run's folder.
        settings: Hyperparameters, for TensorBoard's tab of that name. It shows the settings of a run's first session.
        agent_steps: Steps at which a resumed run continues. Later lines, from after its last checkpoint, are removed
            from `metrics.jsonl`, and TensorBoard drops later events.
        updates: Updates at which it continues: the learner may have updated while actors waited. `None` keeps lines
            with any number.
    """

    def __init__(
        self,
        folder: Path,
        agent_steps: int = 0,
        settings: Mapping[str, Any] = MappingProxyType({}),
        updates: int | None = None,
    ) -> None:
        _drop_lines_beyond(agent_steps, updates, folder / "metrics.jsonl")
        # Unbuffered, so that a full disk is an error of `write`, which then removes the partial line.
        self._lines = (folder / "metrics.jsonl").open("ab", buffering=0)
        events = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._events = events.open("wb", buffering=0)
        self._last_event: Metrics | None = None
        self._described: set[str] = set()
        """Tags whose description TensorBoard has."""
        start = SessionLog(status=SessionLog.START)
        _append(self._events, _record(Event(wall_time=time.time(), file_version="brain.Event:2")))
        _append(self._events, _record(Event(wall_time=time.time(), step=agent_steps + 1, session_log=start)))
        _append(self._events, _record(_hyperparameters(settings)))
        _append(self._events, _record(_panels()))

    def write(self, metrics: Metrics) -> None:
        """Appends one line to both files.

        Raises:
            OSError: The disk is full, or the folder is gone. The same line may be written again later.
        """
        if metrics is not self._last_event:
            _append(self._events, _record(_event(metrics, self._described)))
            self._last_event = metrics
            self._described |= tags(metrics).keys()
        _append(self._lines, (json.dumps(metrics) + "\n").encode())

    def close(self) -> None:
        """Closes both files."""
        try:
            self._events.close()
        finally:
            self._lines.close()


def _event(metrics: Metrics, described: Collection[str]) -> Event:
    event = Event(wall_time=time.time(), step=int(metrics["agent_steps"]))
    for name, (tag, value) in zip(metrics, tags(metrics).items(), strict=True):
        added = event.summary.value.add(tag=tag, simple_value=value)
        if tag not in described:
            metric = METRICS[name.partition("/")[0]]
            added.metadata.summary_description = ": ".join(filter(None, (metric.unit, metric.meaning)))
    percentiles = parts(metrics, "priority_percentiles")
    if percentiles:
        event.summary.value.add(tag="priorities/new", histo=_histogram(percentiles))
    return event


def _histogram(percentiles: Mapping[str, float]) -> HistogramProto:
    """The histogram, in percent, whose bins end at these percentiles."""
    ends, limits = [float(end) for end in percentiles], list(percentiles.values())
    shares = [end - begin for begin, end in itertools.pairwise([0.0, *ends])]
    return HistogramProto(min=limits[0], max=limits[-1], num=100.0, bucket_limit=limits, bucket=shares)


def _hyperparameters(settings: Mapping[str, Any]) -> Event:
    """The event of TensorBoard's plugin `hparams`, which adds the last value of each scalar of the run."""
    known = {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        for name, value in settings.items()
        if value is not None
    }
    _, started, _ = hparams(known, {})  # type: ignore[no-untyped-call]
    return Event(wall_time=time.time(), summary=started)


def _panels() -> Event:
    """The event of TensorBoard's plugin `custom_scalars`."""
    charts = {title: ["Multiline", panel.tags] for title, panel in PANELS.items()}
    layout = custom_scalars({"innet-drl": charts})  # type: ignore[no-untyped-call]
    return Event(wall_time=time.time(), summary=layout)


def _record(event: Event) -> bytes:
    framed = io.BytesIO()
    RecordWriter(framed).write(event.SerializeToString())
    return framed.getvalue()


def _append(file: io.FileIO, data: bytes) -> None:
    """Appends all bytes or none."""
    end = os.fstat(file.fileno()).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError:
        with contextlib.suppress(OSError):
            file.truncate(end)
            file.seek(end)
        raise


def _drop_lines_beyond(agent_steps: int, updates: int | None, path: Path) -> None:
    if not path.is_file():
        return
    with path.open("r+b") as file:
        end = 0
        for line in file:
            # The last line is incomplete if the run was killed while writing it.
            if not line.endswith(b"\n"):
                break
            counts = json.loads(line)
            if counts["agent_steps"] > agent_steps or (updates is not None and counts["learner_updates"] > updates):
                break
            end += len(line)
        file.truncate(end)
