"""The trainer: learner, checkpoints and evaluations of one session of a run, and when each is due.

`serial.py` and `innet_drl.launch.parallel` run the loop: they sample batches and call the trainer with each.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from innet_drl.train import environments
from innet_drl.train.callbacks import Callback, Result, Training
from innet_drl.train.errors import (
    ConfigurationError,
    DivergedError,
    RunFolderError,
    TrainingError,
    resuming,
)
from innet_drl.train.learn.checkpoints import Checkpoint
from innet_drl.train.learn.learner import Learner, Update
from innet_drl.train.learn.numerics import choose_numerics, random_batch
from innet_drl.train.memory import MemorySettings, ReplayMemory, memory_class, memory_settings
from innet_drl.train.observe.cost import CostMeter, gpu_uuids
from innet_drl.train.observe.display import Display
from innet_drl.train.observe.metrics import Meter, Totals
from innet_drl.train.play import video
from innet_drl.train.run_folder import FINISHED, RunFolder
from innet_drl.train.runs.evaluation_schedule import EvaluationSchedule
from innet_drl.train.runs.preload import preload
from innet_drl.train.runs.reporting import Reporter
from innet_drl.train.runs.session import Session
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import description, versions
from innet_drl.train.settings.slices import LOSSES
from innet_drl.train.settings.values import path_of

logger = logging.getLogger(__name__)

RETRY_SECONDS = 60.0
"""Seconds until the retry of a failed checkpoint."""
NETWORK_SETTINGS = (
    *("environment", "environment_args", "environment_wrappers", "full_action_set", "stack", "frame_size", "network"),
    *("channels", "hidden", "layers", "layer_norm", "loss", "atoms", "quantiles"),
)
"""Settings that a checkpoint's tensors depend on."""
SNAPSHOT_SETTINGS = ("priority_exponent", "n_step", "clip_rewards", "life_loss_ends")
"""Settings that the saved steps and items of a memory depend on."""


class Trainer:
    """One session of a run; a run that is resumed has several. Use it as a context manager."""

    def __init__(
        self,
        config: Config,
        folder: RunFolder,
        display: Display,
        resumed: Checkpoint | None = None,
        callbacks: Sequence[Callback] = (),
        *,
        signals: bool = False,
    ) -> None:
        self.config = config
        self.session = Session(config, folder, display, callbacks, signals=signals)
        self.stopwatch = self.session.stopwatch
        # A server distinguishes runs by the names of their folders. Embedded memories have one name, because samples
        # depend on the name.
        self.name = "apex" if config.serial or config.replay == "embedded" else folder.name
        self.resumed = resumed
        display.say(f"making {config.environment_name}")
        self._probe = probe = environments.make(config, 1)
        self.spec = probe.spec
        probe.close()
        for part in self.spec.left_out:
            name = config.environment_name
            logger.warning("%s: the observation's part %r is text, and is left out", name, part)
        self._check_evaluated()
        torch.manual_seed(config.seed)
        self.learner = Learner(config, self.spec)
        torch.set_num_threads(config.learner_threads or self.learner.threads_left)
        self.learner.use(choose_numerics(config, self.spec, display.progress))
        if self.learner.device.type == "cuda" and self.learner.obstacle is not None:
            logger.info("an update is not one CUDA graph: %s", self.learner.obstacle)
        if config.loss not in LOSSES:
            observations = probe.sample(2 * config.batch_size, config.seed)
            self.learner.try_loss(random_batch(self.spec, config.batch_size, self.learner.device, observations))
        self.learner.stopwatch = self.stopwatch
        self.session.meter = Meter()
        self.totals = self.session.totals = Totals(config.all_environments, self.spec.frames_per_step)
        self._cost = CostMeter(gpu_uuids(config.learners) if self.learner.device.type == "cuda" else ())
        if resumed is not None:
            self._load(resumed)
        self.reporter = Reporter(self.session, self.learner, self._cost)
        for callback in callbacks:
            callback.training = Training(self.learner, self.totals, self.session.meter)
        self.evaluations = EvaluationSchedule(self.session, self.learner)
        self._next_checkpoint = time.monotonic() + 60 * config.checkpoint_minutes
        self._reached_end = False

    def _check_evaluated(self) -> None:
        """Checks that the environment of evaluations has the spaces of the one that is trained on."""
        evaluated = self.config.evaluated
        if evaluated is self.config:
            return
        with contextlib.closing(environments.make(evaluated, 1)) as probe:
            spec = probe.spec
        for what, ours, theirs in (
            ("actions", self.spec.actions, spec.actions),
            ("observations", self.spec.arrays, spec.arrays),
        ):
            if ours != theirs:
                raise ConfigurationError(
                    f"evaluation_environment {evaluated.environment_name} has other {what} ({theirs}) than environment "
                    f"{self.config.environment_name} ({ours}): an agent plays environments of one space"
                )

    def _load(self, resumed: Checkpoint) -> None:
        counts = resumed.state["learner"]
        try:
            self.learner.load(resumed.tensors, counts["updates"], counts["publications"])
        except RunFolderError as error:
            changed = self.config.changed(self.session.folder.config(), NETWORK_SETTINGS)
            if not changed:
                raise
            raise ConfigurationError(
                f"the checkpoint {resumed.path} is of another network: keep {' and '.join(changed)} as in its "
                "config.yaml"
            ) from error
        self.session.meter.resume(resumed.state["meter"]["time_s"])
        self.totals.restore(resumed.state["meter"])
        self._cost.restore(resumed.state["cost"])

    def __enter__(self) -> Self:
        self.session.__enter__()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.session.__exit__()
        if self.reporter.has_begun:
            self.reporter.close()
            how = FINISHED if self._reached_end else "interrupted"
            how = how if error is None else f"{type(error).__name__}: {error}".rstrip(": ")
            self.session.folder.end_session(self.totals.agent_steps, how)
            newest = self.session.folder.newest_checkpoint()
            if isinstance(error, KeyboardInterrupt) and newest is not None:
                logger.warning("interrupted: continue from %s with %s", newest, resuming(self.session.folder.path))
            if error is not None:
                self.session.call("on_error", error)

    def begin(self) -> None:
        """Creates the run's folder, or continues in it. Call it last, after everything else that can fail."""
        with self.session.folder.writing():
            if not self.keeps_memory:
                self.session.folder.remove_memory()
            self.reporter.begin()
        self.session.folder.begin(self.config)
        device = self.learner.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
        about = {"host": socket.gethostname(), **description(), "device": name, "versions": versions()}
        self.session.folder.begin_session(self.totals.agent_steps, about)
        self.session.call("on_start", self.config, self.session.folder.path)
        self.stopwatch.lap("start")

    @contextlib.contextmanager
    def keeping(self, write: Callable[[], None]) -> Iterator[None]:
        """Writes a checkpoint if a `KeyboardInterrupt` ends training, in programs without the run's signal handlers.

        The interrupt may be raised between any two calls. Each change of the weights is a single call of torch, so that
        the checkpoint has complete updates. An unexpected error, such as a callback's, also leaves a first checkpoint.
        """
        try:
            yield
        except KeyboardInterrupt:
            # Interrupted before: this is the second signal, which ends the run at once.
            if not self.session.interrupted:
                logger.info("interrupted: ending with a checkpoint; once more to end at once")
                self._keep(write)
            raise
        except TrainingError:
            raise
        except Exception:
            if self.session.folder.newest_checkpoint() is None:
                self._keep(self.checkpoint)
            raise

    def _keep(self, write: Callable[[], None]) -> None:
        """Writes a checkpoint of a run that is about to end, unless it has not learned."""
        if self.learner.updates > 0:
            try:
                write()
            except TrainingError as error:
                logger.warning("the last checkpoint could not be written: %s", error)

    @property
    def keeps_memory(self) -> bool:
        """Whether the replay memory is saved with each checkpoint."""
        return self.config.checkpoint_replay and memory_class(self.config.replay).in_learner

    def memory_settings(self) -> MemorySettings:
        """Returns the settings with which this session creates its memory."""
        earlier = None if self.session.folder.is_new else self.session.folder.config()
        return memory_settings(self.config, self.spec, self.name, self.learner.parameters(), earlier=earlier)

    def restore_memory(self, memory: ReplayMemory) -> bool:
        """Restores the memory of a resumed run; returns whether its folder has a snapshot."""
        path = self.session.folder.snapshot
        if self.resumed is None or not self.keeps_memory:
            return False
        self.session.folder.match_memory(self.resumed)
        if not path.exists():
            return False
        changed = self.config.changed(self.session.folder.config(), SNAPSHOT_SETTINGS)
        if changed:
            raise ConfigurationError(
                f"the memory of this run was written with another {' and '.join(changed)}: keep that as it was, or "
                f"delete {path} to continue with an empty memory"
            )
        with self.session.copying("restoring the replay memory", path, path.stat().st_size):
            self.session.folder.restore_memory(memory)
        logger.info("the replay memory continues with its %s steps", f"{memory.stats()['steps']:,}")
        return True

    def preload(self, memory: ReplayMemory) -> None:
        """Imports the run's demonstrations, unless an earlier session has."""
        if self.config.preload is not None:
            self.session.say("reading the demonstrations")
            preload(memory.replay, self.memory_settings(), self._probe)

    @property
    def finished(self) -> bool:
        """Whether training has reached its time, steps or target, or a signal or callback has ended it."""
        steps = self.config.steps
        return self.ends_now or (steps is not None and self.totals.agent_steps >= steps)

    @property
    def ends_now(self) -> bool:
        """As `finished`, without the steps, for which the updates are still made."""
        minutes = self.config.minutes
        return (
            self.session.interrupted
            or self.session.stopped
            or self.evaluations.reached_target
            or (minutes is not None and self.session.meter.session_s >= 60 * minutes)
        )

    def priorities(self, update: Update) -> NDArray[np.float64]:
        """Returns new priorities [B] of an update's transitions; waits for the update."""
        priorities = update.priorities()
        if not np.isfinite(priorities).all():
            raise self._diverged("TD errors")
        return priorities

    def _diverged(self, what: str) -> DivergedError:
        folder, config = self.session.folder, self.config
        newest = folder.newest_checkpoint()
        own = "" if config.loss in LOSSES else f", or with loss {path_of(config.loss)} corrected where it returned them"
        advice = f"a lower learning_rate than {config.learning_rate:g}{own}"
        return DivergedError(
            f"training has diverged by update {self.learner.updates:,}, its {what} are infinite or NaN: "
            + (
                f"start again with {advice} and another folder"
                if newest is None
                else f"continue from its last good checkpoint, {newest}, with {resuming(folder.path)} and {advice}"
            )
        )

    def publish(self, memory: ReplayMemory) -> None:
        """Publishes the parameters for the actors."""
        self.session.ask(lambda: memory.put_parameters(self.learner.parameters()))
        self.learner.publications += 1
        self.stopwatch.lap("publish")

    def publish_if_due(self, memory: ReplayMemory) -> bool:
        """Publishes after every `publish_period` updates, and returns whether it did."""
        due = self.learner.updates % self.config.publish_period == 0
        if due:
            self.publish(memory)
        return due

    def evaluate_if_due(self) -> None:
        """Evaluates after every `evaluation_period` updates, in parallel with training if there is an evaluator."""
        self.evaluations.begin_if_due()
        self.stopwatch.lap("evaluate")

    @property
    def checkpoint_due(self) -> bool:
        """Whether `checkpoint_minutes` passed since the last one, or `RETRY_SECONDS` since one that failed."""
        return time.monotonic() >= self._next_checkpoint

    def periodic_checkpoint(self, write: Callable[[], None]) -> None:
        """Writes a periodic checkpoint; on failure, such as a full disk, warns and retries later.

        Raises:
            DivergedError: A weight is infinite or NaN.
        """
        try:
            with self.session.folder.continuing():
                write()
        except RunFolderError as error:
            self._next_checkpoint = time.monotonic() + RETRY_SECONDS
            logger.warning("the checkpoint is not complete: %s; the next try is in %g s", error, RETRY_SECONDS)

    def checkpoint(self, memory: ReplayMemory | None = None) -> None:
        """Writes a checkpoint of the learner, and the memory if the run keeps it.

        Raises:
            DivergedError: A weight is infinite or NaN.
            RunFolderError: A file cannot be written. If it is the memory's, the checkpoint is written nevertheless.
        """
        if not self.learner.finite:
            raise self._diverged("weights")
        state: dict[str, Any] = {
            "learner": {"updates": self.learner.updates, "publications": self.learner.publications},
            "meter": {"time_s": self.session.meter.time_s, **self.totals.state()},
            "cost": self._cost.state(),
            "snapshot": None,
        }
        unsaved = None
        if memory is not None and self.keeps_memory:
            try:
                size = self.reporter.memory_bytes
                with self.session.copying("saving the replay memory", self.session.folder.partial_snapshot, size):
                    state["snapshot"] = self.session.folder.save_memory(memory)
            except RunFolderError as error:
                unsaved = error
        path = self.session.folder.save_checkpoint(self.totals.agent_steps, self.learner.tensors(), state)
        if unsaved is not None:
            raise unsaved
        if state["snapshot"] is not None:
            self.session.folder.adopt_memory()
        self._next_checkpoint = time.monotonic() + 60 * self.config.checkpoint_minutes
        self.stopwatch.lap("checkpoint")
        self.session.call("on_checkpoint", path)

    def finish(self) -> Result:
        """Evaluates the trained agent, records a video of it, and sums up the session."""
        config, totals, updates, session = self.config, self.totals, self.learner.updates, self.session
        # A signal from here on skips the games.
        self._reached_end = not session.interrupted
        seconds = self.session.meter.time_s
        # Writes files, which is not training time.
        self.reporter.end_times()
        cost = self._cost.read(totals.env_frames, fresh=True)
        evaluation = None
        if updates > 0 and not session.interrupted:
            logger.info(
                "training has ended; the trained agent plays %d games (Ctrl-C skips them)", config.evaluation_games
            )
            evaluation = self.evaluations.evaluate()
            if evaluation is not None:
                session.note = "training has ended"
                agent = self.evaluations.agent()
                self.reporter.report_evaluation(evaluation, agent)
                sticky = self.evaluations.evaluate_sticky()
                if sticky is not None:
                    self.reporter.report_sticky(evaluation, agent, sticky)
            if config.video and not session.interrupted:
                self._record_video()
        self.reporter.write_pending_lines()
        best = "-" if totals.best is None else f"{totals.best:g}"
        logger.info(
            f"{totals.agent_steps:,} steps and {updates:,} updates in {seconds / 60:.1f} minutes, "
            f"{totals.games:,} games, best score {best}"
        )
        missing = self._cost.missing
        logger.info("cost of training: %s%s", cost, f"; no joules: {missing}" if missing else "")
        further = config.steps is not None and totals.agent_steps >= config.steps
        path = self.session.folder.path
        logger.info("everything is in %s; continue with %s", path, resuming(path, further=further))
        best_mean = self.evaluations.best_mean
        result = Result(path, totals.agent_steps, updates, seconds, evaluation, best_mean, cost)
        session.call("on_end", result)
        return result

    def _record_video(self) -> None:
        try:
            with self.session.folder.recording() as videos:
                path = videos / f"{self.totals.agent_steps:012d}.mp4"
                score = video.record(
                    self.config,
                    self.learner.average,
                    path,
                    seed=self.config.seed,
                    progress=self.session.display.progress,
                )
        except TrainingError as error:
            logger.warning("no video: %s; video=False leaves it out", error)
            return
        logger.info("video of a game, score %g: %s", score, path)
