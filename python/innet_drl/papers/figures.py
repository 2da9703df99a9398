"""Tables and pictures of the rows of `innet-drl bench paper`."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from innet_drl.analysis import pictures
from innet_drl.papers.results import Row
from innet_drl.papers.settings import FORMATS, SYSTEMS, Case

LATENCIES = {
    "actor push": "actor push",
    "actor pull": "actor pull (parameters)",
    "learner set": "learner set (parameters)",
    "learner sampling": "learner sampling",
}
SHARES = ("actors: compute", "actors: pull", "actors: push", "learner: train", "learner: sample", "learner: set")
COLOURS = {"redis": "#888888", "shared": "#d98c3f", "sampling": "#3f6fd9", "ahead": "#2f9e77", "edge": "#8a5cb8"}
HATCHES = {"kernel": "", "kernel-spin": "//", "fstack": "xx"}
PARTS = {
    "compute": "#dddddd",
    "train": "#dddddd",
    "pull": "#7fb2e5",
    "sample": "#3f6fd9",
    "push": "#d98c3f",
    "set": "#8a5cb8",
}


def line(rows: list[Row], case: Case) -> str:
    """Summarises one case in a line."""
    key = (case.system, case.stack.name, case.format, case.actors)
    by_name = {row["what"]: row for row in rows if (row["system"], row["stack"], row["format"], row["actors"]) == key}
    times = ", ".join(f"{name.split()[-1]} {by_name[name]['p50_ms']:.1f}" for name in LATENCIES)
    return (
        f"{case.format}, {case.actors} actors, {case.system} on {case.stack.name}: {times} ms; "
        f"{by_name['experiences']['per_s']:,.0f} experiences/s, communication {by_name['communication']['share']:.1%}"
    )


def tables(rows: list[Row]) -> str:
    """Returns the figures as Markdown."""
    parts = []
    for format_name in _in_order(rows, "format"):
        of_format = [row for row in rows if row["format"] == format_name]
        parts.append(f"### {FORMATS[format_name][0].upper()}{FORMATS[format_name][1:]}\n")
        for what, title in LATENCIES.items():
            parts.append(_table(of_format, what, f"{title}, ms (p50 / p99)", _times))
        parts.append(_table(of_format, "experiences", "experiences a second", lambda row: f"{row['per_s']:,.0f}"))
        parts.append(
            _table(
                of_format,
                "pushes",
                "pushes a second (of the ideal)",
                lambda row: f"{row['per_s']:.2f} ({row['per_s'] / row['ideal_per_s']:.0%})",
            )
        )
        parts.append(_table(of_format, "communication", "communication's share of the time", _share))
        parts += [_table(of_format, what, f"{what.replace(':', ',')}: share", _share) for what in SHARES]
    return "\n".join(parts)


def _times(row: Row) -> str:
    return f"{row['p50_ms']:.1f} / {row['p99_ms']:.1f}"


def _share(row: Row) -> str:
    return f"{row['share']:.1%}"


def _table(rows: list[Row], what: str, title: str, cell: Any) -> str:
    actors = _in_order(rows, "actors")
    lines = [f"| {title} | {' | '.join(f'{number} actors' for number in actors)} |", "| --- " * (len(actors) + 1) + "|"]
    for system, stack in _lines(rows):
        cells = []
        for number in actors:
            found = _find(rows, what, system, stack, number)
            cells.append("-" if found is None else cell(found))
        lines.append(f"| {_label(system, stack)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def draw(rows: list[Row], path: Path) -> None:
    """Draws the paper's figures, in one row for each format."""
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams |= pictures.SETTINGS
    from matplotlib import pyplot

    formats = _in_order(rows, "format")
    figure = pyplot.figure(figsize=(16, 7.5 * len(formats)), layout="constrained")
    for format_name, part in zip(formats, figure.subfigures(len(formats), 1, squeeze=False)[:, 0], strict=True):
        part.suptitle(FORMATS[format_name], fontweight="bold")
        axes = part.subplots(2, 4)
        of_format = [row for row in rows if row["format"] == format_name]
        for axis, (what, title) in zip(axes.flat, LATENCIES.items(), strict=False):
            _bars(axis, of_format, what, "p50_ms", f"{title}, ms: p50, line to p99", "p99_ms")
        _bars(axes[1][0], of_format, "experiences", "per_s", "experiences a second")
        _frequency(axes[1][1], of_format)
        _bars(axes[1][2], of_format, "communication", "share", "communication's share of the time")
        _breakdown(axes[1][3], of_format)
        part.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=7, fontsize=7)
    pictures.save(figure, path)
    pyplot.close(figure)


def _bars(axis: Any, rows: list[Row], what: str, value: str, title: str, upper: str | None = None) -> None:
    actors, lines = _in_order(rows, "actors"), _lines(rows)
    width = 0.8 / len(lines)
    for index, (system, stack) in enumerate(lines):
        found = [_find(rows, what, system, stack, number) or {} for number in actors]
        heights = [row.get(value) or 0.0 for row in found]
        positions = [number + (index - (len(lines) - 1) / 2) * width for number in range(len(actors))]
        errors = None
        if upper is not None:
            tops = [row.get(upper) or 0.0 for row in found]
            errors = [[0.0] * len(tops), [max(0.0, top - height) for top, height in zip(tops, heights, strict=True)]]
        axis.bar(
            positions,
            heights,
            width,
            yerr=errors,
            color=COLOURS[system],
            hatch=HATCHES.get(stack, ""),
            edgecolor="white",
            error_kw={"lw": 0.8, "ecolor": "#444444"},
            label=_label(system, stack),
        )
    if upper is not None:
        _logarithmic(axis)
    axis.set_xticks(range(len(actors)), [str(number) for number in actors])
    axis.set_xlabel("actors")
    axis.set_title(title)


def _logarithmic(axis: Any) -> None:
    """Plain numbers at the powers of ten, and between them where there are few."""
    from matplotlib import ticker

    axis.set_yscale("log")
    least, most = axis.get_ylim()
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0,) if most > 100 * least else (1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter("{x:,g}")
    axis.minorticks_off()


def _frequency(axis: Any, rows: list[Row]) -> None:
    actors = _in_order(rows, "actors")
    for system, stack in _lines(rows):
        found = [row for number in actors if (row := _find(rows, "pushes", system, stack, number))]
        style = {"kernel": "o-", "kernel-spin": "s--"}.get(stack, "^:")
        axis.plot(
            [row["actors"] for row in found],
            [row["per_s"] for row in found],
            style,
            color=COLOURS[system],
            ms=4,
            label=_label(system, stack),
        )
    ideal = {row["actors"]: row["ideal_per_s"] for row in rows if row["what"] == "pushes"}
    axis.plot(list(ideal), list(ideal.values()), color="black", lw=0.8, label="ideal: nothing but computing")
    axis.set_xticks(actors)
    axis.set_xlabel("actors")
    axis.set_title("pushes a second")
    axis.legend(*([each[-1]] for each in axis.get_legend_handles_labels()), fontsize=7)


def _breakdown(axis: Any, rows: list[Row]) -> None:
    """Draws two bars for each number of actors and system on the kernel: the actors' above the learner's."""
    labels, at = [], 0.0
    bars: dict[str, list[tuple[float, float, float]]] = {what.split(": ")[1]: [] for what in SHARES}
    for number in _in_order(rows, "actors"):
        for system in _in_order(rows, "system"):
            stacks = [stack for known, stack in _lines(rows) if known == system]
            for role in ("actors", "learner"):
                left = 0.0
                for what in (what for what in SHARES if what.startswith(role)):
                    share = (_find(rows, what, system, stacks[0], number) or {}).get("share", 0.0)
                    bars[what.split(": ")[1]].append((at, share, left))
                    left += share
                labels.append((at, f"{number} {system}, {role}"))
                at -= 1.0
        at -= 0.5
    for part, drawn in bars.items():
        positions, shares, lefts = zip(*drawn, strict=True)
        axis.barh(positions, shares, 0.9, left=lefts, color=PARTS[part], label=part)
    axis.set_yticks([where for where, _ in labels], [text for _, text in labels], fontsize=5)
    axis.set_xlim(0, 1)
    axis.set_title("where the time goes, on the kernel")
    axis.legend(fontsize=6, loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=6)


def _find(rows: Iterable[Row], what: str, system: str, stack: str, actors: int) -> Row | None:
    wanted = (what, system, stack, actors)
    return next((r for r in rows if (r["what"], r["system"], r["stack"], r["actors"]) == wanted), None)


def _lines(rows: list[Row]) -> list[tuple[str, str]]:
    """Returns pairs of system and stack, in the order of the systems."""
    found = dict.fromkeys((row["system"], row["stack"]) for row in rows)
    return sorted(found, key=lambda line: list(SYSTEMS).index(line[0]))


def _in_order(rows: list[Row], key: str) -> list[Any]:
    return list(dict.fromkeys(row[key] for row in rows))


def _label(system: str, stack: str) -> str:
    return f"{SYSTEMS[system]}, {stack}".replace("Redis on kernel TCP, kernel", "Redis, kernel")
