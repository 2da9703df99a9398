"""One point of a sweep: short training runs after a warm-up, in processes of their own."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch

from innet_drl import train
from innet_drl.launch.launcher import (
    ProcessFailure,
    Stopped,
    await_end,
    prepare_to_play,
    start,
    start_fork_server,
)
from innet_drl.train.errors import ProcessError
from innet_drl.train.observe.cost import EnergyCounters, OtherPrograms, ProcessorTime, gpu_uuids
from innet_drl.train.observe.metrics import Metrics, values_of
from innet_drl.train.settings.config import Config

REPORT_SECONDS = 0.5
"""Period of the lines of metrics; actors report as often."""
LARGEST_MIN_SIZE = 10_000
"""Upper bound on the transitions before the first update: more would only take longer."""
LIMIT_SECONDS = 300.0
"""Timeout of the first update."""
ANSWER_SECONDS = 120.0 + LIMIT_SECONDS
"""Timeout of a message of a point's process, which covers its start."""
STOP_SECONDS = 20.0
"""Seconds that a point's process has to end before it is killed."""
NEAR_RATIO = 0.1
"""Relative error of the replay ratio below which the warm-up ends: the faster side then waits for the other."""
LONGEST_WARM_UP = 10.0
"""Longest warm-up, as a multiple of `--warm-up`; the point then has another ratio."""
SWEPT = ("actors", "threads", "environments")
"""Numbers that a sweep varies."""
ROLES = ("actor", "learner")

Key = tuple[int, int, int]
"""The `SWEPT` of a point."""


@dataclass(frozen=True)
class Role:
    """Time of the actors, or of the learner."""

    processor_s: float
    """Processor seconds of an agent step, in all processes but the learner's; of the learner, of an update, with the
    replay memory in its process."""
    shares: dict[str, float] = field(default_factory=dict)
    """Shares of the time, by activity."""


@dataclass(frozen=True)
class Point:
    """A measurement of a point, or medians. Values whose counter is missing are `None`."""

    actors: int
    threads: int
    """Hardware threads of all processes of the run."""
    environments: int
    """Environments of an actor."""
    frames_per_s: float
    """Environment frames."""
    updates_per_s: float
    samples_per_insert: float
    """Replay ratio reached in the measured time."""
    cpu: float
    """Share of the hardware threads that the run used."""
    gpu: float | None
    """Share of the time in which the GPUs computed."""
    cpu_watts: float | None
    """Power of the processors."""
    gpu_watts: float | None
    """Power of the learners' GPUs."""
    watts: float | None
    """Power of processors and GPUs."""
    frames_per_joule: float | None
    """Environment frames of a joule."""
    others: float
    """Share of the hardware threads that other programs used: close to 0 on a quiet machine."""
    seconds: float
    """Measured time."""
    frames_per_step: int
    """Environment frames of an agent step."""
    actor: Role
    learner: Role

    @property
    def key(self) -> Key:
        """Actors, threads and environments."""
        return self.actors, self.threads, self.environments

    @classmethod
    def read(cls, values: dict[str, Any]) -> Point:
        """Makes a point of the values of `dataclasses.asdict`."""
        return cls(**values | {role: Role(**values[role]) for role in ROLES})


def combined(repeats: Sequence[Point], of: Callable[[Any], Any] = statistics.median) -> Point:
    """Returns a point with the median of each value, or with the ends of its spread."""
    return Point.read(_combined([dataclasses.asdict(point) for point in repeats], of))


def _combined(values: Sequence[Any], of: Callable[[Any], Any]) -> Any:
    if isinstance(values[0], dict):
        return {name: _combined([each.get(name, 0.0) for each in values], of) for name in values[0]}
    # The median of two equal integers would be a float.
    return None if None in values else values[0] if len(set(values)) == 1 else of(values)


class _Measured(Exception):  # noqa: N818 - it ends the run of a point that was measured
    """Ends the run of a measured point."""


class _Watch(train.Callback):
    """Measures a run from its lines of metrics, once it is warm."""

    def __init__(self, config: Config, threads: Sequence[int], warm_up: float, seconds: float) -> None:
        self.point: Point | None = None
        self.missing: dict[str, str] = {}
        self.say: Callable[[str], None] = lambda done: None
        self._config, self._threads, self._warm_up, self._seconds = config, threads, warm_up, seconds
        self._first_update: float | None = None
        self._started: float | None = None
        """Start of the measurement, once the run is warm."""
        self._lines: list[Metrics] = []
        self._gpu: list[float] = []

    def on_metrics(self, metrics: Metrics) -> None:
        if metrics["learner_updates"] == 0:
            if metrics["time_s"] > LIMIT_SECONDS:
                raise ProcessError(
                    f"a run with {self._config.actors} actors made no update in {LIMIT_SECONDS:g} s: sweep fewer "
                    "actors or more threads"
                )
            self.say(f"{metrics['replay_steps']:,} steps before the first update")
            return
        if self._first_update is None:
            self._first_update = metrics["time_s"]
        self._lines.append(metrics)
        if self._started is None:
            if not self._is_warm(metrics["time_s"]):
                self.say("warm-up")
                return
            self._lines = [metrics]
            self._begin()
        utilization = self._energy.gpu_utilization()
        if utilization is not None:
            self._gpu.append(utilization)
        measured = metrics["time_s"] - self._lines[0]["time_s"]
        self.say(f"{measured:.0f} of {self._seconds:g} s")
        if measured >= self._seconds and len(self._lines) > 2:
            self._end()
            raise _Measured

    def _is_warm(self, now: float) -> bool:
        """Whether the last `warm_up` seconds had the replay ratio, or the longest warm-up is over."""
        assert self._first_update is not None
        warm_up = now - self._first_update
        if warm_up < self._warm_up:
            return False
        if warm_up > LONGEST_WARM_UP * self._warm_up:
            return True
        # A slope needs several lines.
        window = max(self._warm_up, 3 * self._config.report_seconds)
        self._lines = [line for line in self._lines if now - line["time_s"] <= window]
        return len(self._lines) > 2 and abs(self._ratio() / self._config.samples_per_insert - 1) < NEAR_RATIO

    def _ratio(self) -> float:
        steps, updates = self._rate("agent_steps"), self._rate("learner_updates")
        return updates * self._config.batch_size * self._config.learners / steps if steps else 0.0

    def _begin(self) -> None:
        gpus = 0 if self._config.device == "cpu" else self._config.learners
        self._energy = EnergyCounters(gpu_uuids(gpus) if torch.cuda.is_available() else ())
        self.missing = self._energy.missing
        self._processes, self._learner = ProcessorTime(), time.process_time()
        self._others, self._started = OtherPrograms(self._threads), time.monotonic()

    def _end(self) -> None:
        assert self._started is not None
        energy = self._energy.read()
        elapsed = time.monotonic() - self._started
        whole, learner = self._processes.read(fresh=True), time.process_time() - self._learner
        available = elapsed * len(self._threads)
        steps, updates = (self._rate(name) for name in ("agent_steps", "learner_updates"))
        frames = self._rate("env_frames")
        config, joules = self._config, energy.joules
        self.point = Point(
            actors=config.actors,
            threads=len(self._threads),
            environments=config.environments,
            frames_per_s=round(frames, 2),
            updates_per_s=round(updates, 3),
            samples_per_insert=round(self._ratio(), 3),
            cpu=round(whole / available, 4),
            gpu=round(statistics.fmean(self._gpu), 4) if self._gpu else None,
            cpu_watts=_watts(energy.cpu, elapsed),
            gpu_watts=_watts(energy.gpu, elapsed) if self._gpu else None,
            watts=_watts(joules, elapsed),
            frames_per_joule=round(frames * elapsed / joules, 3) if joules else None,
            others=round(self._others.share(), 4),
            seconds=round(elapsed, 3),
            frames_per_step=int(self._lines[-1]["env_frames"] // max(1, self._lines[-1]["agent_steps"])),
            actor=Role(max(0.0, whole - learner) / elapsed / steps if steps else 0.0, self._shares("actor_time")),
            learner=Role(learner / elapsed / updates if updates else 0.0, self._shares("learner_time")),
        )

    def _rate(self, name: str) -> float:
        """Slope of a counter by least squares, as actors report between the lines."""
        times, counts = ([line[of] for line in self._lines] for of in ("time_s", name))
        return max(0.0, float(np.polyfit(times, counts, 1)[0]))

    def _shares(self, name: str) -> dict[str, float]:
        """Mean shares, weighted by the seconds of the lines."""
        sums: dict[str, float] = {}
        for before, line in zip(self._lines, self._lines[1:], strict=False):
            for activity, share in values_of(line, name).items():
                sums[activity] = sums.get(activity, 0.0) + share * (line["time_s"] - before["time_s"])
        total = sum(sums.values())
        return {activity: round(value / total, 4) for activity, value in sums.items()} if total else {}


def _watts(joules: float | None, seconds: float) -> float | None:
    return None if joules is None else round(joules / seconds, 2)


def settings_of(config: Config, actors: int, environments: int, seconds: float) -> Config:
    """Returns the settings of a point's run: without a limit, evaluations or files; its callback ends it."""
    return dataclasses.replace(
        config,
        actors=actors,
        environments=environments,
        min_size=min(config.min_size, LARGEST_MIN_SIZE),
        steps=None,
        minutes=None,
        evaluation_period=0,
        target_return=None,
        video=False,
        checkpoint_replay=False,
        checkpoint_minutes=1e6,
        report_seconds=min(REPORT_SECONDS, seconds / 4),
    )


def run_point(config: Config, threads: Sequence[int], warm_up: float, seconds: float, pipe: Connection) -> None:
    """The main function of a point's process, whose CPU affinity its actors inherit."""
    # `measure` ends this process, in the end or early.
    with contextlib.suppress(Stopped, BrokenPipeError):
        os.sched_setaffinity(0, threads)
        prepare_to_play()
        watch = _Watch(config, threads, warm_up, seconds)
        watch.say = pipe.send
        try:
            with tempfile.TemporaryDirectory(prefix="innet-") as folder, contextlib.suppress(_Measured):
                train.run(config, callbacks=[watch], folder=Path(folder) / "run")
            message: Any = (watch.point, watch.missing)
        except Exception as error:
            message = ProcessFailure.of(error, fatal=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pipe.send(message)


def measure(
    config: Config, threads: Sequence[int], warm_up: float, seconds: float, progress: Callable[[str], None]
) -> tuple[Point, dict[str, str]]:
    """Measures a point.

    Args:
        config: Settings of the run (`settings_of`).
        threads: Hardware threads of its processes.
        warm_up: Seconds from the first update to the measured time.
        seconds: Measured time.
        progress: Shows how far it is, at least every half second. It may raise, which ends the run.

    Returns:
        The point, and the reason of each missing counter.

    Raises:
        ProcessError: The run failed.
    """
    start_fork_server()
    process, pipe = start(run_point, "a run of the sweep", config, list(threads), warm_up, seconds)
    try:
        while isinstance(message := _received(pipe, progress), str):
            progress(message)
    finally:
        pipe.close()
        process.terminate()
        await_end(process, STOP_SECONDS)
    if isinstance(message, ProcessFailure):
        raise ProcessError(f"the run with {config.actors} actors on {len(threads)} threads failed: {message.whole}")
    point, missing = message
    return point, missing


def _received(pipe: Connection, progress: Callable[[str], None]) -> Any:
    """The next message of a point's process, or its failure."""
    try:
        for _ in range(int(ANSWER_SECONDS / REPORT_SECONDS)):
            if pipe.poll(REPORT_SECONDS):
                return pipe.recv()
            progress("waiting")
        return ProcessFailure("it does not answer", fatal=True)
    except (EOFError, OSError):
        return ProcessFailure("its process ended, perhaps for want of memory", fatal=True)
