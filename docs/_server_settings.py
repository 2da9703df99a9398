"""The table of server settings in reference/server.md, generated from the help of the command.

python docs/_server_settings.py   # after a change of a setting
"""

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "reference" / "server.md"
BEGIN, END = "<!-- settings -->\n", "<!-- end of settings -->"


def table() -> str:
    """A row for each flag of `innet-replay serve`."""
    command = [sys.executable, "-c", "from innet_drl.server_cli import main; main()", "serve", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("Options:\n")[1]
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for entry in re.split(r"(?m)^ {6}(?=--)", text)[1:]:
        flag, _, rest = entry.partition("\n")
        rest = rest.split("\n  -h, --help")[0]
        default = re.search(r"\[default: (.*)\]", rest)
        meaning = re.sub(r"\[default: .*\]", "", rest).replace("Possible values:", "")
        lines = [line.strip() for line in meaning.splitlines() if line.strip()]
        values = [re.sub(r"^- (\w+): +(.*)$", r"`\1`: \2", line) for line in lines[1:]]
        cells = [
            f"`{flag}`",
            f"`{default[1]}`" if default else "",
            "<br>".join([lines[0], *values]).replace("|", "\\|"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def filled(page: str) -> str:
    """The page with a new table between its marks."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
