"""A serial run: actor and learner take turns in one process, and the run is a function of the seed.

Two runs with the same settings on the same machine write the same metrics, apart from times. If the environments
can be restored, a resumed run continues exactly as if it had never ended. Otherwise it starts new games and keeps
its memory if there is a snapshot of it, or fills it to `min_size` before it learns again.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict, dataclass

from innet_drl.train import environments
from innet_drl.train.actor import Actor
from innet_drl.train.checkpoints import Checkpoint, load_network
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.journal import Journal
from innet_drl.train.memory import EmbeddedMemory
from innet_drl.train.networks import make_network
from innet_drl.train.stopwatch import TimedBatches
from innet_drl.train.trainer import Trainer

JOURNAL_SETTINGS = (
    "environment",
    "environments",
    "seed",
    "capacity",
    "priority_exponent",
    "n_step",
    "gamma",
    "chunk_steps",
    "batch_size",
)
"""Settings that replaying a journal depends on."""
_ACTOR_PREFIX = "actor."


@dataclass
class _Counts:
    """Counts since the memory was made."""

    inserted: int = 0
    """Transitions inserted into it."""
    drawn: int = 0
    """Transitions sampled from it."""
    journal_files: int = 0
    """Files of the journal."""


def train(trainer: Trainer) -> None:
    """Trains until the trainer is finished, and leaves a checkpoint."""
    config, spec = trainer.config, trainer.spec
    with (
        contextlib.closing(environments.make(config, config.environments, threads=config.environment_threads)) as envs,
        EmbeddedMemory.unserved(trainer.memory_settings()) as memory,
        memory.batches(str(trainer.learner.device), timeout=0.0) as batches,
    ):
        restored = trainer.restore_memory(memory)
        writer = memory.writer(actor=0)
        journal = Journal(writer, batches, memory) if trainer.restorable else None
        actor = Actor(
            config,
            0,
            envs,
            make_network(config, spec),
            journal or writer,
            first_step=trainer.meter.agent_steps,
            stopwatch=trainer.stopwatch,
        )
        timed = TimedBatches(batches, trainer.stopwatch, "sample")
        counts = _Counts()
        # A checkpoint of a session that was not serial has no journal.
        if trainer.resumed is not None and journal is not None and "actor" in trainer.resumed.state:
            counts = _restore(trainer, trainer.resumed, journal, actor)
        else:
            trainer.folder.remove_journal()
            if restored:
                table = memory.stats()
                counts = _Counts(inserted=table["inserted_items"], drawn=table["sampled_items"])
            trainer.stopwatch.lap("start")
            trainer.publish(memory)
            actor.pull(memory)
        trainer.begin()

        def checkpoint() -> None:
            if journal is None:
                trainer.checkpoint(memory=memory)
                return
            trainer.folder.save_journal(counts.journal_files, journal.tensors())
            journal.forget()
            counts.journal_files += 1
            published = {_ACTOR_PREFIX + key: value for key, value in actor.network.state_dict().items()}
            trainer.checkpoint(published, {"actor": actor.state(), "memory": asdict(counts)})

        trainer.note = "serial"
        # A journal repeats whole steps, and an interrupt may be raised within one.
        with trainer.keeping(checkpoint if journal is None else trainer.keep_first):
            while not trainer.finished:
                actor.step()
                report = actor.report(times=False)
                counts.inserted += report.steps
                trainer.reporter.add_report(report)
                ratio = config.samples_per_insert
                while counts.drawn + config.batch_size <= ratio * (counts.inserted - config.min_size):
                    trainer.stopwatch.lap("other")
                    batch = next(timed)
                    trainer.stopwatch.lap("free")
                    counts.drawn += config.batch_size
                    update = trainer.learn(batch)
                    trainer.stopwatch.lap("other")
                    priorities = trainer.priorities(update)
                    (journal or memory).update_priorities(batch.ids, priorities)
                    trainer.stopwatch.lap("priorities")
                    if trainer.publish_if_due(memory):
                        actor.pull(memory)
                    trainer.evaluate_if_due()
                if trainer.reporter.due_by_steps:
                    trainer.reporter.report(memory)
                if trainer.checkpoint_due:
                    trainer.periodic_checkpoint(checkpoint)
                trainer.stopwatch.lap("other")
            trainer.reporter.report_rest(memory)
            checkpoint()
        actor.close()


def _restore(trainer: Trainer, resumed: Checkpoint, journal: Journal, actor: Actor) -> _Counts:
    changed = trainer.config.changed_flags(trainer.folder.config(), JOURNAL_SETTINGS)
    if changed:
        raise ConfigurationError(
            f"a serial run continues with the memory it had, which would not be the same with another {changed}: "
            "omit it, or continue with --no-serial"
        )
    counts = _Counts(**resumed.state["memory"])
    if counts.journal_files == 0:
        # Earlier releases kept the journal in the checkpoint.
        journal.replay(resumed.tensors)
    for number in range(counts.journal_files):
        trainer.display.progress("repeating the journal", f"{number} of {counts.journal_files} files")
        journal.replay(trainer.folder.load_journal(number))
        journal.forget()
    load_network(actor.network, _ACTOR_PREFIX, resumed.tensors)
    actor.restore(resumed.state["actor"])
    return counts
