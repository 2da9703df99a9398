"""The actors of a run as its learner sees them where they join by themselves (`innet-drl actor`)."""

from __future__ import annotations

import time

from innet_drl.launch.silence import Silence
from innet_drl.train.metrics import ActorReport
from innet_drl.train.published_run import RunPublisher


class JoinedActors:
    """Publishes the run for actors that join, every `period` seconds, and takes their reports."""

    def __init__(self, run: RunPublisher, period: float, agent_steps: int) -> None:
        self._run = run
        self._period = period
        self._agent_steps = agent_steps
        self.silence = Silence("it has left the run, or an environment hangs")
        self._next_publication = 0.0

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports that have arrived since the last call. Publishes the run now and then."""
        self._agent_steps = agent_steps
        if time.monotonic() >= self._next_publication:
            # A server that was started again has lost the one before. Exploration of an actor that joins begins here.
            self._run.publish(agent_steps)
            self._next_publication = time.monotonic() + self._period
        reports = self._run.reports()
        # From its first report on: actors join and leave at any time.
        self.silence.check({report.actor for report in reports})
        return reports

    def end(self, *, finished: bool) -> None:
        """Publishes that training has reached its end: then every actor ends. Otherwise they wait for the learner."""
        if finished:
            self._run.publish(self._agent_steps, ended=True)
