"""The commands `innet-replay export` and `import`: the content of a server's table to a data set, and back."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import innet_drl as innet
from innet_drl import datasets, errors

_WHAT = {
    "export": "Write all steps of a table to a data set, while the table is in use.",
    "import": "Append the episodes of a data set to an existing table.",
}
_ADDRESS = "address of the server: innet://host:port, innets://host:port, or unix:///path (default: %(default)s)"


def main(arguments: Sequence[str]) -> int:
    """Runs `export` or `import` and returns its exit status: 0, 1 for an error, 2 for wrong flags."""
    command, *given = arguments
    parser = argparse.ArgumentParser(f"innet-replay {command}", description=_WHAT[command])
    add = parser.add_argument
    add("table", metavar="TABLE", help="name of the table")
    add("data_set", metavar="DATASET", help="name of the data set: FILE.parquet or minari:NAME")
    add("address", metavar="ADDRESS", nargs="?", default="innet://127.0.0.1:7710", help=_ADDRESS)
    if command == "import":
        add("--priority", type=float, help="priority of all items; by default the largest that the table has held")
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--token", help="token of the server; prefer --token-file, or the variable INNET_TOKEN")
    tokens.add_argument("--token-file", metavar="FILE", help="file with the server's token")
    add("--tls-ca", metavar="FILE", help="PEM file with the server's certificate or its authority's, for innets://")
    add("--namespace", metavar="NAME", help="take the table of this namespace")
    flags = parser.parse_args(given)
    try:
        began = time.monotonic()
        token = Path(flags.token_file).read_text().strip() if flags.token_file else flags.token
        with innet.connect(flags.address, token=token, tls_ca=flags.tls_ca, namespace=flags.namespace) as replay:
            if command == "export":
                counts = datasets.export_table(replay, flags.table, flags.data_set)
            else:
                counts = datasets.import_table(replay, flags.table, flags.data_set, priority=flags.priority)
    except (errors.ReplayError, OSError) as error:
        print(f"innet-replay: {error}", file=sys.stderr)
        return 2 if isinstance(error, errors.ConfigError) else 1
    seconds = time.monotonic() - began
    print(f"{flags.data_set}  {counts.episodes:,} episodes  {counts.steps:,} steps  {seconds:.1f} s")
    return 0
