"""Lines of metrics: when a run writes one and what it has, in `metrics.jsonl` and TensorBoard's events."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard.summary import custom_scalars, hparams

from innet_drl.errors import ReplayError
from innet_drl.train.errors import RunFolderError
from innet_drl.train.learn.learner import Learner
from innet_drl.train.memory import ReplayMemory
from innet_drl.train.observe.cost import CostMeter
from innet_drl.train.observe.metrics import METRICS, PANELS, ActorReport, MemoryCounters, Metrics, tags
from innet_drl.train.observe.stopwatch import SERIAL, Stopwatch, Times
from innet_drl.train.play.evaluation import Evaluation
from innet_drl.train.play.evaluation_report import aggregate
from innet_drl.train.runs.evaluation_schedule import EvaluatedAgent
from innet_drl.train.runs.session import Session

logger = logging.getLogger(__name__)

LAST_SECONDS = 0.25
"""Timeout of the memory's counters for the last line after a signal."""
KEPT_LINES = 10_000
"""Largest number of pending lines of metrics."""
ACTING = ("parameters", "inference", "environment", "write")
"""Activities of the actor in a serial run, which shares the learner's stopwatch."""
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


class Reporter:
    """Writes lines of metrics to the run's folder, and shows them."""

    def __init__(self, session: Session, learner: Learner, cost: CostMeter) -> None:
        self._table: dict[str, Any] | None = None
        """The memory's counters at the last line; `None` before the first."""
        self._session = session
        self._learner = learner
        self._cost = cost
        self.threads: dict[str, Stopwatch] = {}
        """Stopwatches of other threads of this process, by their name."""
        self._process = SERIAL if self._session.config.serial else "learner 0"
        self._times = Times(self._session.folder.path, resumed=not self._session.folder.is_new)
        self._counters = MemoryCounters(resumed=not self._session.folder.is_new)
        self._ended = False
        self._files: MetricsFiles | None = None
        self._last_line: Metrics | None = None
        self._unwritten: deque[Metrics] = deque(maxlen=KEPT_LINES)

    def begin(self) -> None:
        """Opens the files."""
        settings = self._session.config.as_dict()
        self._files = MetricsFiles(
            self._session.folder.path, self._session.totals.agent_steps, settings, self._learner.updates
        )

    @property
    def has_begun(self) -> bool:
        """Whether the files are open."""
        return self._files is not None

    def close(self) -> None:
        """Writes pending lines if they can be written, and closes the files."""
        assert self._files is not None
        self.end_times()
        # A disk that is still full was reported with the first line that it refused.
        with contextlib.suppress(RunFolderError):
            self.write_pending_lines()
        with contextlib.suppress(OSError):
            self._files.close()

    @property
    def memory_bytes(self) -> int:
        """Bytes of the replay memory's steps at the last line; 0 before the first."""
        return 0 if self._table is None else int(self._table["bytes"])

    def report(self, memory: ReplayMemory) -> None:
        """Writes a line of metrics and shows it, unless a signal interrupts the run meanwhile."""
        self._ask_for_counters(memory)
        if not self._session.interrupted:
            self._report()
        self._session.stopwatch.lap("report")

    def _ask_for_counters(self, memory: ReplayMemory) -> None:
        def ask() -> None:
            self._table = memory.stats()

        self._session.ask(ask)

    def _report(self) -> None:
        if self._table is None:
            return
        self._take_times()
        meter = self._session.meter
        meter.record("learner_updates", self._learner.updates)
        self._learner.record(meter)
        meter.record("parameter_version", self._learner.publications)
        meter.record("samples_per_insert_target", self._session.config.samples_per_insert)
        self._session.totals.record(meter)
        self._cost.read(self._session.totals.env_frames).record(meter)
        added = self._counters.record(meter, self._table)
        self._times.add_samples(added, self._session.config.batch_size - self._session.config.demonstrations)
        self._times.write()
        metrics = meter.line()
        left = self._seconds_left(metrics["agent_steps_per_s"])
        self._write(metrics if left is None else {**metrics, "seconds_left": round(left, 1)})
        self._session.stopwatch.lap("report")

    def _take_times(self) -> None:
        seconds = self._session.stopwatch.take()
        self._times.add(self._process, seconds)
        for thread, stopwatch in self.threads.items():
            self._times.add(f"{self._process}: {thread}", stopwatch.take())
        if self._session.config.serial:
            acted = {name: seconds.pop(name) for name in ACTING if name in seconds}
            self._session.meter.record_seconds("actor_time", acted)
            seconds["act"] = sum(acted.values())
        self._session.meter.record_seconds("learner_time", seconds)

    def add_report(self, report: ActorReport) -> None:
        """Adds the report of an actor to the next line, and its times."""
        self._session.totals.add_report(report, self._session.meter)
        if report.steps:
            self._session.meter.record_mean("parameter_lag", self._learner.updates - report.parameter_updates)
        if report.games:
            self._session.call("on_games", report.games)
        # Reports of a serial run have no times.
        if report.seconds:
            self._times.add(f"actor {report.actor}", report.seconds)

    def end_times(self) -> None:
        """Writes the times until now, and excludes later activities, such as the last evaluation."""
        if not self._ended:
            self._ended = True
            self._session.stopwatch.lap("other")
            self._take_times()
            self._times.write()

    @property
    def due_by_steps(self) -> bool:
        """Whether a multiple of `report_steps` was passed since the last line, independent of the clock."""
        period = self._session.config.report_steps
        return self._session.totals.agent_steps // period > self._session.totals.reported_steps // period

    @property
    def due_by_time(self) -> bool:
        """Whether `report_seconds` passed since the last line."""
        return self._session.meter.seconds_since_line >= self._session.config.report_seconds

    def report_rest(self, memory: ReplayMemory) -> None:
        """Writes the last line of metrics, unless no step was taken since the previous line."""
        if self._session.totals.agent_steps <= self._session.totals.reported_steps and self._last_line is not None:
            return
        if self._session.interrupted:
            # If the memory does not answer, the last line repeats the counters of the previous line.
            with contextlib.suppress(ReplayError):
                self._table = memory.stats(LAST_SECONDS)
        else:
            self._ask_for_counters(memory)
        self._report()

    def report_sticky(self, evaluation: Evaluation, agent: EvaluatedAgent, sticky: Evaluation) -> None:
        """Rewrites the scores of the evaluation after training, with the games with sticky actions."""
        both = (agent.report(played) | aggregate(played.scores) for played in (evaluation, sticky))
        report, report["sticky"] = both
        self._session.folder.save_evaluation(report)

    def report_evaluation(self, evaluation: Evaluation, agent: EvaluatedAgent) -> None:
        """Writes the scores of the evaluation after training, and repeats the last line of metrics with their mean."""
        self._session.folder.save_evaluation(agent.report(evaluation) | aggregate(evaluation.scores))
        assert self._last_line is not None
        best = self._session.totals.evaluation_best
        assert best is not None
        self._write({**self._last_line, "evaluation_mean": evaluation.mean, "evaluation_best": best})

    def _seconds_left(self, steps_per_s: float) -> float | None:
        """Seconds until training ends by the clock or by its steps at this rate; `None` if neither is set."""
        config, ends = self._session.config, []
        if config.minutes is not None:
            ends.append(60 * config.minutes - self._session.meter.session_s)
        if config.steps is not None and steps_per_s > 0:
            ends.append((config.steps - self._session.totals.agent_steps) / steps_per_s)
        return max(0.0, min(ends)) if ends else None

    def _write(self, metrics: Metrics) -> None:
        """Writes pending lines of metrics, then this one, and shows it."""
        self._last_line = metrics
        self._unwritten.append(metrics)
        try:
            with self._session.folder.continuing():
                self.write_pending_lines()
        except RunFolderError as error:
            if len(self._unwritten) == 1:
                logger.warning("lines of metrics are pending until they can be written: %s", error)
        self._session.display.show(metrics, self._session.note)
        self._session.call("on_metrics", metrics)

    def write_pending_lines(self) -> None:
        """Writes lines that are pending because of a full disk."""
        assert self._files is not None
        with self._session.folder.writing():
            while self._unwritten:
                self._files.write(self._unwritten[0])
                self._unwritten.popleft()
