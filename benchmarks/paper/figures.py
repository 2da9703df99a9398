"""Tables and picture of `python -m benchmarks paper`, over one varied setting: actors, delay, push or period."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.paper.cases import FORMATS, SYSTEMS
from benchmarks.repeated import cell, grouped, repeats, tail
from benchmarks.report import Line, markdown
from innet_drl.analysis import pictures

SHARES = ("actors: compute", "actors: pull", "actors: push", "learner: train", "learner: sample", "learner: set")
FIGURES = {
    "actor push": ("actor push", "ms", ",.2f"),
    "actor pull": ("actor pull (parameters)", "ms", ",.2f"),
    "learner set": ("learner set (parameters)", "ms", ",.2f"),
    "learner sampling": ("learner sampling", "ms", ",.2f"),
    "pushes": ("pushes of all actors", "a second", ",.2f"),
    "pulls": ("pulls of all actors", "a second", ",.2f"),
    "experiences": ("experiences", "transitions a second", ",.0f"),
    "communication": ("communication", "share of the time", ".1%"),
    "updates": ("learner: updates", "a second", ",.2f"),
    "learner: link": ("learner's link", "MB a second", ",.2f"),
    "actors: link": ("actors' link", "MB a second", ",.2f"),
    **{what: (what.replace(":", ","), "share of the time", ".1%") for what in SHARES},
}
"""Titles, units and forms."""
RATES = ("pushes", "pulls", "experiences", "communication")
LATENCIES = ("actor push", "actor pull", "learner set", "learner sampling")
PANELS = {
    "delay_ms": ("updates", "experiences", "learner: link", "actors: link"),
    "push_transitions": (*RATES, "actor push", "learner sampling"),
    "parameters_every": (*RATES, "actor pull", "learner set"),
    "actors": (*LATENCIES, *RATES),
}
"""Figures over each setting."""
SETTINGS = {
    "delay_ms": "one-way delay, ms",
    "push_transitions": "transitions of a push",
    "parameters_every": "pushes a pull, updates a set",
    "actors": "actors",
}
COLOURS = {"redis": "#888888", "shared": "#d98c3f", "sampling": "#3f6fd9", "ahead": "#2f9e77", "edge": "#8a5cb8"}
MARKS = {"kernel": "o", "kernel-spin": "s", "fstack": "^"}
PARTS = {"pull": "#7fb2e5", "sample": "#3f6fd9", "push": "#d98c3f", "set": "#8a5cb8"}
"""Colours of communication; computing is grey."""
WIDTH, PANEL, BAR, MARGIN = 7.2, 1.9, 0.15, 1.9
"""Inches: the width of a picture, whose text is readable on a page of 700 pixels; the heights of a panel, a bar, and
titles with the legend."""


def tables(lines: list[Line]) -> str:
    """Returns the figures as Markdown."""
    setting, parts = _setting(lines), []
    for heading, of_group in _groups(lines, setting):
        parts.append(f"### {heading}\n")
        values = _values(of_group, setting)
        for what in (*PANELS[setting], *(SHARES if setting == "actors" else ())):
            title, unit, form = FIGURES[what]
            if curves := _curves(of_group, what, setting):
                head = [f"{title}, {unit}; {repeats(of_group)}; by {SETTINGS[setting]}", *map("{:g}".format, values)]
                rows = [
                    [f"{SYSTEMS[system]}, {stack}", *(_cell(found[at], form) if at in found else "-" for at in values)]
                    for (system, stack), found in curves.items()
                ]
                parts.append(markdown(head, rows))
    return "\n".join(parts)


def _cell(line: Line, form: str) -> str:
    told = cell(line, form)
    if "count" in line:
        told += f", {tail(line, form)} of {line['count']}"
    return f"{told}, {line['value'] / line['ideal']:.0%} of the ideal" if "ideal" in line else told


def draw(lines: list[Line], path: Path) -> None:
    """Draws the figures, one part of the picture for each format and value of another setting."""
    setting = _setting(lines)
    parts = [
        (heading, of_part, _bars(of_part) if setting == "actors" else [])
        for heading, of_part in _groups(lines, setting)
    ]
    heights = [PANEL * len(PANELS[setting]) / 2 + BAR * len(bars) + MARGIN for _, _, bars in parts]
    with pictures.drawing(path, WIDTH, sum(heights)) as figure:
        areas = figure.subfigures(len(parts), 1, height_ratios=heights, squeeze=False)[:, 0]
        for (heading, of_part, bars), area in zip(parts, areas, strict=True):
            area.suptitle(
                f"{heading}\nmedians, whiskers: where 95 of 100 such medians fall, {repeats(of_part)}", fontsize=8
            )
            rows = [PANEL] * (len(PANELS[setting]) // 2) + [BAR * len(bars) + 0.5] * bool(bars)
            axes = list(area.subplots(len(rows), 2, height_ratios=rows).flat)
            for what in PANELS[setting]:
                _points(axes.pop(0), of_part, what, setting)
            for role, axis in zip(("actors", "learner"), axes, strict=False):
                _breakdown(axis, of_part, bars, role)
            pictures.legend(area, ncols=2, fontsize=7)


def _points(axis: Any, lines: list[Line], what: str, setting: str) -> None:
    """Draws medians with whiskers over evenly spaced values of the setting, and the ideal."""
    (title, unit, _), values, curves = FIGURES[what], _values(lines, setting), _curves(lines, what, setting)
    shown = [line for found in curves.values() for line in found.values()]
    for index, ((system, stack), found) in enumerate(curves.items()):
        places = [values.index(value) + 0.6 * ((index + 0.5) / len(curves) - 0.5) for value in found]
        middle, low, high = ([line[name] for line in found.values()] for name in ("value", "low", "high"))
        whiskers = np.subtract(middle, low), np.subtract(high, middle)
        style = {"fmt": MARKS.get(stack, "d"), "color": COLOURS[system], "ms": 3.5, "lw": 1}
        axis.errorbar(places, middle, whiskers, label=f"{SYSTEMS[system]}, {stack}", **style)
    if ideal := {values.index(line[setting]): line["ideal"] for line in shown if "ideal" in line}:
        # A line of its own for each value: points beside it would seem to be above a slope.
        ends = np.add.outer([-0.4, 0.4], list(ideal))
        axis.hlines(list(ideal.values()), *ends, "black", "dashed", lw=0.8, label="ideal: only computing")
    if unit == "ms" and shown:
        unit = "ms, logarithmic"
        axis.set_yscale("log", subs=(2, 5))
        axis.yaxis.set_major_formatter("{x:,g}")
        bottom, top = min(line["value"] for line in shown), max(line["high"] for line in shown)
        axis.yaxis.set_minor_formatter("{x:,g}" if top < 300 * bottom else "")
        # At least two ticks have labels.
        axis.set_ylim(bottom / 2.3, 2.3 * top)
    else:
        axis.set_ylim(0, 1.08 * max((max(line["high"], line.get("ideal", 0)) for line in shown), default=0) or 1)
    axis.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    axis.set_xlabel(f"{SETTINGS[setting]} (evenly spaced)")
    axis.set_ylabel(unit)
    axis.set_title(title)


def _bars(lines: list[Line]) -> list[tuple[int, str, str]]:
    """Returns actors, system and stack of the bars of the breakdown: each system on its first stack."""
    curves = _curves(lines, "communication", "actors")
    first = dict(reversed(curves))
    return [
        (actors, system, stack)
        for actors in _values(lines, "actors")
        for (system, stack), found in curves.items()
        if first[system] == stack and actors in found
    ]


def _breakdown(axis: Any, lines: list[Line], bars: list[tuple[int, str, str]], role: str) -> None:
    """Draws the parts of a role's time."""
    shares = {(line["actors"], line["system"], line["stack"], line["what"]): line["value"] for line in lines}
    left = np.zeros(len(bars))
    for what in (what for what in SHARES if what.startswith(role)):
        part = what.split(": ")[1]
        widths = [shares[(*bar, what)] for bar in bars]
        axis.barh(range(len(bars)), widths, 0.8, left=left, color=PARTS.get(part, "#dddddd"), label=part)
        left += widths
    axis.invert_yaxis()
    # The learner's bars are beside the actors'.
    named = ["{}, {}, {}".format(*bar) for bar in bars] if role == "actors" else []
    axis.set_yticks(range(len(named)), named, fontsize=6)
    axis.set_xlabel("share of the time")
    axis.set_title(f"{role}: time")


def _setting(lines: list[Line]) -> str:
    """Returns the setting that is varied."""
    if lines[0]["delay_ms"] is not None:
        return "delay_ms"
    return next((name for name in ("push_transitions", "parameters_every") if len(_values(lines, name)) > 1), "actors")


def _groups(lines: list[Line], setting: str) -> Iterator[tuple[str, list[Line]]]:
    """Yields a heading and the lines of each format and value of the other settings."""
    others = [name for name in SETTINGS if name != setting and lines[0][name] is not None]
    for (form, *values), of_group in grouped(lines, "format", *others):
        told = [f"{SETTINGS[name]}: {value:g}" for name, value in zip(others, values, strict=True)]
        yield "; ".join((FORMATS[form], *told)), of_group


def _curves(lines: list[Line], what: str, setting: str) -> dict[tuple[Any, ...], dict[Any, Line]]:
    """Returns the lines of one figure by system and stack, in the order of the systems, then by the setting's value."""
    of_figure = sorted(
        (line for line in lines if line["what"] == what), key=lambda line: [*SYSTEMS].index(line["system"])
    )
    return {curve: {line[setting]: line for line in found} for curve, found in grouped(of_figure, "system", "stack")}


def _values(lines: list[Line], setting: str) -> list[Any]:
    return sorted({line[setting] for line in lines})
