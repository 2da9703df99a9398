"""The measured systems, one module each, with as many of these parts as the system supports.

| part | meaning |
| --- | --- |
| `serve(capacity, **settings)` | starts the server in a process of its own, for `capacity` transitions |
| `Writer(address, **settings)` | an actor's connection: `push(count)` sends, `flush()` waits for all acknowledgements |
| `READERS[name](address, batch, **settings)` | the learner's side: `sample()` returns a batch as arrays for a network |
| `Store(address)` | parameters: `put(weights)`, `get()` |
| `Tree(items, batch, priorities)` | prioritized indexes alone: `sample()` (indexes), `rewrite(indexes, priorities)` |
| `Memory(batch, items, **settings)` | a replay memory in this process: `push(count)`, `flush()`, `sample()` |
| `Vectors(data, batch)` | prioritized transitions in process: `sample()` (ids, batch), `rewrite(ids, priorities)` |
| `VERSION` | the measured version |
| `SWEEP[part]` | candidate settings of a part; the best are used |

The module of a peer runs in the peer's environment: it imports only NumPy, the standard library, the peer and
`benchmarks.recording`. Redis uses this project's environment and the client of `innet_drl.redis`.
`benchmarks/tasks.py` measures all systems in the same way. A batch is a dict of `observation` and `next_observation`
(uint8 [batch, 4, 84, 84]), `action`, `reward` and `discount`.
"""

from __future__ import annotations

import contextlib
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

_LIBRARIES = ("torchrl", "cpprb", "echo", "machine")
ENVIRONMENTS = {**{peer: peer for peer in ("reverb", "agilerl", "flashbax")}, **dict.fromkeys(_LIBRARIES, "libraries")}
ENVIRONMENTS["queues.transferqueue"] = "transferqueue"
"""Environment of `make bench-peers` by peer; all other systems use the project's own."""

Address = tuple[str, int]


@dataclass
class Service:
    """A server in a process of its own."""

    address: Address
    process: subprocess.Popen[bytes]
    inserted: Callable[[], int]
    """Returns the server's own count of inserted transitions."""

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        self.process.wait()


def free_port(kind: int = socket.SOCK_STREAM) -> int:
    """A free port of this machine, by default for TCP."""
    with socket.socket(socket.AF_INET, kind) as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


def wait_for(address: Address, process: subprocess.Popen[bytes], seconds: float = 60.0) -> None:
    """Waits until the address accepts connections."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        assert process.poll() is None, f"the server for {address} ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"no process listens at {address}")
