"""The actors of a run as its learner sees them where they join by themselves (`innet-drl actor`)."""

from __future__ import annotations

import contextlib
import time
from typing import Self

from innet_drl.launch.silence import Silence
from innet_drl.train.config import Config
from innet_drl.train.memory import memory_token
from innet_drl.train.metrics import ActorReport
from innet_drl.train.published_run import RunPublisher


class JoinedActors:
    """Publishes the run for actors that join, and takes their reports. Use it as a context manager.

    Args:
        config: The run's settings.
        name: Name of the run.
        agent_steps: Steps of earlier sessions.
    """

    def __init__(self, config: Config, name: str, agent_steps: int) -> None:
        self._config = config
        self._name = name
        self._agent_steps = agent_steps
        self.silence = Silence("it has left the run, or an environment hangs")
        self._stack = contextlib.ExitStack()
        self._next_publication = 0.0

    def __enter__(self) -> Self:
        connection = RunPublisher.connect(self._name, self._config, memory_token(self._config))
        self._run = self._stack.enter_context(connection)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports that have arrived since the last call. Publishes the run now and then.

        Args:
            agent_steps: Steps of the run until now: an actor that joins continues the exploration schedule from there.
        """
        self._agent_steps = agent_steps
        if time.monotonic() >= self._next_publication:
            # A server that was started again has lost the publication before.
            self._run.publish(agent_steps)
            self._next_publication = time.monotonic() + self._config.report_seconds
        reports = self._run.reports()
        # From its first report on: actors join and leave at any time.
        self.silence.check({report.actor for report in reports})
        return reports

    def end(self, *, finished: bool) -> None:
        """Publishes that training has reached its end: then every actor ends. Otherwise they wait for the learner."""
        if finished:
            self._run.publish(self._agent_steps, ended=True)
