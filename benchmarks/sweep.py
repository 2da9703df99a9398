"""The best settings of each system: `python -m benchmarks sweep` tries the candidates of its module.

`sweep.json` records the results; every benchmark uses the best settings in it.
"""

from __future__ import annotations

import functools
import json
import statistics
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.contest import ROOT, Entry, interpreter, measure, missing

RECORD = Path(__file__).parent / "sweep.json"
SYSTEMS = ("innet", "reverb", "redis", "echo", "torchrl", "cpprb")
TASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "Writer": ("Push", {}),
    "Memory": ("SampleInProcess", {}),
    "Tree": ("Tree", {}),
    "Wire": ("Wire", {}),
    "Resident": ("Memory", {}),
    "get": ("Parameters", {"what": "get"}),
    "put": ("Parameters", {"what": "put"}),
}
"""Task that compares the settings of a part; all other parts are readers."""


def best(system: str, part: str) -> dict[str, Any]:
    """The best settings of the recorded sweep; empty if the part has no candidates."""
    rows = [row for row in _record() if (row["system"], row["part"]) == (system, part)]
    settings: dict[str, Any] = max(rows, key=lambda row: row["score"])["settings"] if rows else {}
    return settings


def sweep(
    systems: tuple[str, ...] = SYSTEMS, parts: tuple[str, ...] = (), rounds: int = 3, seconds: float = 2.0
) -> None:
    """Tries the settings of the systems' parts, and records the result of each: the more the better.

    Args:
        systems: Those to try; the record of the others stays.
        parts: Those to try, all when none is named.
        rounds: Turns of each setting.
        seconds: Length of a turn.
    """
    rows = {_key(row): row for row in _record()}
    for system in systems:
        if missing(system):
            raise SystemExit(f"{system} lacks {missing(system)}")
        for part, choices in _choices(system).items():
            if parts and part not in parts:
                continue
            task, more = TASKS.get(part, ("Sample", {"reader": part}))
            for settings in choices:
                entry = Entry(system, system, task, {**settings, **more})
                once = task in ("Wire", "Memory")
                results = measure([entry], 1 if once else rounds, seconds)[system].rounds
                score = statistics.median(each["count"] / each["bytes" if once else "elapsed"] for each in results)
                row = {"system": system, "part": part, "settings": settings, "score": float(f"{score:.4g}")}
                row["unit"] = "transitions a byte" if once else "a second"
                rows[_key(row)] = row
                print(json.dumps(row), flush=True)
                RECORD.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows.values()) + "\n]\n")


def _key(row: dict[str, Any]) -> str:
    """Key of a row: a newer row with the same settings replaces it."""
    return json.dumps([row["system"], row["part"], row["settings"]], sort_keys=True)


@functools.cache
def _record() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(RECORD.read_text()) if RECORD.exists() else []
    return rows


def _choices(system: str) -> dict[str, list[dict[str, Any]]]:
    """Candidate settings of a system, read by the Python that can import its module."""
    program = f"import json; from benchmarks.systems import {system}; print(json.dumps({system}.SWEEP))"
    python = interpreter(system)
    assert python is not None
    said = subprocess.run([python, "-c", program], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
    choices: dict[str, list[dict[str, Any]]] = json.loads(said.splitlines()[-1])
    return choices
