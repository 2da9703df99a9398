"""One sitting of a run: the learner with its metrics, checkpoints and evaluations, and when each is due.

`serial.py` and `launch.py` decide where batches come from; this is what they share.
"""

from __future__ import annotations

import dataclasses
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from os import PathLike
from types import FrameType
from typing import Any, Protocol, Self

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.train import environments
from innet_drl.train.checkpoints import Checkpoint
from innet_drl.train.config import Config
from innet_drl.train.errors import ConfigurationError, DivergedError
from innet_drl.train.evaluation import Evaluation, evaluate
from innet_drl.train.learner import Learner, Update
from innet_drl.train.metrics import Meter, Metrics, Stopwatch
from innet_drl.train.metrics_files import MetricsFiles
from innet_drl.train.numerics import choose_numerics
from innet_drl.train.page import Page
from innet_drl.train.run_folder import RunFolder

NETWORK_SETTINGS = ("environment", "stack", "channels", "hidden", "layers", "layer_norm")
"""Settings that a checkpoint's tensors depend on."""
MEMORY_SETTINGS = ("message", "priority_exponent", "n_step", "clip_rewards", "life_loss_ends")
"""Settings that the steps and items of a memory depend on."""


class LearnerMemory(Protocol):
    """A replay memory as the learner uses it: `innet_drl.Replay`, or something in its place."""

    def batches(
        self, table: str, count: int, view: Any, *, beta: float, prefetch: int, device: str, timeout: float | None
    ) -> AbstractContextManager[Iterator[TorchBatch]]:
        """Draws again and again."""

    def update_priorities(self, table: str, key: Any, priority: Any) -> innet.UpdateReceipt:
        """Sets the priorities of drawn items."""

    def put_parameters(self, name: str, tensors: Mapping[str, Any]) -> int:
        """Publishes the parameters."""

    def stats(self) -> dict[str, Any]:
        """Counters and gauges of the memory."""

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the memory to a file, where it is in this process."""


class Session:
    """A run while it trains.

    Args:
        config: The run's settings.
        folder: Its folder.
        page: Where it shows itself.
        resumed: The checkpoint to go on from.

    Raises:
        UnavailableEnvironmentError: The environment cannot be made.
        ConfigurationError: There is no such device, or the checkpoint is of another network.
    """

    def __init__(self, config: Config, folder: RunFolder, page: Page, resumed: Checkpoint | None = None) -> None:
        self.config = config
        self.folder = folder
        # On a server, runs are told apart by their folders. A memory of our own has one name for all, since
        # its draws depend on it.
        self.name = "apex" if config.serial or config.replay == "embedded" else folder.name
        self.page = page
        self.resumed = resumed
        self.interrupted = False
        self.note = "starting"
        probe = environments.make(config, 1)
        self.spec = probe.spec
        self.restorable = probe.restorable
        probe.close()
        torch.manual_seed(config.seed)
        self.learner = Learner(config, self.spec)
        torch.set_num_threads(config.learner_threads or self.learner.threads_left)
        self.learner.use(choose_numerics(config, self.spec))
        self.meter = Meter(config.all_environments, self.spec.frames_per_step)
        self.stopwatch = Stopwatch()
        if resumed is not None:
            self._load(resumed)
        self._files: MetricsFiles | None = None
        self._last_line: Metrics | None = None
        self._last_checkpoint = time.monotonic()
        self._reached_target = False
        self._evaluated: tuple[int, Evaluation] | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for name in (signal.SIGINT, signal.SIGTERM):
            self._previous_handlers[name] = signal.signal(name, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        for name, handler in self._previous_handlers.items():
            signal.signal(name, handler)
        if self._files is not None:
            with self.folder.writing():
                self._files.close()

    def begin(self) -> None:
        """Makes the run's folder, or goes on in it: for when nothing is left that can keep training from starting.

        Raises:
            RunFolderError: It cannot be written.
        """
        self.folder.begin(self.config)
        with self.folder.writing():
            if not self.keeps_memory:
                # What an earlier session left would be older than the checkpoints to come.
                self.folder.replay.unlink(missing_ok=True)
            self._files = MetricsFiles(self.folder.path, self.meter.agent_steps)

    @property
    def keeps_memory(self) -> bool:
        """Whether checkpoints have the replay memory beside them."""
        config = self.config
        by_journal = config.serial and self.restorable
        in_learner = config.replay == "embedded" or config.on_redis
        return config.checkpoint_replay and in_learner and not by_journal

    def restore_memory(self, replay: innet.Replay) -> bool:
        """Puts the memory of a resumed run back, where its folder has one; whether it had.

        Raises:
            ConfigurationError: It was written with other settings.
            RunFolderError: It is damaged.
        """
        path = self.folder.replay
        if self.resumed is None or not self.keeps_memory or not path.exists():
            return False
        before = self.folder.config()
        names = MEMORY_SETTINGS if before.on_redis == self.config.on_redis else (*MEMORY_SETTINGS, "replay")
        changed = self.config.changed_flags(before, names)
        if changed:
            raise ConfigurationError(
                f"the memory of this run was written with another {changed}: leave that away, or delete {path} to go "
                "on with an empty memory"
            )
        self.folder.restore_replay(replay)
        steps = replay.stats()["tables"][self.name]["steps"]
        logger.info(f"the replay memory goes on with its {steps:,} steps")
        return True

    @property
    def finished(self) -> bool:
        """Whether training is over: time, steps, target, or a signal."""
        config = self.config
        return (
            self.interrupted
            or self._reached_target
            or (config.minutes is not None and self.meter.session_s >= 60 * config.minutes)
            or (config.steps is not None and self.meter.agent_steps >= config.steps)
        )

    def learn(self, batch: TorchBatch) -> Update:
        """Updates on a batch and books it."""
        update = self.learner.update(batch)
        self.meter.add_update(update, batch.age.double().mean())
        self.stopwatch.lap("update")
        return update

    def priorities(self, update: Update) -> NDArray[np.float64]:
        """New priorities [B] of an update's transitions; waits for the update.

        Raises:
            DivergedError: They are no numbers.
        """
        priorities = update.priorities()
        if not np.isfinite(priorities).all():
            raise self._diverged("TD errors")
        return priorities

    def _diverged(self, what: str) -> DivergedError:
        newest = self.folder.newest_checkpoint()
        rate = f"a lower --learning-rate than {self.config.learning_rate:g}"
        return DivergedError(
            f"training has diverged by update {self.learner.updates:,}, its {what} are infinite or NaN: "
            + (
                f"start again with {rate} and another --out"
                if newest is None
                else f"go on from its last good checkpoint, {newest}, with --resume {self.folder.path} and {rate}"
            )
        )

    def publish(self, replay: LearnerMemory) -> None:
        """Publishes the parameters for the actors."""
        replay.put_parameters(self.name, self.learner.parameters())
        self.learner.publications += 1
        self.stopwatch.lap("publish")

    def publish_if_due(self, replay: LearnerMemory) -> bool:
        """Publishes after every `publish_period` updates, and says whether it did."""
        due = self.learner.updates % self.config.publish_period == 0
        if due:
            self.publish(replay)
        return due

    def evaluate_if_due(self) -> None:
        """Evaluates after every `evaluation_period` updates; reaching the target return ends training."""
        config = self.config
        if not config.evaluation_period or self.learner.updates % config.evaluation_period:
            return
        evaluation = self.evaluate()
        if evaluation is None:
            return
        self._reached_target = config.target_return is not None and evaluation.mean >= config.target_return
        logger.info(f"after {self.learner.updates:,} updates: {evaluation}")

    def evaluate(self) -> Evaluation | None:
        """Plays the evaluation's games with the average of the newest parameters; `None` if a signal came meanwhile."""
        if self._evaluated is not None and self._evaluated[0] == self.learner.updates:
            return self._evaluated[1]
        evaluation = evaluate(
            self.config, self.learner.average, seed=self.config.seed, stopped=lambda: self.interrupted
        )
        if evaluation is not None:
            self._evaluated = (self.learner.updates, evaluation)
            self.meter.evaluation_mean = evaluation.mean
        self.stopwatch.lap("evaluate")
        return evaluation

    def report(self, replay: LearnerMemory) -> None:
        """Writes a line of metrics and shows it.

        Raises:
            RunFolderError: It cannot be written.
        """
        self.meter.add_learner_time(self.stopwatch.take())
        table = replay.stats()["tables"][self.name]
        metrics = self.meter.line(self.learner.updates, self.learner.publications, table)
        self._write(metrics)
        self._show(metrics)
        self.stopwatch.lap("report")

    @property
    def report_due_by_steps(self) -> bool:
        """Whether a multiple of `report_steps` was passed since the last line: independent of the clock."""
        period = self.config.report_steps
        return self.meter.agent_steps // period > self.meter.reported_steps // period

    @property
    def report_due_by_time(self) -> bool:
        """Whether `report_seconds` passed since the last line."""
        return self.meter.seconds_since_line >= self.config.report_seconds

    def report_rest(self, replay: LearnerMemory) -> None:
        """Writes the last line of metrics, unless nothing happened since the one before."""
        if self.meter.agent_steps > self.meter.reported_steps or self._last_line is None:
            self.report(replay)

    def report_evaluation(self, evaluation: Evaluation) -> None:
        """Writes the scores of the evaluation after training, and the last line of metrics again with their mean.

        Raises:
            RunFolderError: They cannot be written.
        """
        scores = {"agent_steps": self.meter.agent_steps, "learner_updates": self.learner.updates}
        self.folder.save_evaluation({**scores, "mean": evaluation.mean, **dataclasses.asdict(evaluation)})
        assert self._last_line is not None
        metrics = dataclasses.replace(self._last_line, evaluation_mean=evaluation.mean)
        self._write(metrics)
        self._show(metrics)

    def _show(self, metrics: Metrics) -> None:
        scores = {actor: sum(scores) / len(scores) for actor, scores in self.meter.scores_by_actor.items() if scores}
        self.page.show(metrics, scores, self.note)

    @property
    def checkpoint_due(self) -> bool:
        """Whether `checkpoint_minutes` passed since the last one."""
        return time.monotonic() - self._last_checkpoint >= 60 * self.config.checkpoint_minutes

    def checkpoint(
        self,
        tensors: dict[str, torch.Tensor] | None = None,
        state: dict[str, Any] | None = None,
        *,
        replay: LearnerMemory | None = None,
    ) -> None:
        """Writes a checkpoint of the learner, with more tensors and state, and the memory where the run keeps it.

        Raises:
            DivergedError: There is nothing worth keeping.
            RunFolderError: It cannot be written.
        """
        if not self.learner.finite:
            raise self._diverged("weights")
        whole_state = {
            "learner": {"updates": self.learner.updates, "publications": self.learner.publications},
            "meter": self.meter.state(),
            **(state or {}),
        }
        self.folder.save_checkpoint(self.meter.agent_steps, self.learner.tensors() | (tensors or {}), whole_state)
        if replay is not None and self.keeps_memory:
            self.folder.save_replay(replay)
        self._last_checkpoint = time.monotonic()
        self.stopwatch.lap("checkpoint")

    def _write(self, metrics: Metrics) -> None:
        assert self._files is not None
        with self.folder.writing():
            self._files.write(metrics)
        self._last_line = metrics

    def _load(self, resumed: Checkpoint) -> None:
        counts = resumed.state["learner"]
        try:
            self.learner.load(resumed.tensors, counts["updates"], counts["publications"])
        except (RuntimeError, KeyError) as error:
            changed = self.config.changed_flags(self.folder.config(), NETWORK_SETTINGS)
            raise ConfigurationError(
                f"the checkpoint {resumed.path} is of another network: "
                + (f"leave {changed} away" if changed else f"it does not fit the run's config.yaml ({error})")
            ) from error
        self.meter.restore(resumed.state["meter"])

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted:
            # The second time somebody means it.
            raise KeyboardInterrupt
        self.interrupted = True
        logger.warning(f"{signal.Signals(number).name}: ending with a checkpoint; once more to end at once")
