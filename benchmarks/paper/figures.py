"""Tables and picture of `python -m benchmarks paper`, over the number of actors or the delay of an emulated link."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.paper.cases import FORMATS, SYSTEMS
from benchmarks.report import Line as Row
from benchmarks.report import markdown
from innet_drl.analysis import pictures

LATENCIES = {
    "actor push": "actor push",
    "actor pull": "actor pull (parameters)",
    "learner set": "learner set (parameters)",
    "learner sampling": "learner sampling",
}
SHARES = ("actors: compute", "actors: pull", "actors: push", "learner: train", "learner: sample", "learner: set")
DELAYED = {
    "updates": "learner: updates a second",
    "experiences": "experiences a second",
    "learner: link": "MB a second over the learner's link",
    "actors: link": "MB a second over the actors' link",
}
"""Figures over the delay."""
COLOURS = {"redis": "#888888", "shared": "#d98c3f", "sampling": "#3f6fd9", "ahead": "#2f9e77", "edge": "#8a5cb8"}
HATCHES = {"kernel": "", "kernel-spin": "//", "fstack": "xx"}
PARTS = {
    **dict.fromkeys(("compute", "train"), "#dddddd"),
    "pull": "#7fb2e5",
    "sample": "#3f6fd9",
    "push": "#d98c3f",
    "set": "#8a5cb8",
}
Line = tuple[str, str]
"""System and stack."""


def tables(rows: list[Row]) -> str:
    """Returns the figures as Markdown."""
    parts = []
    if "delay_ms" in rows[0]:
        for heading, of_case in _by_format(rows, "actors"):
            parts.append(f"### {heading}\n")
            parts += [_table(of_case, what, title, _rate, "{:g} ms", "delay_ms") for what, title in DELAYED.items()]
        return "\n".join(parts)
    figures: list[tuple[str, str, Callable[[Row], str]]] = [
        *((what, f"{title}, ms (p50 / p99)", _times) for what, title in LATENCIES.items()),
        ("experiences", "experiences a second", lambda row: f"{row['value']:,.0f}"),
        ("pushes", "pushes a second (of the ideal)", _rate_of_ideal),
        ("communication", "communication's share of the time", _share),
        *((what, f"{what.replace(':', ',')}: share", _share) for what in SHARES),
    ]
    for heading, of_case in _by_format(rows):
        parts.append(f"### {heading[0].upper()}{heading[1:]}\n")
        parts += [_table(of_case, *figure, "{} actors", "actors") for figure in figures]
    return "\n".join(parts)


def _times(row: Row) -> str:
    return f"{row['value']:.1f} / {row['p99_ms']:.1f}"


def _share(row: Row) -> str:
    return f"{row['value']:.1%}"


def _rate(row: Row) -> str:
    return f"{row['value']:,.2f}"


def _rate_of_ideal(row: Row) -> str:
    return f"{row['value']:.2f} ({row['value'] / row['ideal']:.0%})"


def _table(rows: list[Row], what: str, title: str, cell: Callable[[Row], str], head: str, column: str) -> str:
    columns = _in_order(rows, column)
    lines = [
        [_label(line, delayed=column == "delay_ms"), *(cell(found[each]) if each in found else "-" for each in columns)]
        for line, found in _lines(rows, what, column).items()
    ]
    return markdown([title, *map(head.format, columns)], lines)


def draw(rows: list[Row], path: Path) -> None:
    """Draws the paper's figures, in one row for each format; over a link, the figures against its delay."""
    if "delay_ms" in rows[0]:
        _draw_delays(rows, path)
        return
    cases = list(_by_format(rows))
    with pictures.drawing(path, 16, 7.5 * len(cases)) as figure:
        for (heading, of_format), part in zip(
            cases, figure.subfigures(len(cases), 1, squeeze=False)[:, 0], strict=True
        ):
            part.suptitle(heading, fontweight="bold")
            axes = part.subplots(2, 4)
            for axis, (what, title) in zip(axes.flat, LATENCIES.items(), strict=False):
                _bars(axis, of_format, what, f"{title}, ms: p50, line to p99", latency=True)
            _bars(axes[1][0], of_format, "experiences", "experiences a second")
            _frequency(axes[1][1], of_format)
            _bars(axes[1][2], of_format, "communication", "communication's share of the time")
            _breakdown(axes[1][3], of_format)
            part.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=7)


def _draw_delays(rows: list[Row], path: Path) -> None:
    cases, delays = list(_by_format(rows, "actors")), _in_order(rows, "delay_ms")
    with pictures.drawing(path, 14, 3.2 * len(cases)) as figure:
        axes = figure.subplots(len(cases), len(DELAYED), squeeze=False)
        for (_, of_case), across in zip(cases, axes, strict=True):
            for axis, (what, title) in zip(across, DELAYED.items(), strict=True):
                for line, found in _lines(of_case, what, "delay_ms").items():
                    # Evenly spaced: delays differ by orders of magnitude.
                    places, values = [delays.index(at) for at in found], [row["value"] for row in found.values()]
                    axis.plot(places, values, "o-", color=COLOURS[line[0]], ms=4, label=_label(line, delayed=True))
                axis.set_ylim(bottom=0)
                axis.set_xticks(range(len(delays)), [f"{delay:g}" for delay in delays])
                axis.set_xlabel("one-way delay between actors and learner, ms")
                axis.set_title(title)
            across[0].set_ylabel(f"{of_case[0]['format']}, {of_case[0]['actors']} actors")
        figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _bars(axis: Any, rows: list[Row], what: str, title: str, *, latency: bool = False) -> None:
    actors, lines = _in_order(rows, "actors"), _lines(rows, what, "actors")
    width = 0.8 / len(lines)
    for index, (line, found) in enumerate(lines.items()):
        places = [actors.index(number) + (index - (len(lines) - 1) / 2) * width for number in found]
        heights = [row["value"] for row in found.values()]
        errors = latency and [
            [0.0] * len(found),
            [max(0.0, row["p99_ms"] - height) for row, height in zip(found.values(), heights, strict=True)],
        ]
        style = {"color": COLOURS[line[0]], "hatch": HATCHES.get(line[1], ""), "edgecolor": "white"}
        axis.bar(places, heights, width, yerr=errors or None, error_kw={"lw": 0.8}, label=_label(line), **style)
    if latency:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:,g}")
    axis.set_xticks(range(len(actors)), [str(number) for number in actors])
    axis.set_xlabel("actors")
    axis.set_title(title)


def _frequency(axis: Any, rows: list[Row]) -> None:
    for line, found in _lines(rows, "pushes", "actors").items():
        style = {"kernel": "o-", "kernel-spin": "s--"}.get(line[1], "^:")
        rates = [row["value"] for row in found.values()]
        axis.plot(list(found), rates, style, color=COLOURS[line[0]], ms=4, label=_label(line))
    ideal = {row["actors"]: row["ideal"] for row in rows if row["what"] == "pushes"}
    axis.plot(list(ideal), list(ideal.values()), color="black", lw=0.8, label="ideal: nothing but computing")
    axis.set_xticks(_in_order(rows, "actors"))
    axis.set_xlabel("actors")
    axis.set_title("pushes a second")
    axis.legend(*([each[-1]] for each in axis.get_legend_handles_labels()), fontsize=7)


def _breakdown(axis: Any, rows: list[Row]) -> None:
    """Draws two bars for each number of actors and system on its first stack: the actors' above the learner's."""
    first = dict(reversed(_lines(rows, "communication", "actors")))
    labels: list[str] = []
    for number in _in_order(rows, "actors"):
        for system in _in_order(rows, "system"):
            shares = {
                row["what"]: row["value"]
                for row in rows
                if (row["system"], row["stack"], row["actors"]) == (system, first[system], number)
            }
            for role in ("actors", "learner"):
                left = 0.0
                for what in (what for what in SHARES if what.startswith(role)):
                    part = what.split(": ")[1]
                    share = shares.get(what, 0.0)
                    axis.barh(-len(labels), share, 0.9, left=left, color=PARTS[part], label=part)
                    left += share
                labels.append(f"{number} {system}, {role}")
    axis.set_yticks([-place for place in range(len(labels))], labels, fontsize=5)
    axis.set_xlim(0, 1)
    axis.set_title("where the time goes, on the kernel")
    once = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    axis.legend(once.values(), once, fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=6)


def _by_format(rows: list[Row], *more: str) -> Iterator[tuple[str, list[Row]]]:
    """Yields the rows of each format, and number of actors if it is asked for, with their heading."""
    for values in dict.fromkeys(tuple(row[key] for key in ("format", *more)) for row in rows):
        heading = ", ".join([FORMATS[values[0]], *(f"{number} actors" for number in values[1:])])
        yield heading, [row for row in rows if tuple(row[key] for key in ("format", *more)) == values]


def _lines(rows: list[Row], what: str, column: str) -> dict[Line, dict[Any, Row]]:
    """Returns the rows of one figure by system and stack, in the order of the systems, then by the column's value."""
    found: dict[Line, dict[Any, Row]] = {}
    for row in sorted(rows, key=lambda row: list(SYSTEMS).index(row["system"])):
        if row["what"] == what:
            found.setdefault((row["system"], row["stack"]), {})[row[column]] = row
    return found


def _in_order(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _label(line: Line, *, delayed: bool = False) -> str:
    system, stack = line
    name = SYSTEMS[system].replace("Redis on kernel TCP", "Redis") if delayed or stack == "kernel" else SYSTEMS[system]
    if delayed:
        return name if system == "edge" else f"{name}, in the middle"
    return f"{name}, {stack}"
