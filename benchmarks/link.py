"""An emulated link in front of a server: a relay of this project, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Self

from benchmarks.systems import Address

PYTHON = "BENCHMARKS_PYTHON"
"""Environment variable with this project's Python, for workers in other environments."""


class Link:
    """A relay process. It also counts bytes, for tasks in the environments of peers.

    Args:
        target: Address of the server.
        each_way_ms: One-way delay in milliseconds.
    """

    def __init__(self, target: Address, each_way_ms: float = 0.0) -> None:
        command = [os.environ.get(PYTHON, sys.executable), "-m", "benchmarks.link", "{}:{}".format(*target)]
        pipe = subprocess.PIPE
        self._relay = subprocess.Popen([*command, str(each_way_ms)], stdin=pipe, stdout=pipe, text=True)
        host, port = self._answer().split(":")
        self.address: Address = host, int(port)

    @property
    def bytes(self) -> int:
        """TCP payload bytes so far, in both directions."""
        print(file=self._relay.stdin, flush=True)
        return int(self._answer())

    def _answer(self) -> str:
        assert self._relay.stdout is not None
        return self._relay.stdout.readline()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process."""
        self._relay.terminate()
        self._relay.communicate()


def main(to: str, each_way_ms: str) -> None:
    """Relays until its input ends, and answers each line with the bytes so far."""
    from benchmarks.relay import Relay

    with Relay(to, delay=1e-3 * float(each_way_ms)) as relay:
        print(relay.address, flush=True)
        for _ in sys.stdin:
            print(sum(relay.bytes), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
