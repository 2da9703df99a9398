"""Calls every function of the core with absurd numbers, for `test_bounds.py`: in `process`, or served by a `server`.

It prints a line before each call, and its outcome after it, so that a crash names its call.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from signatures import calls, numbers

import innet_drl as innet

ABSURD: dict[str, list[float]] = {
    "int": [2**31, 2**40, 2**63 - 1, 2**64 - 1, 2**64, -1, -(2**63), 1e5],
    "float": [2**31, 2**40, 2**63 - 1, 2**64, -1, 1e19, 1e300, math.inf, -math.inf, math.nan],
}
ADDRESS_SPACE = 8 << 30
"""Far below what a number of these could ask for, and above what threads and their heaps reserve."""


def peak() -> int:
    """Largest resident bytes of this process. `ru_maxrss` would begin with those of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def main(where: str) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        def make_replay(tables: Sequence[innet.Table]) -> innet.Replay:
            memory = stack.enter_context(innet.Memory(tables))
            if where == "process":
                return memory
            server = stack.enter_context(memory.serve(f"unix://{folder}/s"))
            return stack.enter_context(innet.connect(server.addresses[0]))

        with calls(make_replay) as known:
            functions = {name for name, _ in numbers()}
            assert functions == set(known), f"signatures.py lacks, or has too many: {functions ^ set(known)}"
            for (name, argument), kind in numbers().items():
                for value in ABSURD[kind]:
                    call = {"name": name, "argument": argument, "value": repr(value)}
                    print(json.dumps(call), flush=True)
                    function, arguments = known[name]
                    error = None
                    try:
                        function(**{**arguments, argument: value})
                    except BaseException as raised:
                        error = raised
                    outcome = {
                        "error": error and type(error).__name__,
                        "own": isinstance(error, innet.ReplayError),
                        "text": str(error),
                        "notes": getattr(error, "__notes__", []),
                        "peak": peak(),
                    }
                    print(json.dumps(call | outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
