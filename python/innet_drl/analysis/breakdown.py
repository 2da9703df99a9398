"""`innet-drl analyze breakdown`: the time of actors and learners, as a table, JSON, a picture and a trace."""

from __future__ import annotations

import json

from innet_drl.analysis import trace
from innet_drl.analysis.bars import KINDS, Breakdown, read
from innet_drl.analysis.flags import BreakdownFlags
from innet_drl.extras import naming_extras
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.observe.display import aligned


def run(flags: BreakdownFlags) -> None:
    """Prints the breakdown of runs, and writes what the flags ask for.

    Raises:
        ConfigurationError: No run is named, or it has no times or no trace.
        RunFolderError: A folder has no run, or a file cannot be read or written.
        MissingExtraError: A picture needs matplotlib.
    """
    if not flags.runs:
        raise ConfigurationError("innet-drl analyze breakdown shows runs: name their folders, runs/...")
    folders = list({folder.resolve(): folder for folder in flags.runs}.values())
    found = [read(folder) for folder in folders]
    written = []
    if flags.trace is not None:
        trace.export(folders, flags.trace)
        written.append(f"{flags.trace} (open it in https://ui.perfetto.dev)")
    for breakdown in found:
        print(table(breakdown))
    if flags.json is not None:
        with writing(str(flags.json), "choose another file with --json"):
            flags.json.write_text(json.dumps({"runs": [each.as_dict() for each in found]}, indent=1) + "\n")
        written.append(str(flags.json))
    if flags.plot is not None:
        with naming_extras():
            from innet_drl.analysis.bar_picture import draw
        draw(found, flags.plot)
        written.append(str(flags.plot))
    if written:
        print(f"written: {', '.join(written)}")


def table(breakdown: Breakdown) -> str:
    """The breakdown as text: a column for each bar, a row for each activity."""
    shown = breakdown.shown
    rows = [("", *(bar.name for bar in shown))]
    for kind, activities in KINDS.items():
        rows.append((kind, *(_percent(bar.kinds[kind]) for bar in shown)))
        rows += [
            (f"  {activity}", *(_percent(bar.shares.get(activity)) for bar in shown))
            for activity in activities
            if any(activity in bar.shares for bar in shown)
        ]
    rows.append(("sum", *(_percent(sum(bar.shares.values())) for bar in shown)))
    rows.append(("seconds", *(f"{bar.seconds:,.1f}" for bar in shown)))
    rows.append(("start before, s", *(f"{bar.start_s:,.1f}" for bar in shown)))
    lines = [f"{breakdown.path}: {breakdown.environment}", aligned(rows, left=1)]
    if any(bar.thread for bar in shown):
        lines.append("a column with a colon is a thread that works beside its process: overlapped time")
    lines += [
        f"beside {bar.process}, processor time of the core's threads as shares of its seconds: "
        + ", ".join(f"{work} {share:.1%}" for work, share in bar.beside.items())
        for bar in shown
        if bar.beside
    ]
    if breakdown.samples:
        share = min(1.0, breakdown.blocked_samples / breakdown.samples)
        lines.append(f"{share:.0%} of {breakdown.samples:,} samples waited for the replay ratio")
    if breakdown.note:
        lines.append(breakdown.note)
    return "\n".join([*lines, ""])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
