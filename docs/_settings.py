"""The table of the server's settings in the reference, from the help of the command.

python docs/_settings.py   # after a change of a setting
"""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

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


PAGES: dict[str, Callable[[], Iterator[list[str]]]] = {"reference/server.md": server_rows}


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
