"""The files of deploy/ start commands that exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "deploy"
COMMANDS = {
    "serve": ("innet_drl.server_cli", "serve"),
    "stats": ("innet_drl.server_cli", "stats"),
    "learner": ("innet_drl.cli", "learner"),
    "actor": ("innet_drl.cli", "actor"),
}


def flags_of(command: str) -> set[str]:
    module, name = COMMANDS[command]
    program = [sys.executable, "-c", f"from {module} import main; main()", name, "--help"]
    environment = {**os.environ, "COLUMNS": "200"}
    shown = subprocess.run(program, capture_output=True, text=True, check=True, env=environment).stdout
    return set(re.findall(r"--[a-z][a-z-]*", shown))


def commands(text: str) -> list[tuple[str, set[str]]]:
    """Each command of a file with its flags, up to the next command."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    words = re.findall(r"--[a-z][a-z-]*|\b(?:serve|stats|learner|actor)\b(?![-:.\"/])", "\n".join(lines))
    found: list[tuple[str, set[str]]] = []
    for word in words:
        if not word.startswith("--"):
            found.append((word, set()))
        elif found:
            found[-1][1].add(word)
    return [(command, flags) for command, flags in found if flags]


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes.yaml", "skypilot.yaml"])
def test_flags_exist(name: str) -> None:
    found = commands((FOLDER / name).read_text())
    assert {command for command, _ in found} >= {"serve", "learner", "actor"}
    for command, flags in found:
        assert flags <= flags_of(command), command
