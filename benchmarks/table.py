"""Recorded results as tables and a picture: `python -m benchmarks table` brings the README up to date."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import sweep
from benchmarks.catalogue import BENCHMARKS
from benchmarks.growth import AXES
from innet_drl.bench import pictures

HERE = Path(__file__).parent
RESULTS = HERE / "results.jsonl"
README = HERE / "README.md"
PICTURE = HERE / "growth.svg"

LIMITS = {
    "memory copy": (1, "copies 13.17 MB"),
    "frame copy": (50, "copies 50 frames of 84x84 bytes that lie side by side in main memory"),
    "frame copy, two threads": (50, "the same while two threads do it"),
    "window write": (1, "writes the array of 512 windows, 7 frames each, from one frame in the cache, by two threads"),
    "random access": (1, "reads and rewrites 512 words of 8 bytes among 2^20, with NumPy"),
    "lz4 compress": (50, "packs 50 frames of 84x84 bytes, one by one, from Python"),
    "lz4 decompress": (1, "unpacks the 7 frames of 512 windows, one by one, from Python"),
    "tcp": (1, "13.17 MB over loopback TCP, into a buffer that is used again"),
    "unix socket": (1, "the same over a pair of Unix sockets"),
}
"""How much of what was counted a call does, and what that is."""

Line = dict[str, Any]


def table() -> None:
    """Writes the tables of the recorded results into the README, and draws the growth."""
    of: dict[str, list[Line]] = defaultdict(list)
    for text in RESULTS.read_text().splitlines():
        if text.startswith("{"):
            line = json.loads(text)
            of[line["benchmark"]].append(line)
    README.write_text(filled(README.read_text(), of))
    _draw(of)


def filled(text: str, of: dict[str, list[Line]]) -> str:
    """A page with new tables between its marks, of the lines of each benchmark."""
    parts = {
        "figures": _figures(of),
        "limits": _limits(of),
        "connections": _connections(of),
        "growth": _growth(of),
        "training": _training(of),
        "sweep": _sweep(),
    }
    for name, rows in parts.items():
        before, begin, after = text.partition(f"<!-- {name} -->")
        _, end, after = after.partition(f"<!-- end of {name} -->")
        assert end, f"the page lacks the marks of {name}"
        text = "\n".join([before + begin, "", *rows, "", end + after])
    return text


def _figures(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each benchmark of the catalogue."""
    yield "| work | here | peers | to the best of them | goal | to the machine's limit |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for benchmark in BENCHMARKS:
        if benchmark.name == "limits":
            continue
        values = [line for line in of[benchmark.name] if "value" in line]
        closings = [line for line in of[benchmark.name] if "value" not in line]
        limits = {entry.label for entry in benchmark.entries if entry.system == "machine"}
        ours = [line for line in values if line["system"].startswith("innet")]
        peers = [line for line in values if line not in ours and line["system"] not in limits]
        yield _row(
            benchmark.about,
            "; ".join(_value(line, "innet" if len(ours) == 1 else "") for line in ours),
            "; ".join(_value(line) for line in peers),
            "; ".join(dict.fromkeys(_times(line, "times_best_peer", line.get("best_peer")) for line in closings)),
            "; ".join(
                f"{line['goal']}: {line['ratio']:.3g}, {'met' if line['met'] else '**not met**'}"
                for line in closings
                if "goal" in line
            ),
            "; ".join(dict.fromkeys(_times(line, "times_limit", line.get("limit")) for line in closings)),
        )


def _limits(of: dict[str, list[Line]]) -> Iterable[str]:
    yield "| limit | one call, us | what it does |"
    yield "| --- | --- | --- |"
    for line in of["limits"]:
        if "value" in line:
            per_call = line["value"] * LIMITS[line["system"]][0]
            yield _row(line["system"], f"{per_call:,.0f}", LIMITS[line["system"]][1])


def _training(of: dict[str, list[Line]]) -> Iterable[str]:
    """The rates of the rounds, and their ratio."""
    yield "| side | updates/s in each round | to the plain loop |"
    yield "| --- | --- | --- |"
    lines = of["training_loop"]
    for side in ("plain", "apart"):
        rates = "; ".join(f"{line['value']:.3g}" for line in lines if line["system"] == side and "value" in line)
        yield _row(
            side, rates, "".join(f"{line['ratio']}" for line in lines if line["system"] == side and "goal" in line)
        )


def _sweep() -> Iterable[str]:
    yield "| system | part | settings, the best first | a second (or transitions a byte) |"
    yield "| --- | --- | --- | --- |"
    of: dict[tuple[str, str], list[Line]] = defaultdict(list)
    for row in json.loads(sweep.RECORD.read_text()):
        of[row["system"], row["part"]].append(row)
    for (system, part), rows in of.items():
        rows.sort(key=lambda row: -row["score"])
        settings = ("`" + json.dumps(row["settings"]).strip("{}").replace('"', "") + "`" for row in rows)
        yield _row(system, part, "; ".join(settings), "; ".join(_number(row["score"]) for row in rows))


def _connections(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each system."""
    yield "| system | capacity, pushes/s | p50 and p99 in ms at half of it: 8 | 64 | 256 connections | p99, 256 to 8 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for capacity in of["connections_capacity"]:
        mine = [line for line in of["connections"] if line["system"] == capacity["system"]]
        # Its value is the median of the rounds' p99, as the ratio is that of the rounds' ratios.
        cells = [f"{_number(line['p50_ms'])}, {_number(line['value'])}" for line in mine if "value" in line]
        ratio = next(line["ratio"] for line in mine if "value" not in line)
        yield _row(capacity["system"], f"{capacity['value']:.0f}", *cells, f"{ratio:.3g}")


def _growth(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each axis."""
    yield "| what grows | cost in us at | exponent, expected and measured | steepest part |"
    yield "| --- | --- | --- | --- |"
    for axis in AXES:
        lines = of[f"growth_{axis.name}"]
        costs = "; ".join(f"{line['at']}: {line['value']:,.0f}" for line in lines if "value" in line)
        for line in lines:
            if "value" not in line:
                yield _row(axis.about, costs, f"{axis.order:g}, {line['ratio']:.2f}", f"{line['steepest']:.2f}")


def _draw(of: dict[str, list[Line]]) -> None:
    """One small plot for each axis, cost over what grows, with the expected slope."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= pictures.SETTINGS
    from matplotlib import pyplot

    columns = 4
    figure, places = pyplot.subplots(
        -(-len(AXES) // columns), columns, figsize=(13, 6.4), layout="constrained", squeeze=False
    )
    for place in places.flat[len(AXES) :]:
        place.remove()
    for axis, place in zip(AXES, places.flat, strict=False):
        points = [(line["at"], line["value"]) for line in of[f"growth_{axis.name}"] if "value" in line]
        if not points:
            continue
        at, cost = zip(*points, strict=True)
        place.loglog(at, cost, "o-", color="#1f6feb", markersize=4)
        expected = [cost[0] * (each / at[0]) ** axis.order for each in at]
        place.loglog(at, expected, "--", color="#8c959f", linewidth=1)
        place.set_title(axis.name.replace("_", " "), fontsize=10)
        place.set_ylabel("µs")
        place.yaxis.set_major_formatter("{x:,g}")
        place.set_xticks(at, [f"{each:,}" if each < 1e4 else f"{each:.0e}" for each in at], fontsize=7)
        place.minorticks_off()
        place.grid(alpha=0.3)
        place.set_ylim(min(cost) / 3, max(*cost, *expected) * 3)
    pictures.save(figure, PICTURE)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _value(line: Line, hidden: str = "") -> str:
    """A value with its unit, and the system where it is not said already."""
    value, unit = line["value"], line["unit"]
    number = f"{value / 1e3:.3g} K" if value >= 1e4 else _number(value)
    system = "" if line["system"] == hidden else f"{line['system']} "
    return f"{system}{number} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.3g}"


def _times(line: Line, name: str, other: str | None) -> str:
    return f"{line[name]:.3g} x {other}" if name in line else ""
