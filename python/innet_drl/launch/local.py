"""Runs a training: makes or reopens the run's folder, places memory, actors and learner, and sums up.

The default needs no other terminal: the learner's process holds the memory and serves it on a Unix socket,
and actor processes connect to it. With `--replay` they all connect to a server instead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

import innet_drl as innet
from innet_drl.batches import TorchBatch
from innet_drl.launch.actors import Actors
from innet_drl.launch.learners import Learners
from innet_drl.launch.processes import prepare
from innet_drl.train import serial, video
from innet_drl.train.actor import embedded_memory, make_table, make_view
from innet_drl.train.config import Config, flags
from innet_drl.train.errors import ActorError, ConfigurationError, LearnerError, RedisError, TrainingError
from innet_drl.train.evaluation import Evaluation
from innet_drl.train.page import Page
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.targets import TargetsAhead
from innet_drl.train.trainer import LearnerMemory, Session

WAIT_SECONDS = 0.5
"""How long the learner waits for a batch before it looks after its actors."""

TABLE_SETTINGS = (
    "environment",
    "capacity",
    "min_size",
    "samples_per_insert",
    "priority_exponent",
    "actors",
    "environments",
    "chunk_steps",
    "prefetch",
    "batch_size",
    "learners",
)
"""Settings that a table is made of, its slack among them (`Config.slack`)."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a session ended."""

    folder: Path
    agent_steps: int
    learner_updates: int
    seconds: float
    """Of training, over all sessions of the run; without the evaluation and the video after it."""
    evaluation: Evaluation | None
    """The last evaluation; `None` where training was interrupted or learned nothing."""


def train(config: Config, out: Path, *, resume: bool = False) -> Result:
    """Trains, evaluates, records a video, and leaves everything in the run's folder.

    Args:
        config: The settings; a resumed run is given its own, with whatever was changed.
        out: The run's folder: a new one, or with `resume` an existing one.
        resume: Go on from the folder's newest checkpoint.

    Raises:
        TrainingError: Something a user can do something about.
        innet_drl.ReplayError: The replay memory cannot be made or reached, or broke.
    """
    folder = RunFolder.open(out) if resume else RunFolder.new(out)
    resumed = folder.latest_checkpoint() if resume else None
    if resumed is not None and config.steps is not None and config.steps <= resumed.state["meter"]["agent_steps"]:
        raise ConfigurationError(
            f"{out} has taken its {config.steps:,} steps: go on with more of them, --resume {out} --steps N"
        )
    if not config.serial:
        prepare()
    title = f"{config.environment} in {folder.path}"
    with Page(title) as page, Session(config, folder, page, resumed) as session:
        if config.serial:
            serial.train(session)
        else:
            train_apart(session)
        return _finish(session)


def train_apart(session: Session) -> None:
    """Trains with actors in processes of their own until the session is finished; leaves a checkpoint."""
    config, name = session.config, session.name
    with (
        _memory(session) as (replay, address),
        contextlib.ExitStack() as running,
    ):
        session.publish(replay)
        actors = running.enter_context(Actors(config, address, name, session.meter.agent_steps))
        batches: Iterator[TorchBatch] = running.enter_context(
            replay.batches(
                name,
                config.batch_size,
                make_view(config, session.spec),
                beta=config.importance_exponent,
                prefetch=config.prefetch,
                device=str(session.learner.device),
                timeout=WAIT_SECONDS,
            )
        )
        if session.learner.targets_ahead:
            batches = running.enter_context(TargetsAhead(session.learner, batches))
        learners = running.enter_context(_learners(session, address)) if config.learners > 1 else None
        session.begin()
        try:
            _learn(session, replay, actors, batches)
            if learners is not None:
                learners.end()
            session.report_rest(replay)
        except (innet.ReplayError, ActorError, LearnerError, RedisError) as error:
            session.checkpoint(replay=replay)
            logger.error(f"what was learned is kept: go on with --resume {session.folder.path}")
            if learners is not None and isinstance(error, innet.errors.GradientError):
                raise learners.explained(error) from error
            raise
        session.checkpoint(replay=replay)


def _learn(session: Session, replay: LearnerMemory, actors: Actors, batches: Iterator[TorchBatch]) -> None:
    name = session.name
    unwritten = None
    looked = time.monotonic()
    while not session.finished:
        try:
            batch = next(batches)
        except innet.errors.DeadlineError as error:
            session.note = str(error).removeprefix("the deadline passed: ")
            batch = None
        session.stopwatch.lap("wait for a batch")
        if batch is not None:
            session.note = "learning"
            update = session.learn(batch)
            # One update late: meanwhile a GPU has computed the errors, and nobody waited for them.
            if unwritten is not None:
                key, earlier = unwritten
                replay.update_priorities(name, key, session.priorities(earlier))
            unwritten = (batch.key, update)
            session.stopwatch.lap("priorities")
            session.publish_if_due(replay)
            session.evaluate_if_due()
        now = time.monotonic()
        if now - looked >= WAIT_SECONDS or batch is None:
            looked = now
            _look_after(actors, session)
            if session.report_due_by_time:
                session.report(replay)
            if session.checkpoint_due:
                session.checkpoint(replay=replay)


def _look_after(actors: Actors, session: Session) -> None:
    # The signal that ends the run may have gone to the actors too: they are not to be replaced.
    if session.interrupted:
        return
    try:
        reports = actors.reports(session.meter.agent_steps)
    except ActorError:
        if not session.interrupted:
            raise
        return
    for report in reports:
        session.meter.add_report(report)


@contextlib.contextmanager
def _memory(session: Session) -> Iterator[tuple[LearnerMemory, str]]:
    """The replay memory and its address: our own behind a Unix socket or a Redis, or a server's.

    Raises:
        ConfigurationError: There is no room for it, or a server holds another one of its name.
    """
    config = session.config
    if config.on_redis:
        with _redis_memory(session) as behind:
            yield behind, config.replay
        return
    table = make_table(config, session.spec, session.name)
    if config.replay != "embedded":
        with _connect(session, table) as replay:
            if session.resumed is None and replay.stats()["tables"][table.name]["inserted_items"]:
                raise ConfigurationError(
                    f"{config.replay} holds the memory of another run named {table.name!r}: go on with that run "
                    "(--resume), or choose another --out, whose last part names the memory"
                )
            logger.info(f"the replay memory is table {table.name!r} at {config.replay}; it stays there afterwards")
            yield replay, config.replay
        return
    # Not in the run's folder: the path of a Unix socket may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="innet-") as directory:
        address = f"unix://{directory}/replay"
        with embedded_memory(config, table) as replay:
            session.restore_memory(replay)
            with replay.serve(address):
                yield replay, address


@contextlib.contextmanager
def _redis_memory(session: Session) -> Iterator[LearnerMemory]:
    from innet_drl.bench import redis_memory
    from innet_drl.bench.messages import message_format

    config, name = session.config, session.name
    messages = message_format(config, session.spec, name)
    password = os.environ.get("INNET_TOKEN", "").strip()
    shared = redis_memory.connect(
        config.replay, name, password, session.learner.parameters(), fresh=session.resumed is None
    )
    with contextlib.closing(shared), embedded_memory(config, messages.table) as replay:
        session.restore_memory(replay)
        logger.info(f"experience and parameters go through the Redis at {config.replay}, the learner draws here")
        with redis_memory.RedisReplay(shared, messages, replay, session.learner.publications) as behind:
            yield behind
        # Lost with the Redis, where that is why the run ends.
        with contextlib.suppress(RedisError):
            shared.clear()


@contextlib.contextmanager
def _learners(session: Session, memory: str) -> Iterator[Learners]:
    """The other learners, with an aggregator of our own where the settings name none."""
    config = session.config
    checkpoint = None if session.resumed is None else session.resumed.path
    with contextlib.ExitStack() as stack:
        server = config.gradients
        if server == "embedded":
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="innet-"))
            server = f"unix://{directory}/gradients"
            nothing = stack.enter_context(innet.Replay([]))
            stack.enter_context(nothing.serve(server, gradients="127.0.0.1:0"))
        yield stack.enter_context(Learners(config, session.learner, memory, session.name, server, checkpoint))


def _connect(session: Session, table: innet.Table) -> innet.Replay:
    config = session.config
    try:
        return innet.connect(config.replay, tables=[table], tls_ca=config.replay_ca)
    except innet.errors.TableDiffersError as error:
        drop = f"innet_drl.connect({config.replay!r}).drop_table({table.name!r})"
        if session.resumed is None:
            advice = f"choose another --out, whose last part names the memory, or drop that one: {drop}"
        else:
            changed = config.changed_flags(session.folder.config(), TABLE_SETTINGS)
            settings = f"leave {changed} away" if changed else f"take those back ({flags(TABLE_SETTINGS)})"
            advice = f"{settings}, or drop the memory, which is filled anew: {drop}"
        raise ConfigurationError(
            f"{config.replay} holds a memory named {table.name!r} that was made with other settings ({error}): {advice}"
        ) from error
    except innet.errors.TableError as error:
        raise ConfigurationError(
            f"{config.replay} has no room for the memory ({error}): lower --capacity, drop a table there that no run "
            "needs any more (Replay.drop_table), or start the server with a higher --max-bytes"
        ) from error


def _finish(session: Session) -> Result:
    config, learner, meter = session.config, session.learner, session.meter
    seconds = meter.state()["time_s"]
    evaluation = None
    if learner.updates > 0 and not session.interrupted:
        logger.info(f"training has ended; the trained agent plays {config.evaluation_games} games (Ctrl-C skips them)")
        evaluation = session.evaluate()
        if evaluation is not None:
            session.note = "training has ended"
            session.report_evaluation(evaluation)
        if config.video and not session.interrupted:
            _record(session)
    logger.info(
        f"{meter.agent_steps:,} steps and {learner.updates:,} updates in {seconds / 60:.1f} minutes, "
        f"{meter.games:,} games, best score {'-' if meter.best is None else f'{meter.best:g}'}"
    )
    logger.info(f"evaluation: {evaluation or 'none'}")
    logger.info(f"everything is in {session.folder.path}; go on with --resume {session.folder.path}")
    return Result(session.folder.path, meter.agent_steps, learner.updates, seconds, evaluation)


def _record(session: Session) -> None:
    path = session.folder.videos / f"{session.meter.agent_steps:012d}.mp4"
    try:
        with session.folder.writing():
            score = video.record(session.config, session.learner.average, path, seed=session.config.seed)
    except TrainingError as error:
        logger.warning(f"no video: {error}")
        return
    logger.info(f"video of a game, score {score:g}: {path}")
