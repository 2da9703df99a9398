"""Recorded results as a dated report, a short table and pictures: `python -m benchmarks table`."""

from __future__ import annotations

import datetime
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from benchmarks import charts
from benchmarks.catalogue import BENCHMARKS
from benchmarks.growth import AXES
from benchmarks.report import Line, markdown, read

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "docs" / "reports"
"""Reports, `DATE-SUBJECT.md`, with their raw data in folders `DATE-SUBJECT`."""
README = ROOT / "benchmarks" / "README.md"
LINKING = (ROOT / "README.md", README)
"""Pages with links to the newest report."""

LIMITS = {
    "memory copy": (1, "13.17 MB copied"),
    "frame copy": (50, "50 frames of 84x84 bytes copied"),
    "frame copy, two threads": (50, "50 frames copied while another thread does it"),
    "window write": (1, "array of 512 windows of 7 frames written by two threads"),
    "random access": (1, "512 of 2^20 words read and rewritten, NumPy"),
    "lz4 compress": (50, "50 frames packed, one by one, Python"),
    "lz4 decompress": (1, "512 windows of 7 frames unpacked, one by one, Python"),
    "tcp": (1, "13.17 MB over loopback TCP"),
    "unix socket": (1, "13.17 MB over Unix sockets"),
}
"""Units counted by one call, and its description."""


def today(subject: str) -> Path:
    """The raw data folder of a report dated today."""
    folder = REPORTS / f"{datetime.date.today()}-{subject}"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def table() -> None:
    """Writes the report of the newest results, their table in the README beside this file, and the pictures."""
    folder = max(each for each in REPORTS.glob("*-replay") if each.is_dir())
    of = read(folder / "results.jsonl")
    sweep = json.loads((folder / "sweep.json").read_text())
    folder.with_suffix(".md").write_text(report_page(of, sweep, folder.name))
    for page in LINKING:
        page.write_text(re.sub(r"\d{4}-\d\d-\d\d-replay", folder.name, page.read_text()))
    README.write_text(filled(README.read_text(), of))
    bars = [(work, ratio, f"{words}: {ours}, {peer}") for work, ours, peer, ratio, words in _best(of)]
    charts.results(bars, folder / "results.svg")
    charts.growth(of, folder / "growth.svg")
    for record in REPORTS.glob("*-learning/*.jsonl"):
        charts.learning(record, record.with_suffix(".svg"))


def filled(text: str, of: dict[str, list[Line]]) -> str:
    """Replaces the table of results between a page's markers."""
    before, begin, after = text.partition("<!-- results -->")
    _, end, after = after.partition("<!-- end of results -->")
    assert end, "the page lacks the marks of results"
    rows = [(work, ours, peer, words) for work, ours, peer, _, words in _best(of)]
    return "\n".join([before + begin, "", markdown(("work", "innet-drl", "best peer", "ratio"), rows), end + after])


def report_page(of: dict[str, list[Line]], sweep: list[Line], name: str) -> str:
    """Returns a report as Markdown."""
    machine = next(line for lines in of.values() for line in lines if "commit" in line)
    versions = sorted({line["version"] for lines in of.values() for line in lines if "version" in line})
    parts: dict[str, Iterable[str]] = {
        "Results": _figures(of),
        "Single calls": _calls(of),
        "Limits of the machine": _limits(of),
        "Connections": _connections(of),
        "Growth": [f"![cost over size, with the expected slope]({name}/growth.svg)", "", *_growth(of)],
        "Training": _training(of),
        "Settings": _sweep(sweep),
    }
    lines = [
        f"# Replay memory beside its peers, {name[:10]}",
        "",
        "| | |",
        "| --- | --- |",
        _row("commit", f"`{machine['commit']}`"),
        _row("machine", f"{machine['cores']} cores of an {machine['processor']}, loopback"),
        _row("versions", "; ".join([f"Python {machine['python']}", *versions])),
        _row("raw data", f"[`results.jsonl`]({name}/results.jsonl), [`sweep.json`]({name}/sweep.json)"),
        _row("repeat", "`make bench-peers`, `make bench`"),
        "",
        "How fast is the memory beside other libraries and the limits of the machine?",
        "[Method](../../benchmarks/README.md), [limits and exponents](../reference/benchmarks.md#limits-and-growth).",
        "One run on one machine, so no figure is of a network. `python -m benchmarks table` generates this page.",
        "",
        f"![How many times as good as the best peer]({name}/results.svg)",
    ]
    for heading, rows in parts.items():
        lines += ["", f"## {heading}", "", *rows]
    return "\n".join(lines) + "\n"


SHORT = {
    "sum_tree": ("sample and update 512 of 2^20 priorities", "innet"),
    "push": ("push transitions, one actor", "innet"),
    "sample": ("sample 512 transitions from a server, prefetching", "innet prefetching"),
    "sample_in_process": ("sample 512 transitions in process", "innet"),
    "parameters_get": ("get 13 MB of parameters", "innet"),
    "parameters_put": ("put 13 MB of parameters", "innet"),
    "wire": ("a transition on the wire", "innet"),
    "memory": ("a transition in a server's memory", "innet"),
}
"""Benchmarks of the short table, with a description and the label of our system."""


def _best(of: dict[str, list[Line]]) -> Iterable[tuple[str, str, str, float, str]]:
    """Yields description, our value, the best peer with its value, and the ratio as number and in words."""
    for name, (work, ours) in SHORT.items():
        values = {line["system"]: line for line in of[name] if "value" in line}
        for line in of[name]:
            if line["system"] == ours and "times_best_peer" in line:
                ratio, peer = line["times_best_peer"], line["best_peer"]
                words = f"{ratio:.2g} times" + (" less" if values[ours]["unit"] == "bytes/transition" else "")
                shown = NAMES[peer.partition(" ")[0]]
                yield work, _plain(values[ours]), f"{shown} {_plain(values[peer])}", ratio, words
                break


NAMES = {
    "agilerl": "AgileRL",
    "cpprb": "cpprb",
    "echo": "echo",
    "flashbax": "Flashbax",
    "redis": "Redis",
    "reverb": "Reverb",
    "torchrl": "TorchRL",
}


def _plain(line: Line) -> str:
    """A value with a plain unit."""
    value = line["value"]
    if line["unit"] == "transitions/s":
        return f"{round(value, -3):,.0f}/s"
    unit = {"us": "µs", "bytes/transition": "bytes"}.get(line["unit"], line["unit"])
    return f"{_number(value) if value < 10 else format(value, ',.0f')} {unit}"


def _calls(of: dict[str, list[Line]]) -> Iterable[str]:
    """Percentiles of single calls, without the machine's limits and without counted bytes."""
    yield "p50 (p99) in ms. The results above are medians of three rounds; bytes are of one round."
    yield ""
    yield "| benchmark | p50 (p99) |"
    yield "| --- | --- |"
    for benchmark in BENCHMARKS:
        if benchmark.name == "limits" or benchmark.once:
            continue
        calls = [
            f"{line['system']} {_number(line['p50_ms'])} ({_number(line['p99_ms'])})"
            for line in of[benchmark.name]
            if "p50_ms" in line and line["system"] != benchmark.limit
        ]
        if calls:
            yield _row(f"`{benchmark.name}`", "; ".join(calls))


def _figures(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each benchmark of the catalogue."""
    yield "| work | innet-drl | peers, same unit | ratio to the best peer | goal | ratio to the machine's limit |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for benchmark in BENCHMARKS:
        if benchmark.name == "limits" or not of[benchmark.name]:
            # A report may be older than a benchmark.
            continue
        values = [line for line in of[benchmark.name] if "value" in line]
        closings = [line for line in of[benchmark.name] if "value" not in line]
        ours = [line for line in values if line["system"].startswith("innet")]
        peers = [line for line in values if line not in ours and line["system"] not in benchmark.limits]
        yield _row(
            benchmark.about,
            "; ".join(_value(line, "innet" if len(ours) == 1 else "") for line in ours),
            "; ".join(f"{line['system']} {_amount(line)}" for line in peers),
            "; ".join(dict.fromkeys(_times(line, "times_best_peer", line.get("best_peer")) for line in closings)),
            "; ".join(_goal(line) for line in closings if "goal" in line),
            "; ".join(dict.fromkeys(_times(line, "times_limit", line.get("limit")) for line in closings)),
        )


def _limits(of: dict[str, list[Line]]) -> Iterable[str]:
    yield "| limit | one call, µs | work |"
    yield "| --- | --- | --- |"
    for line in of["limits"]:
        if "value" in line:
            per_call = line["value"] * LIMITS[line["system"]][0]
            yield _row(line["system"], f"{per_call:,.0f}", LIMITS[line["system"]][1])


def _training(of: dict[str, list[Line]]) -> Iterable[str]:
    """The rates of the rounds, and their ratio."""
    yield "`plain` is a loop in one process; `apart` has processes for actors and learner."
    yield ""
    yield "| side | updates/s in each round | ratio to the plain loop |"
    yield "| --- | --- | --- |"
    lines = of["training_loop"]
    for side in ("plain", "apart"):
        rates = "; ".join(f"{line['value']:.3g}" for line in lines if line["system"] == side and "value" in line)
        yield _row(
            side, rates, "".join(f"{line['ratio']}" for line in lines if line["system"] == side and "goal" in line)
        )


def _sweep(record: list[Line]) -> Iterable[str]:
    """The best settings of each part; the raw data has the others."""
    yield "| system | best settings of each part, of how many tried |"
    yield "| --- | --- |"
    of: dict[str, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for row in record:
        of[row["system"]][row["part"]].append(row)
    for system, parts in of.items():
        best = []
        for part, rows in parts.items():
            settings = max(rows, key=lambda row: row["score"])["settings"]
            shown = ", ".join(f"{name}: {value}" for name, value in settings.items()).replace("'", "")
            best.append(f"{part} ({len(rows)}) " + (f"`{shown}`" if shown else "defaults"))
        yield _row(system, "; ".join(best))


def _connections(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each system."""
    yield "| system | capacity, pushes/s | p50, p99 in ms at half of it: 8 connections | 64 | 256 | p99, 256 to 8 |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for capacity in of["connections_capacity"]:
        mine = [line for line in of["connections"] if line["system"] == capacity["system"]]
        # The value is the median p99 of the rounds, consistent with the median ratio.
        cells = [f"{_number(line['p50_ms'])}, {_number(line['value'])}" for line in mine if "value" in line]
        ratio = next(line["ratio"] for line in mine if "value" not in line)
        yield _row(capacity["system"], f"{capacity['value']:.0f}", *cells, f"{ratio:.3g}")


def _growth(of: dict[str, list[Line]]) -> Iterable[str]:
    """A row for each axis."""
    yield "| growing size | cost in µs at | exponent, expected and measured | steepest part |"
    yield "| --- | --- | --- | --- |"
    for axis in AXES:
        lines = of[f"growth_{axis.name}"]
        costs = "; ".join(f"{line['at']}: {line['value']:,.0f}" for line in lines if "value" in line)
        for line in lines:
            if "value" not in line:
                yield _row(axis.about, costs, f"{axis.order:g}, {line['ratio']:.2f}", f"{line['steepest']:.2f}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _value(line: Line, hidden: str = "") -> str:
    """A value with its unit, and its system unless `hidden`."""
    system = "" if line["system"] == hidden else f"{line['system']} "
    return f"{system}{_amount(line)} {line['unit'].replace('us', 'µs')}"


def _amount(line: Line) -> str:
    value = line["value"]
    return f"{value / 1e3:.3g} K" if value >= 1e4 else _number(value)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1e3 else f"{value:.3g}"


def _goal(line: Line) -> str:
    """A goal, its ratio unless that is the ratio to the best peer, and whether it is met."""
    ratio = "" if line["ratio"] == line.get("times_best_peer") else f": {line['ratio']:.3g}"
    return f"{line['goal']}{ratio}, {'met' if line['met'] else '**not met**'}"


def _times(line: Line, name: str, other: str | None) -> str:
    return f"{line[name]:.3g} x {other}" if name in line else ""
