"""The tables of settings in the reference.

A server's are from the help of the command, a table's from its docstring, a run's from the docstrings of `Config`:

python docs/_settings.py   # after a change of a setting
"""

import dataclasses
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import innet_drl
from innet_drl.train.settings.config import Config, meanings

BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->"


def server_rows() -> Iterator[list[str]]:
    """A row for each flag of `innet-replay serve`."""
    command = [sys.executable, "-c", "from innet_drl.server_cli import main; main()", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Options:\n")[1]
    yield ["flag", "default", "meaning"]
    for entry in re.split(r"(?m)^ {6}(?=--)", text)[1:]:
        flag, _, rest = entry.partition("\n")
        rest = rest.split("\n  -h, --help")[0]
        default = re.search(r"\[default: (.*)\]", rest)
        meaning = re.sub(r"\[default: .*\]", "", rest).replace("Possible values:", "")
        lines = [line.strip() for line in meaning.splitlines() if line.strip()]
        values = [re.sub(r"^- (\w+): +(.*)$", r"`\1`: \2", line) for line in lines[1:]]
        yield [f"`{flag}`", f"`{default[1]}`" if default else "", "<br>".join([lines[0], *values])]


def table_rows() -> Iterator[list[str]]:
    """A row for each argument of `Table`."""
    arguments = (inspect.getdoc(innet_drl.Table) or "").split("Args:\n")[1].split("\n\n")[0]
    parameters = inspect.signature(innet_drl.Table).parameters
    yield ["argument", "default", "meaning"]
    for entry in re.split(r"(?m)^ {4}(?=\w+: )", arguments)[1:]:
        name, _, meaning = entry.partition(": ")
        default = parameters[name].default
        yield [f"`{name}`", "" if default is inspect.Parameter.empty else f"`{default!r}`", " ".join(meaning.split())]


def run_rows() -> Iterator[list[str]]:
    """A row for each setting of `Config`."""
    yield ["setting", "default", "meaning"]
    meaning = meanings()
    for field in dataclasses.fields(Config):
        made = field.default_factory
        default = field.default if made is dataclasses.MISSING else made()
        shown = "" if default is dataclasses.MISSING else f"`{default!r}`"
        yield [f"`{field.name}`", shown, meaning[field.name]]


PAGES: dict[str, Callable[[], Iterator[list[str]]]] = {
    "reference/server.md": server_rows,
    "reference/innet_drl.md": table_rows,
    "reference/innet_drl.train.md": run_rows,
}


def filled(name: str, page: str) -> str:
    """The page with a new table between its marks."""
    header, *rows = PAGES[name]()
    cells = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in cells)
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    for name in PAGES:
        path = Path(__file__).parent / name
        path.write_text(filled(name, path.read_text()))
