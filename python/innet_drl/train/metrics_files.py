"""The files of metrics: `metrics.jsonl` and TensorBoard's events."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, get_origin, get_type_hints

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from innet_drl.train.metrics import Metrics

TAGS: dict[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(Metrics, include_extras=True).items()
    if get_origin(hint) is Annotated
}
"""Metric to its tag, or the prefix of its tags."""
PANELS: dict[str, tuple[str, ...]] = {
    "score of each actor": ("actor_return/.*",),
    "Q-loss": ("losses/td_loss",),
    "steps in the replay memory": ("replay/steps",),
    "score: mean, best game, evaluation": ("charts/.*_return",),
    "steps/s of each actor": ("actor_SPS/.*",),
    "values: predicted, and the return that followed": ("values/.*",),
    "priorities: concentration": ("priorities/concentration",),
    "priorities: percentiles": ("priority_percentiles/.*",),
    "policy: churn, agreement of newest and average": ("diagnostics/policy_.*",),
    "dead units by layer": ("dead_units/.*",),
    "replay ratio: target and reached": ("replay/samples_per_insert_.*",),
    "waits: learner for samples, actors for the learner": ("learner_time/wait for a batch", "actor_waits/.*"),
    "seconds left": ("counts/seconds_left",),
}
"""Title to the tags, as regular expressions, of the charts of TensorBoard's tab CUSTOM SCALARS."""


def scalars(metrics: Metrics) -> dict[str, float]:
    """Returns the values of a line of metrics that exist, by tag."""
    found: dict[str, float] = {}
    for name, tag in TAGS.items():
        value = getattr(metrics, name)
        if isinstance(value, dict):
            found.update((f"{tag}/{key}", each) for key, each in value.items())
        elif value is not None:
            found[tag] = value
    return found


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
            _append(self._events, _record(_event(metrics)))
            self._last_event = metrics
        _append(self._lines, (json.dumps(dataclasses.asdict(metrics)) + "\n").encode())

    def close(self) -> None:
        """Closes both files."""
        try:
            self._events.close()
        finally:
            self._lines.close()


def _event(metrics: Metrics) -> Event:
    values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars(metrics).items()]
    if metrics.priority_percentiles:
        values.append(Summary.Value(tag="priorities/new", histo=_histogram(metrics.priority_percentiles)))
    return Event(wall_time=time.time(), step=metrics.agent_steps, summary=Summary(value=values))


def _histogram(percentiles: Mapping[str, float]) -> HistogramProto:
    """The histogram, in percent, whose bins end at these percentiles."""
    ends, limits = [float(end) for end in percentiles], list(percentiles.values())
    shares = [end - begin for begin, end in itertools.pairwise([0.0, *ends])]
    return HistogramProto(min=limits[0], max=limits[-1], num=100.0, bucket_limit=limits, bucket=shares)


def _hyperparameters(settings: Mapping[str, Any]) -> Event:
    """The event of TensorBoard's plugin `hparams`, which adds the last value of each scalar of the run.

    The plugin's own functions need TensorFlow.
    """
    started = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in settings.items():
        if isinstance(value, bool):
            started.hparams[name].bool_value = value
        elif isinstance(value, int | float):
            started.hparams[name].number_value = value
        elif value is not None:
            started.hparams[name].string_value = str(value)
    data = plugin_data_pb2.HParamsPluginData(session_start_info=started)
    value = Summary.Value(
        tag=metadata.SESSION_START_INFO_TAG,
        metadata=metadata.create_summary_metadata(data),
        tensor=metadata.NULL_TENSOR,
    )
    return Event(wall_time=time.time(), summary=Summary(value=[value]))


def _panels() -> Event:
    """The event of TensorBoard's plugin `custom_scalars`; the plugin's own function needs TensorFlow."""
    charts = [
        layout_pb2.Chart(title=title, multiline=layout_pb2.MultilineChartContent(tag=tags))
        for title, tags in PANELS.items()
    ]
    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="innet-drl", chart=charts)])
    value = Summary.Value(
        tag=custom_scalar.CONFIG_SUMMARY_TAG,
        metadata=custom_scalar.create_summary_metadata(),
        tensor=TensorProto(dtype=DT_STRING, string_val=[layout.SerializeToString()]),
    )
    return Event(wall_time=time.time(), summary=Summary(value=[value]))


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
