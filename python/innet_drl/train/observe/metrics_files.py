"""The files of metrics: `metrics.jsonl` and TensorBoard's events."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams

from innet_drl.train.observe.metrics import METRICS, PANELS, Metrics, tags

BUFFER_BYTES = 1 << 20
"""Size above the longest line, so that what a full disk refuses stays in the buffer, and is written later."""


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
        self._lines = (folder / "metrics.jsonl").open("ab", BUFFER_BYTES)
        # `SummaryWriter` writes in a thread, which a full disk ends.
        events = folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"
        self._events = RecordWriter(events.open("wb", BUFFER_BYTES))
        self._newest: Metrics | None = None
        self._described: set[str] = set()
        """Tags whose description TensorBoard has."""
        self._add_event(file_version="brain.Event:2")
        self._add_event(step=agent_steps + 1, session_log=SessionLog(status=SessionLog.START))
        self._add_event(summary=_hyperparameters(settings))
        charts = {title: ["Multiline", panel.tags] for title, panel in PANELS.items()}
        self._add_event(summary=custom_scalars({"innet-drl": charts}))  # type: ignore[no-untyped-call]
        self._events.flush()

    def write(self, metrics: Metrics) -> None:
        """Appends one line to both files.

        Raises:
            OSError: The disk is full, or the folder is gone. The same line may be written again later.
        """
        if metrics is not self._newest:
            self._newest = metrics
            self._add_event(step=int(metrics["agent_steps"]), summary=self._summary(metrics))
            self._lines.write((json.dumps(metrics) + "\n").encode())
        self._events.flush()
        self._lines.flush()

    def close(self) -> None:
        """Closes both files."""
        try:
            self._events.close()
        finally:
            self._lines.close()

    def _add_event(self, **content: Any) -> None:
        self._events.write(Event(wall_time=time.time(), **content).SerializeToString())

    def _summary(self, metrics: Metrics) -> Summary:
        summary = Summary()
        for name, (tag, value) in zip(metrics, tags(metrics).items(), strict=True):
            added = summary.value.add(tag=tag, simple_value=value)
            if tag not in self._described:
                self._described.add(tag)
                metric = METRICS[name.partition("/")[0]]
                added.metadata.summary_description = ": ".join(filter(None, (metric.unit, metric.meaning)))
        return summary


def _hyperparameters(settings: Mapping[str, Any]) -> Summary:
    """The settings for TensorBoard's plugin `hparams`, which adds the last value of each scalar of the run."""
    known = {
        name: value if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
        for name, value in settings.items()
        if value is not None
    }
    _, started, _ = hparams(known, {})  # type: ignore[no-untyped-call]
    return started


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
