"""A serial run: actor and learner take turns in one process, and the run is a function of the seed.

Two runs with equal settings on one machine write equal metrics, except times. A resumed run starts new games; it
restores its memory if there is a snapshot, and otherwise fills it to `min_size` before it learns again.
"""

from __future__ import annotations

import contextlib

from innet_drl.train import environments
from innet_drl.train.memory import EmbeddedMemory
from innet_drl.train.networks import make_network
from innet_drl.train.observe.stopwatch import TimedBatches
from innet_drl.train.play.actor import Actor
from innet_drl.train.runs.trainer import Trainer

RATIO_SETTINGS = ("samples_per_insert", "min_size")
"""Settings by which updates and steps keep pace."""


def train(trainer: Trainer) -> None:
    """Trains until the trainer is finished, and writes a checkpoint."""
    config, stopwatch = trainer.config, trainer.stopwatch
    with (
        contextlib.closing(environments.make(config, config.environments, threads=config.environment_threads)) as envs,
        EmbeddedMemory.unserved(trainer.memory_settings()) as memory,
        contextlib.ExitStack() as running,
    ):
        inserted = 0
        drawn: float = 0
        # The replay ratio counts the run's own transitions.
        own = config.batch_size - config.demonstrations
        if trainer.restore_memory(memory):
            table = memory.stats()
            inserted, drawn = table["inserted_items"], table["sampled_items"]
            if config.changed(trainer.session.folder.config(), RATIO_SETTINGS):
                # As the rate limiter of a table with new settings: neither side is further ahead than the slack.
                even = config.samples_per_insert * (inserted - config.min_size)
                drawn = max(min(drawn, even + config.slack), even - config.slack, 0)
        trainer.preload(memory)
        batches = running.enter_context(memory.batches(str(trainer.learner.device), timeout=0.0))
        writer, network, steps = memory.writer(actor=0), make_network(config, trainer.spec), trainer.totals.agent_steps
        actor = Actor(config, 0, envs, network, writer, first_step=steps, stopwatch=stopwatch)
        timed = TimedBatches(batches, stopwatch, "sample")
        stopwatch.lap("start")
        trainer.publish(memory)
        actor.pull(memory)
        trainer.begin()
        trainer.session.note = "serial"

        def checkpoint() -> None:
            trainer.checkpoint(memory)

        with trainer.keeping(checkpoint):
            while not trainer.finished:
                actor.step()
                report = actor.report(times=False)
                inserted += report.steps
                trainer.reporter.add_report(report)
                while drawn + own <= config.samples_per_insert * (inserted - config.min_size) and not trainer.ends_now:
                    stopwatch.lap("other")
                    batch = next(timed)
                    stopwatch.lap("free")
                    drawn += own
                    update = trainer.learner.update(batch)
                    stopwatch.lap("other")
                    memory.update_priorities(batch.ids, trainer.priorities(update))
                    stopwatch.lap("priorities")
                    if trainer.publish_if_due(memory):
                        actor.pull(memory)
                    trainer.evaluate_if_due()
                if trainer.reporter.due_by_steps:
                    trainer.reporter.report(memory)
                if trainer.checkpoint_due:
                    trainer.periodic_checkpoint(checkpoint)
                stopwatch.lap("other")
            trainer.reporter.report_rest(memory)
            checkpoint()
        writer.close()
