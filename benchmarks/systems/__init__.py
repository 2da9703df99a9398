"""The systems that are measured, one module each, with the same parts as far as the system has them.

| part | meaning |
| --- | --- |
| `serve(capacity, **settings)` | starts the server in a process of its own, with room for `capacity` transitions |
| `Writer(address, **settings)` | an actor's connection: `push(count)` hands over, `flush()` waits until all are there |
| `READERS[name](address, batch, **settings)` | the learner's side: `sample()` gives a batch as arrays for a network |
| `Store(address)` | parameters: `put(weights)`, `get()` |
| `Tree(items, batch, priorities)` | prioritized indexes alone: `sample()` (indexes), `rewrite(indexes, priorities)` |
| `Memory(batch, **settings)` | a replay memory in this process: `push(count)`, `sample()` |
| `VERSION` | the measured version |
| `SWEEP[part]` | the settings that were tried for a part, the best of which is used |

A module of a peer is imported by the Python of the peer's own environment: it imports NumPy, the standard library, the
peer and `benchmarks.recording`, nothing of this project. Redis is in this project's own, with its client of
`innet_drl.papers`. `benchmarks/tasks.py` measures with these parts, the same way
for each system. A batch is a dict of `observation` and `next_observation` (uint8 [batch, 4, 84, 84]), `action`,
`reward` and `discount`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

_LIBRARIES = ("torchrl", "cpprb", "echo", "machine")
ENVIRONMENTS = {"reverb": "reverb", **dict.fromkeys(_LIBRARIES, "libraries")}
"""Which environment of `make bench-peers` a peer is in; a system that is not here is in the project's own."""

Address = tuple[str, int]


@dataclass
class Service:
    """A server in a process of its own."""

    address: Address
    process: subprocess.Popen[bytes]
    inserted: Callable[[], int]
    """Transitions that it took in since it began, as it says itself."""

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.wait()


def free_port() -> int:
    """A free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(address: Address, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Until somebody accepts connections there."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        assert process.poll() is None, f"the server for {address} ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no process listens at {address}")
