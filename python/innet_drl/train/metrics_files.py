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
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.custom_scalar import layout_pb2
from tensorboard.plugins.custom_scalar import metadata as custom_scalar
from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from innet_drl.train.metrics import Metrics

TENSORBOARD_NAMES: dict[str, str] = {
    "return_mean": "charts/episodic_return",
    "return_best": "charts/best_return",
    "evaluation_best": "charts/best_evaluation_return",
    "length_mean": "charts/episodic_length",
    "epsilon": "charts/epsilon",
    "agent_steps_per_s": "charts/SPS",
    "learner_updates_per_s": "charts/updates_per_s",
    "evaluation_mean": "charts/evaluation_return",
    "td_loss": "losses/td_loss",
    "q_mean": "losses/q_values",
    "gradient_norm": "losses/gradient_norm",
    "learning_rate": "charts/learning_rate",
    "q_predicted": "values/q_predicted",
    "return_discounted": "values/return_discounted",
    "priority_total": "priorities/total",
    "priority_max": "priorities/max",
    "priority_concentration": "priorities/concentration",
    "policy_churn": "diagnostics/policy_churn",
    "policy_agreement": "diagnostics/policy_agreement",
    "feature_spread": "diagnostics/feature_spread",
    "adam_epsilon_share": "diagnostics/adam_epsilon_share",
    "equal_frames": "diagnostics/equal_frames",
    "effective_sample_size": "diagnostics/effective_sample_size",
    "replay_steps": "replay/steps",
    "replay_bytes": "replay/bytes",
    "sample_age": "replay/sample_age",
    "samples_per_insert": "replay/samples_per_insert",
    "samples_per_insert_now": "replay/samples_per_insert_now",
    "samples_per_insert_target": "replay/samples_per_insert_target",
    "stale_updates": "replay/stale_updates",
    "parameter_version": "parameters/version",
    "parameter_lag": "parameters/lag",
    "env_frames": "counts/env_frames",
    "learner_updates": "counts/learner_updates",
    "games": "counts/games",
    "time_s": "counts/time_s",
    "seconds_left": "counts/seconds_left",
    "processor_s": "cost/processor_s",
    "processor_s_per_million_frames": "cost/processor_s_per_million_frames",
    "resident_bytes": "cost/resident_bytes",
    "joules": "cost/joules",
    "joules_per_million_frames": "cost/joules_per_million_frames",
}
"""Metric to its tag in TensorBoard and Weights & Biases; the x-axis is `agent_steps`."""
TAGGED_BY_KEY: dict[str, str] = {
    "learner_time": "learner_time",
    "actor_time": "actor_time",
    "actor_scores": "actor_return",
    "actor_steps_per_s": "actor_SPS",
    "actor_waits": "actor_waits",
    "dead_units": "dead_units",
    "priority_percentiles": "priority_percentiles",
}
"""Metric of several values to the prefix of their tags."""
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
    values = dataclasses.asdict(metrics)
    found = {tag: values[name] for name, tag in TENSORBOARD_NAMES.items() if values[name] is not None}
    for name, prefix in TAGGED_BY_KEY.items():
        found.update((f"{prefix}/{key}", value) for key, value in values[name].items())
    return found


class MetricsFiles:
    """`metrics.jsonl` and the TensorBoard events of a run, both appended to and flushed line by line.

    Args:
        folder: The run's folder.
        settings: Hyperparameters, for TensorBoard's tab of that name. It shows the settings of a run's first session.
        agent_steps: Steps at which a resumed run continues. Later lines, from between its last checkpoint and its
            forced end, are removed from `metrics.jsonl`, and TensorBoard drops later events.
        updates: Updates at which it continues: the learner may have gone on while actors waited. `None` keeps lines of
            any number.
    """

    def __init__(
        self,
        folder: Path,
        agent_steps: int = 0,
        settings: Mapping[str, Any] = MappingProxyType({}),
        updates: int | None = None,
    ) -> None:
        _drop_lines_beyond(agent_steps, updates, folder / "metrics.jsonl")
        # Without buffers, so that a full disk is an error of `write`, after which nothing of a line is left.
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
    """Writes all of the bytes, or none of them."""
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
            # A line without an end was incomplete when the run was killed.
            if not line.endswith(b"\n"):
                break
            counts = json.loads(line)
            if counts["agent_steps"] > agent_steps or (updates is not None and counts["learner_updates"] > updates):
                break
            end += len(line)
        file.truncate(end)
