"""Emulated links between actors, server and learner, and the figures of `innet-drl bench paper --delay-ms`.

A delay is the one-way delay between actors and learner. A server in the middle is half of it away from both; an edge
server has the actors beside it, and the learner at the other end of the link.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from innet_drl import _core
from innet_drl.analysis import pictures
from innet_drl.papers.figures import COLOURS
from innet_drl.papers.results import Row
from innet_drl.papers.settings import FORMATS, SYSTEMS, Case

TITLES = {
    "updates": "learner: updates a second",
    "experiences": "experiences a second",
    "learner: link": "MB a second over the learner's link",
    "actors: link": "MB a second over the actors' link",
}
"""Figures that are tabulated and drawn against the delay."""


@dataclass(frozen=True)
class RoleLinks:
    """The addresses of one server for its actors and its learner."""

    actors: str
    learner: str
    relays: dict[str, _core.Relay]
    """The relay of each role; empty without an emulated link."""

    def bytes(self) -> dict[str, int]:
        """Bytes carried so far for each role, both directions."""
        return {role: sum(relay.bytes) for role, relay in self.relays.items()}


@contextlib.contextmanager
def emulate(case: Case, address: str) -> Iterator[RoleLinks]:
    """Puts relays with the case's delay and rate between its processes and the server at `address`."""
    if case.delay_ms is None:
        yield RoleLinks(address, address, {})
        return
    at = urlsplit(address)
    assert at.hostname is not None
    assert at.port is not None
    to = f"{socket.gethostbyname(at.hostname)}:{at.port}"
    rate = case.link_mbit * 1e6 / 8 or None
    delay = 1e-3 * case.delay_ms
    with contextlib.ExitStack() as running:

        def relay(share: float) -> _core.Relay:
            # Actors beside an edge server have no link that is limited.
            return running.enter_context(_core.Relay(to, delay=share * delay, rate=rate if share else None))

        edge = case.system == "edge"
        relays = {"actors": relay(0.0 if edge else 0.5), "learner": relay(1.0 if edge else 0.5)}
        urls = {role: at._replace(netloc=relay.address).geturl() for role, relay in relays.items()}
        yield RoleLinks(urls["actors"], urls["learner"], relays)


def tables(rows: list[Row]) -> str:
    """Returns the figures against the delay as Markdown."""
    delays = _delays(rows)
    parts = []
    for format_name, actors in dict.fromkeys((row["format"], row["actors"]) for row in rows):
        of_both = [row for row in rows if (row["format"], row["actors"]) == (format_name, actors)]
        parts.append(f"### {FORMATS[format_name]}, {actors} actors\n")
        for what, title in TITLES.items():
            parts.append(f"| {title} | {' | '.join(f'{delay:g} ms' for delay in delays)} |")
            parts.append("| --- " * (len(delays) + 1) + "|")
            for system, values in _lines(of_both, what).items():
                cells = (f"{values[delay]:,.2f}" if delay in values else "-" for delay in delays)
                parts.append(f"| {_label(system)} | {' | '.join(cells)} |")
            parts.append("")
    return "\n".join(parts)


def draw(rows: list[Row], path: Path) -> None:
    """Draws the figures against the delay, in one row for each format and number of actors."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams |= pictures.SETTINGS
    from matplotlib import pyplot

    cases = list(dict.fromkeys((row["format"], row["actors"]) for row in rows))
    figure, axes = pyplot.subplots(
        len(cases), len(TITLES), figsize=(14, 3.2 * len(cases)), squeeze=False, layout="constrained"
    )
    delays = _delays(rows)
    for case, across in zip(cases, axes, strict=True):
        of_case = [row for row in rows if (row["format"], row["actors"]) == case]
        for axis, (what, title) in zip(across, TITLES.items(), strict=True):
            for system, values in _lines(of_case, what).items():
                # Evenly spaced: delays differ by orders of magnitude.
                positions = [delays.index(delay) for delay in values]
                axis.plot(positions, list(values.values()), "o-", color=COLOURS[system], ms=4, label=_label(system))
            axis.set_ylim(bottom=0)
            axis.set_xticks(range(len(delays)), [f"{delay:g}" for delay in delays])
            axis.set_xlabel("one-way delay between actors and learner, ms")
            axis.set_title(title)
        across[0].set_ylabel(f"{FORMATS[case[0]].partition(':')[0]}, {case[1]} actors")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)
    pictures.save(figure, path)
    pyplot.close(figure)


def _delays(rows: list[Row]) -> list[float]:
    return list(dict.fromkeys(row["delay_ms"] for row in rows))


def _lines(rows: list[Row], what: str) -> dict[str, dict[float, float]]:
    """Returns a value for each delay, by system."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if row["what"] == what:
            value: Any = row["per_s"] if "per_s" in row else row["mb_per_s"]
            found.setdefault(row["system"], {})[row["delay_ms"]] = value
    return found


def _label(system: str) -> str:
    where = "" if system == "edge" else ", in the middle"
    return SYSTEMS[system].replace("Redis on kernel TCP", "Redis") + where
