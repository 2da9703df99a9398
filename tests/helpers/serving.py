"""Servers for tests: in this process, and in processes of their own that tests kill, stop and restart."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import innet_drl as innet


@contextmanager
def served_memories(folder: Path, count: int) -> Iterator[str]:
    """Serves `count` memories on Unix sockets; the address names all of them, which are one memory for a client."""
    with ExitStack() as stack:
        addresses = []
        for number in range(count):
            memory = stack.enter_context(innet.Memory())
            addresses += stack.enter_context(memory.serve(f"unix://{folder}/{number}")).addresses
        yield ",".join(addresses)


SERVER_CLI = [sys.executable, "-c", "from innet_drl.server_cli import main; main()"]
"""The command `innet-replay`."""
SERVE = [*SERVER_CLI, "serve", "--listen"]


class Server:
    """`innet-replay serve`, which can be started again at its address.

    Args:
        address: Where it listens.
        flags: Further arguments of the command.
        inside: A command that it is run by.
        log: File of what it logs, from its last start on; by default the log is the test's.
    """

    def __init__(self, address: str, *flags: str, inside: Sequence[str] = (), log: Path | None = None) -> None:
        self.address = address
        self._flags, self._inside, self._log = flags, inside, log
        self.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def start(self) -> None:
        """Starts it, and returns when it listens."""
        command = [*self._inside, *SERVE, self.address, *self._flags]
        # The tokens of the environment are the clients'.
        environment = {name: value for name, value in os.environ.items() if name != "INNET_TOKEN"}
        with ExitStack() as opened:
            log = opened.enter_context(self._log.open("w")) if self._log else None
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        assert self._process.stdout is not None
        ready = self._process.stdout.readline()
        if " ready on " not in ready:
            # It ends, and has printed why.
            self.wait()
            raise AssertionError(f"no server listens at {self.address}: {ready}")
        # With port 0 the system chose one, which the next process gets, too.
        self.address = ready.partition(" ready on ")[2].split()[0]

    def logged(self, *parts: str) -> str:
        """What it has logged since its start, once these words are there: a thread of its own writes it."""
        assert self._log is not None
        log = self._log
        until(lambda: all(part in log.read_text() for part in parts))
        return log.read_text()

    @property
    def pid(self) -> int:
        """Of the newest process."""
        return self._process.pid

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, and waits for the stop that SIGSTOP causes: a thread may run for a while after the call."""
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self.wait()

    def wait(self) -> None:
        """Returns when its process has ended."""
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


def until(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds; the timeout of the test is the bound."""
    while not condition():
        threading.Event().wait(0.01)
