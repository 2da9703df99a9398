"""A serial run: actor and learner take turns in one process, and everything is a function of the seed.

Two runs with the same settings on the same machine write the same metrics, apart from times. Where the
environments can be restored, a resumed run goes on exactly as if it had never ended; where they cannot, it
starts new games with an empty memory, which it fills to `min_size` before it learns on.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from innet_drl.train import environments
from innet_drl.train.actor import Actor, embedded_memory, make_table, make_view, open_writer
from innet_drl.train.checkpoints import Checkpoint
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.journal import Journal
from innet_drl.train.networks import make_network
from innet_drl.train.trainer import Session

MEMORY_SETTINGS = (
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
"""Settings that the contents and the draws of a serial run's memory depend on."""
_ACTOR_PREFIX = "actor."


@dataclass
class _Counts:
    """Transitions that went through the memory since it was made."""

    inserted: int = 0
    drawn: int = 0


def train(session: Session) -> None:
    """Trains until the session is finished, and leaves a checkpoint."""
    config, spec, name = session.config, session.spec, session.name
    with (
        embedded_memory(config, make_table(config, spec, name)) as replay,
        replay.batches(
            name,
            config.batch_size,
            make_view(config, spec),
            beta=config.importance_exponent,
            prefetch=0,
            device=str(session.learner.device),
            timeout=0.0,
        ) as batches,
    ):
        remembers = session.restore_memory(replay)
        writer = open_writer(replay, config, spec, name, actor=0)
        journal = Journal(writer, batches, replay, name) if session.restorable else None
        actor = Actor(
            config,
            0,
            environments.make(config, config.environments, threads=config.environment_threads),
            make_network(config, spec),
            journal or writer,
            first_step=session.meter.agent_steps,
        )
        counts = _Counts()
        # A run that was not serial until now has no journal of its memory.
        if session.resumed is not None and journal is not None and "actor" in session.resumed.state:
            counts = _restore(session, session.resumed, journal, actor)
        else:
            if remembers:
                table = replay.stats()["tables"][name]
                counts = _Counts(inserted=table["inserted_items"], drawn=table["sampled_items"])
            session.publish(replay)
            actor.pull(replay, name)
        session.begin()

        def checkpoint() -> None:
            if journal is None:
                session.checkpoint(replay=replay)
                return
            published = {_ACTOR_PREFIX + key: value for key, value in actor.network.state_dict().items()}
            session.checkpoint(journal.tensors() | published, {"actor": actor.state(), "memory": asdict(counts)})

        session.note = "serial"
        while not session.finished:
            actor.step()
            report = actor.report()
            counts.inserted += report.steps
            session.meter.add_report(report)
            session.stopwatch.lap("act")
            while counts.drawn + config.batch_size <= config.samples_per_insert * (counts.inserted - config.min_size):
                batch = next(batches)
                counts.drawn += config.batch_size
                session.stopwatch.lap("draw")
                priority = session.priorities(session.learn(batch))
                if journal is None:
                    replay.update_priorities(name, batch.key, priority)
                else:
                    journal.update_priorities(batch.key, priority)
                session.stopwatch.lap("priorities")
                if session.publish_if_due(replay):
                    actor.pull(replay, name)
                session.evaluate_if_due()
            if session.report_due_by_steps:
                session.report(replay)
            if session.checkpoint_due:
                checkpoint()
        session.report_rest(replay)
        checkpoint()
        actor.close()


def _restore(session: Session, resumed: Checkpoint, journal: Journal, actor: Actor) -> _Counts:
    changed = session.config.changed_flags(session.folder.config(), MEMORY_SETTINGS)
    if changed:
        raise ConfigurationError(
            f"a serial run goes on with the memory it had, which would not be the same with another {changed}: "
            "leave that away, or go on with --no-serial"
        )
    journal.redo(resumed.tensors)
    published = {
        key.removeprefix(_ACTOR_PREFIX): tensor
        for key, tensor in resumed.tensors.items()
        if key.startswith(_ACTOR_PREFIX)
    }
    actor.network.load_state_dict(published)
    actor.restore(resumed.state["actor"])
    return _Counts(**resumed.state["memory"])
