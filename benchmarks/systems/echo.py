"""echo, a queue of transitions: actors send, and the learner receives batches in the order of arrival.

The server is part of the learner's process and delivers each transition once: it has neither priorities nor repeated
samples nor parameters, and keeps only a few batches. It has no reader here: the learner is a process that receives
each batch and drops it, as fast as transitions are pushed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from typing import Any

import echo
import numpy as np
from numpy.typing import NDArray

from benchmarks import recording
from benchmarks.recording import STACK, STREAMS
from benchmarks.systems import Address, Service, free_port, wait_for

VERSION = f"echo {echo.__version__}"
SWEEP: dict[str, list[dict[str, Any]]] = {
    "Writer": [
        {"max_inflight_msgs": 32},
        {"max_inflight_msgs": 8},
        {"max_inflight_msgs": 256},
        {"server": {"num_drainers": 1}},
        {"server": {"num_drainers": 2}},
        {"server": {"transport_threads": 1}},
        {"server": {"transport_threads": 2}},
        {"server": {"num_drainers": 2, "transport_threads": 2}},
        {"server": {"producer_queue_size": 64}},
        {"server": {"num_buffers": 8}},
    ]
}
PREPARED = 2_000
BATCH = 512
EXAMPLE: dict[str, NDArray[Any]] = {
    "observation": np.zeros((STACK, 84, 84), np.uint8),
    "next_observation": np.zeros((STACK, 84, 84), np.uint8),
    "action": np.zeros(1, np.uint8),
    "reward": np.zeros(1, np.float32),
    "discount": np.zeros(1, np.float32),
}


def serve(capacity: int, **settings: int) -> Service:
    """Starts the learner's process, which ignores `capacity`: it keeps nothing."""
    address = ("127.0.0.1", free_port())
    command = [sys.executable, "-m", "benchmarks.systems.echo", str(address[1]), json.dumps(settings)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    wait_for(address, process)

    def inserted() -> int:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"\n")
        process.stdin.flush()
        taken = process.stdout.readline()
        assert taken, "the learner ended: see its message above"
        return int(taken)

    return Service(address, process, inserted)


class Writer:
    def __init__(self, address: Address, streams: int = STREAMS, max_inflight_msgs: int = 32) -> None:
        transitions = recording.load().stacked(PREPARED)
        columns = {name: transitions[name].reshape(PREPARED, *each.shape) for name, each in EXAMPLE.items()}
        self._transitions = [{name: column[index] for name, column in columns.items()} for index in range(PREPARED)]
        self._next = 0
        self._client = echo.TcpClient(*address, EXAMPLE, max_inflight_msgs)
        self.flush, self.close = self._client.wait, self._client.close

    def push(self, count: int) -> None:
        for _ in range(count):
            self._client.send(self._transitions[self._next])
            self._next = (self._next + 1) % PREPARED


def learn(
    port: int, transport_threads: int = 8, num_buffers: int = 3, num_drainers: int = 8, producer_queue_size: int = 8
) -> None:
    """Receives every batch; for each line of standard input checks the last batch and prints the number received."""
    server = echo.Server(
        EXAMPLE,
        BATCH,
        echo.TcpTransport(port, transport_threads),
        num_buffers=num_buffers,
        num_drainers=num_drainers,
        producer_queue_size=producer_queue_size,
    )
    taken = 0
    last: dict[str, NDArray[Any]] = {}

    def take() -> None:
        nonlocal taken, last
        for sample in server.dataset_iter():
            last = sample.batch
            taken += BATCH

    server.start()
    threading.Thread(target=take, daemon=True).start()
    for _ in sys.stdin:
        # Actors are idle now, so the buffer of the last batch, the last of the ring to be reused, is intact.
        if last:
            recording.load().check({name: column.squeeze() for name, column in last.items()}, BATCH)
        print(taken, flush=True)


if __name__ == "__main__":
    learn(int(sys.argv[1]), **json.loads(sys.argv[2]))
