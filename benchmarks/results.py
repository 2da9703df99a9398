"""Parsing of benchmark flags, and the file of results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import innet_drl as innet
from innet_drl._core import fstack_release
from innet_drl.train.errors import writing
from innet_drl.train.machine import description

Value = TypeVar("Value", int, float)
Row = dict[str, Any]
"""One result, as a line of the results' file."""


def write(
    path: Path, rows: list[Row], settings: dict[str, Any], versions: Mapping[str, str | None] | None = None
) -> None:
    """Writes machine, settings and rows as JSON, one row per line, so that files of two runs can be compared.

    Args:
        path: The file.
        rows: Results.
        settings: Settings of the measurement.
        versions: Releases of other software, by its name.
    """
    machine = {
        "commit": _commit(),
        **description(),
        "fstack": fstack_release,
        **(versions or {}),
        "argv": " ".join(sys.argv[1:]),
        "load": os.getloadavg()[0],
    }
    lines = ",\n".join(json.dumps(row) for row in rows)
    with writing(str(path), "choose another file with --json"):
        path.write_text(
            f'{{"machine": {json.dumps(machine)},\n"settings": {json.dumps(settings)},\n"rows": [\n{lines}\n]}}\n'
        )


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table as Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def settings(flags: Any) -> dict[str, Any]:
    """Returns a command's flags without the paths of its output."""
    given = dataclasses.asdict(flags)
    kept = {name: value for name, value in given.items() if name not in ("json", "plot")}
    return {name: str(value) if isinstance(value, Path) else value for name, value in kept.items()}


def values(
    text: str, flag: str, of: Callable[[str], Value], holds: Callable[[list[Value]], bool], wanted: str
) -> list[Value]:
    """Parses a flag with comma-separated values.

    Raises:
        SystemExit: A value is malformed, or the values are refused by the check.
    """
    try:
        found = [of(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not holds(found):
        raise SystemExit(f"--{flag} {text}: it must be {wanted}")
    return found


def numbers(text: str, flag: str) -> list[int]:
    """Parses a flag such as `1,2,4` with numbers of at least 1."""
    return values(text, flag, int, lambda numbers: min(numbers) >= 1, "numbers such as 1,2,4,8")


def names(text: str, known: Iterable[str], flag: str) -> list[str]:
    """Parses a flag with names.

    Raises:
        SystemExit: A name is unknown.
    """
    found = [word.strip() for word in text.split(",")]
    for name in found:
        if name not in known:
            raise SystemExit(f"--{flag} {text}: {name!r} is none of {', '.join(known)}")
    return found


@functools.cache
def _commit() -> str | None:
    """Returns the commit of the checkout with this package, with `-dirty` after changes; `None` if it is installed.

    Cached: writing results may change the checkout.
    """

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "-C", str(Path(innet.__file__).parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    with contextlib.suppress(OSError):
        if git("ls-files", "--error-unmatch", "__init__.py").returncode == 0:
            return git("describe", "--always", "--dirty").stdout.strip()
    return None
