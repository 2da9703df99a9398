"""A program whose daemon threads are in calls of innet_drl when the interpreter ends.

`python ends.py MODE REPEATS CASE...`: the interpreter of a forked child ends in the middle of each case. A line names
each that ended with another status than 0, with output, or not at all. `test_interpreter_end.py` runs it.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import select
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from steps import VIEW, fill, step, table

import innet_drl as innet

HUNG = 20
"""Seconds after which a child that has not ended counts as hung."""

KEPT: list[Any] = []
"""Objects that the interpreter drops at its end."""

TENSORS = {"w": np.ones(1000, np.float32)}


class Link:
    """A relay for a client, which after `freeze` forwards nothing."""

    def __init__(self, server: str, folder: str) -> None:
        kind, _, at = server.partition("://")
        host, _, port = at.rpartition(":")
        self._server = at if kind == "unix" else (host, int(port))
        self._family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
        self._listener = socket.socket(self._family)
        self._listener.bind(f"{folder}/link" if kind == "unix" else (host, 0))
        self._listener.listen()
        name = self._listener.getsockname()
        self.address = f"unix://{name}" if kind == "unix" else f"innet://{host}:{name[1]}"
        self.frozen = threading.Event()
        self.swallowed = threading.Event()
        """A request, or a new connection, has arrived since the link was frozen."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        others: dict[socket.socket, socket.socket] = {}
        while True:
            for ready in select.select([self._listener, *others], [], [])[0]:
                if ready is self._listener:
                    client, server = self._listener.accept()[0], socket.socket(self._family)
                    server.connect(self._server)
                    others |= {client: server, server: client}
                elif part := ready.recv(1 << 16):
                    if self.frozen.is_set():
                        self.swallowed.set()
                    else:
                        others[ready].sendall(part)
                else:
                    others.pop(others.pop(ready)).close()
                    ready.close()


MIX = innet.Mix({"t": 0.5, "empty": 0.5})


def appends(replay: innet.Replay, name: str, *, flush: bool) -> Callable[[], object]:
    writer = replay.writer(name, 1, VIEW, chunk_steps=1)
    KEPT.append(writer)
    steps = count()

    def append() -> None:
        writer.append(**step(next(steps)))
        if flush:
            writer.flush()

    return append


def extends(replay: innet.Replay) -> Callable[[], object]:
    writer = replay.writer("t", 1, VIEW, chunk_steps=7)
    KEPT.append(writer)
    block: dict[str, Any] = {name: np.stack([values] * 20) for name, values in step(0).items()}
    return lambda: writer.extend(**block)


def beta() -> float:
    """A schedule that lets other threads run."""
    for _ in range(1000):
        pass
    return 0.4


def batches(replay: innet.Replay, name: str, **options: Any) -> Callable[[], object]:
    iterator: Iterator[innet.Batch] = replay.batches(name, 4, VIEW, **options)
    KEPT.append(iterator)
    return lambda: next(iterator)


def updates(replay: innet.Replay, *, wait: bool) -> Callable[[], object]:
    ids = replay.sample("t", 4, VIEW).ids
    return lambda: replay.update_priorities("t", ids, np.ones(4), wait=wait)


def open_and_close(address: str | None) -> None:
    with innet.Memory([table()]) if address is None else innet.connect(address) as replay:
        replay.tables()


def trees() -> Callable[[], object]:
    tree, indexes = innet.SumTree(100_000), np.arange(100_000)

    def call() -> None:
        tree.update(indexes, np.ones(100_000))
        tree.sample(10_000)

    return call


def sums(replay: innet.Replay, workers: int) -> Callable[[], object]:
    worker = replay.join_gradients("job", 0, workers, deadline=300)
    KEPT.append(worker)
    values = np.ones(100_000, np.float32)
    return lambda: worker.sum(values)


class Handler(logging.Handler):
    """A log handler in Python, which the server's threads call, too."""

    def emit(self, record: logging.LogRecord) -> None:
        record.getMessage()
        beta()


class Index:
    """An integer whose conversion takes longer than the call that it is for."""

    def __index__(self) -> int:
        for _ in range(100):
            beta()
        return 4


class Shape:
    """A sequence in Python, as the shape of a column."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, at: int) -> int:
        return (operator.index(INDEX),)[at]


Sequence.register(Shape)

INDEX: Any = Index()
SHAPE: Any = Shape()


def refused(call: Callable[..., object], *arguments: Any) -> Callable[[], object]:
    """The call with a keyword that it does not have."""

    def misspelt() -> None:
        with contextlib.suppress(TypeError):
            call(*arguments, stak=1)

    return misspelt


CALLS: dict[str, Callable[[innet.Replay, str | None], Callable[[], object]]] = {
    "append": lambda replay, _: appends(replay, "t", flush=False),
    "flush": lambda replay, _: appends(replay, "t", flush=True),
    "append to a full table": lambda replay, _: appends(replay, "full", flush=False),
    "flush to a full table": lambda replay, _: appends(replay, "full", flush=True),
    "extend": lambda replay, _: extends(replay),
    "episodes": lambda replay, _: lambda: list(replay.episodes("t")),
    "sample": lambda replay, _: lambda: replay.sample("t", 4, VIEW),
    "sample of a mix with an empty table": lambda replay, _: lambda: replay.sample(MIX, 4, VIEW),
    "sample of an empty table": lambda replay, _: lambda: replay.sample("empty", 4, VIEW),
    "next": lambda replay, _: batches(replay, "t"),
    "next with a schedule": lambda replay, _: batches(replay, "t", prefetch=0, beta=beta),
    "next of an empty table": lambda replay, _: batches(replay, "empty"),
    "update_priorities": lambda replay, _: updates(replay, wait=True),
    "update_priorities without waiting": lambda replay, _: updates(replay, wait=False),
    "get_parameters": lambda replay, _: lambda: replay.get_parameters("p"),
    "put_parameters": lambda replay, _: lambda: replay.put_parameters("p", TENSORS),
    "stats": lambda replay, _: replay.stats,
    "open and close": lambda _, address: lambda: open_and_close(address),
    "SumTree": lambda *_: trees(),
    "NStep with a misspelt keyword": lambda *_: refused(innet.NStep),
    "SumTree with a misspelt keyword": lambda *_: refused(innet.SumTree, 10),
    "NStep of an __index__": lambda *_: lambda: innet.NStep(n=INDEX),
    "sample of an __index__": lambda replay, _: lambda: replay.sample("t", INDEX, VIEW),
    "Column of a sequence": lambda *_: lambda: innet.Column("uint8", SHAPE),
    "GradientWorker.sum": lambda replay, _: sums(replay, 1),
    "GradientWorker.sum without the others": lambda replay, _: sums(replay, 2),
}

WAITS = {name for name in CALLS if "full" in name or "empty" in name or "without the" in name}
"""Calls that end only with the interpreter."""

SERVED = {name for name in CALLS if "Gradient" in name}

LOCAL = {name for name in CALLS if name.startswith(("NStep", "SumTree", "Column")) or name == "GradientWorker.sum"}
"""Calls that ask no server, or another one."""

FROZEN = "frozen: "
"""Prefix of a call whose server does not answer."""


def cases(mode: str) -> list[str]:
    calls = [name for name in CALLS if mode != "process" or name not in SERVED]
    frozen = [FROZEN + name for name in calls if name not in WAITS and name not in LOCAL]
    return calls if mode == "process" else calls + frozen


def run(mode: str, case: str, folder: str) -> None:
    """Returns in the middle of the case."""
    # Threads take turns as often as they can.
    sys.setswitchinterval(1e-5)
    log = logging.getLogger("innet_drl")
    log.addHandler(Handler())
    log.propagate = False
    log.setLevel(logging.DEBUG)
    limited = table("full", min_size=5, samples_per_insert=1.0, slack=10.0)
    memory = innet.Memory([table(), limited, table("empty")])
    fill(memory, 100)
    memory.put_parameters("p", TENSORS)
    replay: innet.Replay = memory
    address, link = None, None
    if mode != "process":
        server = memory.serve(
            f"unix://{folder}/server" if mode == "unix" else "innet://127.0.0.1:0", gradients="127.0.0.1:0"
        )
        link = Link(server.addresses[0], folder)
        address = link.address
        replay = innet.connect(address)
        KEPT.extend((server, link, replay))
    KEPT.append(memory)

    name = case.removeprefix(FROZEN)
    call, begun = CALLS[name](replay, address), threading.Semaphore(0)

    def act() -> None:
        while True:
            begun.release()
            call()

    threads = 1 if name in SERVED or "next" in name else 2
    for _ in range(threads):
        threading.Thread(target=act, daemon=True).start()
    for _ in range(threads if name in WAITS else 3 * threads):
        begun.acquire()
    if case.startswith(FROZEN):
        assert link is not None
        link.frozen.set()
        link.swallowed.wait()
    elif "full" in name or "empty" in name:
        counter = "blocked_pushes" if "full" in name else "blocked_samples"
        while not memory.stats()["tables"]["full" if "full" in name else "empty"][counter]:
            time.sleep(0.001)


def ended(child: int, output: Path) -> str:
    """What is wrong with a child's end: nothing, if it is empty."""
    until = time.monotonic() + HUNG
    while not (waited := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > until:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return f"hung {output.read_text()}"
        time.sleep(0.002)
    status = os.waitstatus_to_exitcode(waited[1])
    printed = output.read_text()
    return "" if status == 0 and not printed else f"status {status} {printed}"


def main(mode: str, repeats: int, chosen: list[str]) -> None:
    """Returns in the children, too."""
    for case in chosen or cases(mode):
        for _ in range(repeats):
            folder = tempfile.mkdtemp(prefix="ends-")
            output = Path(folder, "output")
            child = os.fork()
            if not child:
                with output.open("w") as file:
                    os.dup2(file.fileno(), 1)
                    os.dup2(file.fileno(), 2)
                run(mode, case, folder)
                return
            if problem := ended(child, output):
                print(f"{case}: {problem}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
