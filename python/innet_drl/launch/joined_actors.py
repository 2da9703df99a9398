"""The learner's side of actors that users start (`innet-drl actor`)."""

from __future__ import annotations

import time

from innet_drl.launch.silence import Silence
from innet_drl.train.metrics import ActorReport
from innet_drl.train.published_run import RunPublisher


class JoinedActors:
    """Publishes the run every `period` seconds for actors that join, and receives their reports."""

    def __init__(self, run: RunPublisher, period: float, agent_steps: int) -> None:
        self._run = run
        self._period = period
        self._agent_steps = agent_steps
        self.silence = Silence("it has left the run, or an environment hangs")
        self._next_publication = 0.0

    def reports(self, agent_steps: int) -> list[ActorReport]:
        """Returns the reports received since the last call. Publishes the run periodically."""
        self._agent_steps = agent_steps
        if time.monotonic() >= self._next_publication:
            # A restarted server has lost the last publication, and joining actors begin exploration at these steps.
            self._run.publish(agent_steps)
            self._next_publication = time.monotonic() + self._period
        reports = self._run.reports()
        # An actor is watched from its first report on, as actors join and leave at any time.
        self.silence.check({report.actor for report in reports})
        return reports

    def end(self, *, finished: bool) -> None:
        """If `finished`, publishes the end, at which actors exit. Otherwise actors wait for the learner."""
        if finished:
            self._run.publish(self._agent_steps, ended=True)
