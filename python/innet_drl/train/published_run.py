"""A run published at its server for processes that join: its settings, and the reports of its actors.

The learner publishes the settings as parameters named `<run>/run`, one JSON document. Actors push reports to the table
`<run>/reports`, from which the learner samples each once. A run's name has no slash, but a connection without a
namespace sees it with the prefix `<namespace>/`.
"""

from __future__ import annotations

import base64
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
from innet_drl.train.config import SERVER_SCHEMES, Config
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.metrics import ActorReport, Game
from innet_drl.train.stopwatch import Laps

logger = logging.getLogger(__name__)

DOCUMENT = "/run"
REPORTS = "/reports"
REPORT_BYTES = 2048
REPORT_GAMES = 40
GAMES_BYTES = 1200
"""Largest number of games in a row, and of their bytes, bounded by `REPORT_BYTES`."""
REPORT_LAPS = 240
"""Largest number of laps in a row."""
LAP = np.dtype([("name", "u1"), ("duration", "<u4")])
"""A lap in a row: index of its activity's name, and nanoseconds."""
LONGEST_LAP = 2**32 - 1
QUEUED_REPORTS = 4096
"""Reports that the server keeps for an absent learner; the replay ratio keeps their number small."""
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
            "{replay} {address}: processes join a run through its server: start `innet-replay serve`, and name its "
            "address (innet://, innets://, unix://)",
            address=replay,
        )


def reports_table(run: str) -> innet.Table:
    """The table of the reports of a run's actors."""
    return innet.Table(
        run + REPORTS,
        {"report": ("uint8", (REPORT_BYTES,))},
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

    def __init__(self, replay: innet.Replay, name: str, config: Config) -> None:
        self._replay = replay
        self._name = name
        self._settings = config.as_dict()

    @classmethod
    @contextlib.contextmanager
    def connect(cls, name: str, config: Config, token: str) -> Iterator[Self]:
        """Connects to the run's server, separately from the memory, whose calls may block for long."""
        with innet.connect(
            config.replay,
            token=token,
            tables=[reports_table(name)],
            tls_ca=config.replay_ca,
            grace=CALL_SECONDS,
            namespace=config.namespace or None,
        ) as replay:
            yield cls(replay, name, config)

    def publish(self, agent_steps: int, *, ended: bool = False) -> bool:
        """Publishes the run at this step; returns `False` if the server does not answer."""
        run = PublishedRun(innet.__version__, self._settings, agent_steps, ended)
        try:
            self._replay.put_parameters(self._name + DOCUMENT, run.tensors(), timeout=CALL_SECONDS)
        except CONNECTION_LOST:
            return False
        return True

    def reports(self) -> list[ActorReport]:
        """Returns new reports without waiting; the reports of each actor are in order."""
        try:
            rows = self._replay.sample(self._name + REPORTS, QUEUED_REPORTS, ROW, allow_short=True, timeout=0)
        except (*CONNECTION_LOST, innet.errors.EmptyError):
            return []
        # Ages are comparable within a server, and a writer stays with one server.
        in_order = rows.report[np.argsort(rows.ages)[::-1]]
        return [report for row in in_order if (report := _decoded(row.tobytes())) is not None]


class ReportWriter:
    """An actor's side of the table of reports."""

    def __init__(self, replay: innet.Replay, run: str, actor: int) -> None:
        self._writer = replay.writer(
            run + REPORTS, 1, ROW, name=f"reports of actor {actor}", server=actor, chunk_steps=1
        )
        self._unsent: deque[bytes] = deque()

    def write(self, report: ActorReport, timeout: float | None) -> None:
        """Pushes a report, after earlier reports that could not be pushed.

        Raises:
            DeadlineError: The server is away: the report is pushed with the next one.
        """
        self._unsent.extend(_encoded(part) for part in _parts(report))
        while self._unsent:
            row = np.frombuffer(self._unsent[0], np.uint8)[None]
            self._writer.append(report=row, terminated=[True], truncated=[False], first=[True], timeout=timeout)
            self._unsent.popleft()
        self._writer.flush(timeout)


def _parts(report: ActorReport) -> Iterator[ActorReport]:
    """Splits a report into parts that fit a row; the first one has steps and seconds."""
    laps = report.laps
    first, *others = _groups(report.games)
    yield dataclasses.replace(report, games=first, laps=None, notes={})
    rest = dataclasses.replace(report, steps=0, seconds={}, games=[], means={}, laps=None, notes={})
    for about, note in report.notes.items():
        yield dataclasses.replace(rest, notes={about: note})
    for games in others:
        yield dataclasses.replace(rest, games=games)
    if laps is not None:
        yield from (dataclasses.replace(rest, laps=part) for part in laps.parts(REPORT_LAPS, LONGEST_LAP))


def _groups(games: list[Game]) -> list[list[Game]]:
    """The games in groups that fit a row; the first one may be empty."""
    groups: list[list[Game]] = [[]]
    size = 0
    for game in games:
        size += len(json.dumps(list(vars(game).values())))
        if groups[-1] and (len(groups[-1]) == REPORT_GAMES or size > GAMES_BYTES):
            groups.append([])
            size = len(json.dumps(list(vars(game).values())))
        groups[-1].append(game)
    return groups


def _encoded(report: ActorReport) -> bytes:
    values = dataclasses.asdict(report)
    values["games"] = [list(game.values()) for game in values["games"]]
    values["seconds"] = {name: round(seconds, 6) for name, seconds in report.seconds.items()}
    if report.laps is not None:
        names = list(dict.fromkeys(name for name, _ in report.laps.laps))
        laps = np.array([(names.index(name), duration) for name, duration in report.laps.laps], LAP)
        values["laps"] |= {"names": names, "laps": base64.b85encode(laps.tobytes()).decode()}
    encoded = json.dumps(values, separators=(",", ":")).encode()
    assert len(encoded) <= REPORT_BYTES, "a report of too many bytes"
    return encoded.ljust(REPORT_BYTES)


def _decoded(row: bytes) -> ActorReport | None:
    try:
        values = json.loads(row)
        games = [
            Game(int(environment), float(score), int(steps), dict(info))
            for environment, score, steps, info in values.pop("games")
        ]
        laps = values.pop("laps")
        if laps is not None:
            names = laps.pop("names")
            found = np.frombuffer(base64.b85decode(laps["laps"]), LAP).tolist()
            laps["laps"] = [(str(names[index]), duration) for index, duration in found]
            values["laps"] = Laps(**laps)
        values["means"] = {name: (mean, count) for name, (mean, count) in values["means"].items()}
        return ActorReport(games=games, **values)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        logger.warning("a report of an actor cannot be read, and is left out: %s", error)
        return None
