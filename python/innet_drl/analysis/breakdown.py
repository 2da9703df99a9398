"""`innet-drl analyze breakdown`: the time of actors and learner by activity, as a table and JSON.

Furukawa and Matsutani show their baseline in the same way: a bar for actors and one for the learner, with shares of
parameters, experience and computation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from innet_drl.analysis.flags import BreakdownFlags
from innet_drl.analysis.recorded_run import read_lines
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.observe.display import aligned
from innet_drl.train.observe.stopwatch import MEMORY, RATIO, WAITING, add_seconds, read_times
from innet_drl.train.run_folder import RunFolder

KINDS = {
    "computation": ("inference", "environment", "targets", "forward", "backward", "optimizer"),
    "communication": (
        *("parameters", "write", "send", "sample", "upload", "average gradients", "priorities", "publish"),
    ),
    "waiting": (WAITING, RATIO, "wait for the learner"),
    "bookkeeping": ("free", "evaluate", "report", "checkpoint", "other"),
}
"""Activities by kind."""
START = "start"
"""Activity before training, excluded from the shares."""
HOST_TIMES = (
    "the learner's times are of its host: it starts the GPU's work, which overlaps all of them, and waits for it where "
    "it needs a result, in priorities"
)
"""Note on runs whose learner has a GPU."""
MOST_PROCESSES = 6
"""Largest number of columns; above it, all actors share one."""


@dataclass(frozen=True)
class Bar:
    """The time of a process, or of all actors together."""

    process: str
    """`learner 0`, `actor 3`, `serial`, or all `actors`; `learner 0: targets` is a thread that works beside it."""
    seconds: float
    """Seconds of training."""
    shares: dict[str, float]
    """Shares of the seconds by activity, which sum to 1."""
    start_s: float
    """Seconds of the start, before training."""

    @property
    def kinds(self) -> dict[str, float]:
        """Shares by kind of activity."""
        return {
            kind: sum(self.shares.get(activity, 0.0) for activity in activities) for kind, activities in KINDS.items()
        }


@dataclass(frozen=True)
class Breakdown:
    """The bars of a run."""

    run: str
    environment: str
    bars: list[Bar]
    """The learner first."""
    samples: int
    """Batches that the memory sampled."""
    blocked_samples: int
    """Sampled batches that waited for the replay ratio."""
    note: str

    @property
    def shown(self) -> list[Bar]:
        """The columns of every process, or of the learner and of all actors together."""
        actors = [bar for bar in self.bars if bar.process.startswith("actor ")]
        if len(self.bars) <= MOST_PROCESSES or not actors:
            return self.bars
        return [*(bar for bar in self.bars if bar not in actors), together(actors)]

    def as_dict(self) -> dict[str, Any]:
        """Returns the breakdown as plain JSON values."""
        return {**asdict(self), "bars": [{**asdict(bar), "kinds": bar.kinds} for bar in self.bars]}


def run(flags: BreakdownFlags) -> None:
    """Prints the breakdown of runs, and writes the JSON file that the flags ask for.

    Raises:
        ConfigurationError: No run is named, or it has no times.
        RunFolderError: A folder has no run, or the file cannot be written.
    """
    if not flags.runs:
        raise ConfigurationError("innet-drl analyze breakdown shows runs: name their folders, runs/...")
    found = [read(folder) for folder in {folder.resolve(): folder for folder in flags.runs}.values()]
    for breakdown in found:
        print(table(breakdown))
    if flags.json is not None:
        with writing(str(flags.json), "choose another file with --json"):
            flags.json.write_text(json.dumps({"runs": [each.as_dict() for each in found]}, indent=1) + "\n")
        print(f"written: {flags.json}")


def read(path: Path) -> Breakdown:
    """Reads the times of a run.

    Raises:
        RunFolderError: There is no run.
        ConfigurationError: The run has recorded no times.
    """
    config, times = RunFolder.open(path).config(), read_times(path)
    if not times:
        raise ConfigurationError(f"{path} has recorded no times: it has no times.json")
    devices = [session["device"] for session in read_lines(path / "sessions.jsonl") if "device" in session]
    note = HOST_TIMES if devices and devices[-1] != "cpu" else ""
    seconds = times.pop("seconds")
    # By length: `actor 10` is behind `actor 9`.
    names = sorted(seconds, key=lambda name: (name.startswith("actor "), len(name), name))
    return Breakdown(
        str(path), config.environment_name, [_bar(name, seconds[name]) for name in names], **times, note=note
    )


def _bar(name: str, seconds: dict[str, float]) -> Bar:
    if MEMORY in seconds:
        # The rest of the actor's wait is transfer.
        waited = min(seconds.get(RATIO, 0.0), seconds[MEMORY])
        seconds |= {RATIO: waited, "send": seconds.pop(MEMORY) - waited}
    start = seconds.pop(START, 0.0)
    return Bar(name, sum(seconds.values()), _shares(seconds), start)


def together(bars: Sequence[Bar]) -> Bar:
    """Merges bars of actors: mean shares, weighted by seconds."""
    seconds: dict[str, float] = {}
    for bar in bars:
        add_seconds(seconds, {activity: share * bar.seconds for activity, share in bar.shares.items()})
    return Bar("actors", sum(seconds.values()), _shares(seconds), sum(bar.start_s for bar in bars))


def _shares(seconds: Mapping[str, float]) -> dict[str, float]:
    total = sum(seconds.values())
    return {name: value / total for name, value in seconds.items()} if total else {}


def table(breakdown: Breakdown) -> str:
    """The breakdown as text: a column for each bar, a row for each activity."""
    shown = breakdown.shown
    rows = [("", *(bar.process for bar in shown))]
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
    lines = [f"{breakdown.run}: {breakdown.environment}", aligned(rows, left=1)]
    if any(":" in bar.process for bar in shown):
        lines.append("a column with a colon is a thread that works beside its process: overlapped time")
    if breakdown.samples:
        share = min(1.0, breakdown.blocked_samples / breakdown.samples)
        lines.append(f"{share:.0%} of {breakdown.samples:,} samples waited for the replay ratio")
    if breakdown.note:
        lines.append(breakdown.note)
    return "\n".join([*lines, ""])


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
