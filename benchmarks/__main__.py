"""`python -m benchmarks push | sample | parameters | memory [flags]`: JSON lines on standard output."""

from __future__ import annotations

import tyro

from benchmarks import memory, parameters, push, sample


def main() -> None:
    """Runs one benchmark."""
    tyro.extras.subcommand_cli_from_dict(
        {"push": push.push, "sample": sample.sample, "parameters": parameters.parameters, "memory": memory.memory},
        description=__doc__,
    )


if __name__ == "__main__":
    main()
