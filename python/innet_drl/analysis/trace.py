"""The trace of runs in Chrome's JSON format, for Perfetto: all processes on one time axis.

Processes of one host share a monotonic clock, so that their laps are aligned exactly. Laps of other hosts are aligned
by wall-clock time, as exactly as the hosts' clocks are synchronised.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from innet_drl.analysis.recorded_run import reading
from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.observe.times import TRACE

PARENTS = {
    "update": ("targets", "forward", "backward", "average gradients", "optimizer"),
    "step": ("inference", "environment", "write"),
}
"""Name of the enclosing slice, by the name of a lap."""
PARENT_OF = {activity: parent for parent, activities in PARENTS.items() for activity in activities}


def export(runs: Sequence[Path], out: Path) -> None:
    """Writes the trace of runs.

    Raises:
        ConfigurationError: A run has no trace, or a damaged one.
        RunFolderError: A file cannot be read or written.
    """
    events: list[dict[str, Any]] = []
    for run in runs:
        prefix = f"{run.resolve().name}: " if len(runs) > 1 else ""
        events += _events_of(run, prefix, sum(event["name"] == "process_name" for event in events))
    slices = [event for event in events if event["ph"] == "X"]
    first = min(event["ts"] for event in slices)
    for event in slices:
        # Microseconds with three decimals represent nanoseconds exactly.
        event["ts"], event["dur"] = (event["ts"] - first) / 1000, event["dur"] / 1000
    with writing(str(out), "choose another file with --trace"):
        out.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")


def _events_of(run: Path, prefix: str, earlier: int) -> list[dict[str, Any]]:
    path = run / TRACE
    if not path.is_file():
        raise ConfigurationError(
            f"{run} has recorded no trace: train with trace_seconds 10, or continue the run with that setting"
        )
    with reading(path):
        # An incomplete last line: the run is writing it, or was killed meanwhile.
        whole = path.read_text().rpartition("\n")[0].splitlines()
    try:
        if not whole:
            raise ValueError("it is empty")
        events = list(_events([json.loads(line) for line in whole], prefix, earlier))
        if not any(event["ph"] == "X" for event in events):
            raise ValueError("it has no laps")
    except (ValueError, TypeError, KeyError, IndexError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigurationError(f"{path} is damaged ({reason}): record another trace with trace_seconds") from error
    return events


def _events(lines: Sequence[dict[str, Any]], prefix: str, earlier: int) -> Iterator[dict[str, Any]]:
    """Yields events with times in whole nanoseconds, by the clock of the first line's host."""
    host, offset = lines[0]["host"], lines[0]["offset_s"]
    numbers: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    for line in lines:
        process, thread = line["process"], line["thread"]
        if process not in numbers:
            numbers[process] = earlier + len(numbers) + 1
            yield _name("process_name", prefix + process, numbers[process], 0)
        if (process, thread) not in threads:
            threads[process, thread] = sum(name == process for name, _ in threads) + 1
            yield _name("thread_name", thread or "main", numbers[process], threads[process, thread])
        shift = 0 if line["host"] == host else round(1e9 * (line["offset_s"] - offset))
        where = {"pid": numbers[process], "tid": threads[process, thread]}
        for name, begin, duration in _slices(line["begin_ns"] + shift, line["laps"]):
            yield {"name": name, "cat": name, "ph": "X", "ts": begin, "dur": duration, **where}


def _name(kind: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slices(begin: int, laps: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int, int]]:
    """Yields name, begin and duration of each lap, preceded by the enclosing slice of an update or step."""
    number = 0
    while number < len(laps):
        parent, last = PARENT_OF.get(laps[number][0]), number + 1
        while parent is not None and last < len(laps) and PARENT_OF.get(laps[last][0]) == parent:
            last += 1
        if parent is not None:
            yield parent, begin, sum(duration for _, duration in laps[number:last])
        for name, duration in laps[number:last]:
            yield name, begin, duration
            begin += duration
        number = last
