"""A run in its memory: the settings for processes that join, and the reports of its actors.

Actors push reports to the table `<run>/reports`, from which the learner samples each once. The learner of actors that
join publishes the settings as parameters named `<run>/run`, one JSON document. A run's name has no slash, but a
connection without a namespace sees it with the prefix `<namespace>/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

import innet_drl as innet
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.metrics import ActorReport, Game
from innet_drl.train.settings.config import SERVER_SCHEMES, Config
from innet_drl.train.settings.slices import ReplaySettings

logger = logging.getLogger(__name__)

DOCUMENT = "/run"
REPORTS = "/reports"
REPORT_BYTES = 2048
"""Bytes of a row; a report has as many rows as it needs."""
QUEUED_REPORTS = 4096
"""Rows that the server keeps for an absent learner; the replay ratio keeps their number small."""
QUEUE_BYTES = 8 << 20
CALL_SECONDS = 1.0
"""Timeout of the learner's calls here; its calls of the memory report an absent server."""
ROW = innet.Window(0, 0)
CONNECTION_LOST = (innet.errors.ConnectError, innet.errors.DisconnectedError, innet.errors.DeadlineError)


@dataclass(frozen=True)
class PublishedRun:
    """Published data of a run, for processes that join."""

    release: str
    """Release of the learner's package."""
    settings: dict[str, Any]
    """`Config.as_dict` of the learner."""
    agent_steps: int
    """Steps of the run when this was published."""
    ended: bool = False
    """Training has reached its end."""

    def config(self) -> Config:
        """Returns the settings."""
        if self.release != innet.__version__:
            raise ConfigurationError(
                f"the run's learner has innet-drl {self.release}, and this host has {innet.__version__}: install the "
                "same release on both"
            )
        return Config(**self.settings)

    @classmethod
    def of(cls, tensors: dict[str, Any]) -> Self:
        """Reads the tensors that `tensors` returned."""
        values = json.loads(tensors["json"].tobytes())
        if values["release"] != innet.__version__:
            # Another release may have other fields; `config` raises an error that names it.
            return cls(values["release"], {}, 0, values.get("ended", False))
        return cls(**values)

    def tensors(self) -> dict[str, NDArray[np.uint8]]:
        """Returns the document as parameters."""
        return {"json": np.frombuffer(json.dumps(dataclasses.asdict(self)).encode(), np.uint8)}


def check_address(replay: str) -> None:
    """Checks that other processes can join a run's replay memory."""
    if replay.partition("://")[0] not in SERVER_SCHEMES:
        raise ConfigurationError(
            f"replay {replay}: processes join a run through its server: start `innet-replay serve`, and name its "
            "address (innet://, innets://, unix://)"
        )


def reports_table(run: str) -> innet.Table:
    """The table of the reports of a run's actors."""
    return innet.Table(
        run + REPORTS,
        {"report": ("uint8", (REPORT_BYTES,)), "actor": ("int32", ())},
        QUEUED_REPORTS,
        capacity_bytes=QUEUE_BYTES,
        # Several servers have no common order of items; `reports` restores the order.
        sampler="uniform",
        max_times_sampled=1,
    )


def published_runs(replay: innet.Replay) -> dict[str, PublishedRun]:
    """Returns every run that was published at a server, by name; waits for the server without limit."""
    found = {}
    for name in replay.parameters(timeout=None):
        if name.endswith(DOCUMENT):
            parameters = replay.get_parameters(name, timeout=None)
            # A restart of the server may have removed them, and a user's parameters may have such a name.
            if parameters is not None and "json" in parameters.tensors:
                found[name.removesuffix(DOCUMENT)] = PublishedRun.of(parameters.tensors)
    return found


class RunPublisher:
    """The learner's side: publishes its run, and receives the reports of actors."""

    def __init__(self, replay: innet.Replay, name: str, config: ReplaySettings) -> None:
        self._replay = replay
        self._name = name
        self._config = config
        self._begun: dict[int, bytes] = {}
        """Rows of an incomplete report, by actor."""

    @classmethod
    @contextlib.contextmanager
    def connect(cls, name: str, config: ReplaySettings, token: str, *, resumed: bool = False) -> Iterator[Self]:
        """Connects to the run's server, separately from the memory, whose calls may block for long."""
        with innet.connect(
            config.replay,
            token=token,
            tables=[reports_table(name)],
            tls_ca=config.replay_ca,
            grace=CALL_SECONDS,
            namespace=config.namespace or None,
        ) as replay:
            publisher = cls(replay, name, config)
            if not resumed:
                # An earlier run of this name may have left some.
                publisher.reports()
            yield publisher

    def publish(self, agent_steps: int, *, ended: bool = False) -> None:
        """Publishes the run at this step, unless the server is away."""
        run = PublishedRun(innet.__version__, self._config.as_dict(), agent_steps, ended)
        with contextlib.suppress(*CONNECTION_LOST):
            self._replay.put_parameters(self._name + DOCUMENT, run.tensors(), timeout=CALL_SECONDS)

    def reports(self) -> list[ActorReport]:
        """Returns new reports without waiting; the reports of each actor are in order."""
        try:
            rows = self._replay.sample(self._name + REPORTS, QUEUED_REPORTS, ROW, allow_short=True, timeout=0)
        except (*CONNECTION_LOST, innet.errors.EmptyError):
            return []
        reports = []
        # Ages are comparable within a server, and a writer stays with one server.
        for row in np.argsort(rows.ages)[::-1]:
            actor = int(rows.actor[row, 0])
            earlier = self._begun.pop(actor, b"")
            whole = rows.report[row].tobytes() if rows.first[row, 0] else earlier + rows.report[row].tobytes()
            if not rows.terminated[row, 0]:
                self._begun[actor] = whole
            elif (report := decoded_report(whole)) is not None:
                reports.append(report)
        return reports


class ReportWriter:
    """An actor's side of the table of reports."""

    def __init__(self, replay: innet.Replay, run: str, actor: int) -> None:
        self._writer = replay.writer(
            run + REPORTS, 1, ROW, name=f"reports of actor {actor}", server=actor, chunk_steps=1
        )
        self._actor = np.array([actor], np.int32)
        self._unsent: deque[dict[str, Any]] = deque()

    def write(self, report: ActorReport, timeout: float | None) -> None:
        """Pushes a report, after rows of earlier reports that could not be pushed.

        Raises:
            DeadlineError: The server is away: the report is pushed with the next one.
        """
        # Spaces, which JSON ignores, fill the last row.
        encoded = np.frombuffer(encoded_report(report), np.uint8)
        rows = np.full((-(-len(encoded) // REPORT_BYTES), REPORT_BYTES), ord(" "), np.uint8)
        rows.reshape(-1)[: len(encoded)] = encoded
        for number, row in enumerate(rows, 1):
            self._unsent.append({"report": row[None], "first": [number == 1], "terminated": [number == len(rows)]})
        while self._unsent:
            self._writer.append(**self._unsent[0], actor=self._actor, truncated=[False], timeout=timeout)
            self._unsent.popleft()
        self._writer.flush(timeout)


def encoded_report(report: ActorReport) -> bytes:
    """Returns a report as JSON."""
    return json.dumps(dataclasses.asdict(report), separators=(",", ":")).encode()


def decoded_report(report: bytes) -> ActorReport | None:
    """Reads what `encoded_report` returned; `None`, with a warning, if it is something else."""
    try:
        values = json.loads(report)
        values["games"] = [Game(**game) for game in values["games"]]
        return ActorReport(**values)
    except (ValueError, TypeError, KeyError) as error:
        logger.warning("a report of an actor cannot be read, and is left out: %s", error)
        return None
