"""`python -m benchmarks push | sample | parameters [flags]`: JSON lines on standard output."""

from __future__ import annotations

import tyro

from benchmarks import parameters, push, sample


def main() -> None:
    """Runs one benchmark."""
    tyro.extras.subcommand_cli_from_dict(
        {"push": push.push, "sample": sample.sample, "parameters": parameters.parameters},
        description=__doc__,
    )


if __name__ == "__main__":
    main()
