"""A log that nobody reads, or whose handler blocks: the server goes on, and ends at a signal."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from full_pipe import full_pipe
from serving import SERVE, until
from steps import VIEW, connect_and_fill, table

import innet_drl as innet


def test_a_server_whose_log_nobody_reads_serves_and_ends(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    with (
        full_pipe() as (_, writer),
        subprocess.Popen([*SERVE, address], stdout=subprocess.PIPE, stderr=writer) as server,
    ):
        assert server.stdout is not None
        assert b" ready on " in server.stdout.readline()
        # A line for each, as many as there are connections in the handshake, and more.
        for _ in range(200):
            innet.connect(address).close()
        server.send_signal(signal.SIGTERM)
        assert server.wait() == 0


def test_the_lines_of_a_slow_reader_come(tmp_path: Path) -> None:
    address = f"unix://{tmp_path}/s"
    with (
        full_pipe() as (reader, writer),
        subprocess.Popen([*SERVE, address], stdout=subprocess.PIPE, stderr=writer) as server,
    ):
        assert server.stdout is not None
        assert b" ready on " in server.stdout.readline()
        innet.connect(address).close()
        read = b""
        while b"connection closed" not in read:
            read += os.read(reader, 1 << 16)
        server.send_signal(signal.SIGTERM)
        while b"stopped" not in read:
            read += os.read(reader, 1 << 16)
        assert server.wait() == 0
    lines = read.replace(bytes(1), b"").decode().splitlines()
    assert "listening" in lines[0]
    assert not any("lost" in line for line in lines)


class Blocking(logging.Handler):
    """Blocks in other threads than the one that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()
        self.waits = threading.Event()
        self.lines: list[str] = []
        self._maker = threading.current_thread()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        if threading.current_thread() is not self._maker:
            self.waits.set()
            self.released.wait()


def test_a_handler_of_python_that_blocks_holds_up_no_connection(tmp_path: Path) -> None:
    handler, logger = Blocking(), logging.getLogger("innet_drl")
    level, propagates = logger.level, logger.propagate
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        with innet.Memory(table()) as memory, memory.serve(f"unix://{tmp_path}/s") as server:
            program = f"from steps import connect_and_fill; connect_and_fill({server.addresses[0]!r})"
            helpers = str(Path(connect_and_fill.__code__.co_filename).parent)
            environment = os.environ | {"PYTHONPATH": os.pathsep.join([helpers, *sys.path])}
            for _ in range(2):
                subprocess.run([sys.executable, "-c", program], env=environment, check=True)
            until(handler.waits.is_set)
            assert len(memory.sample("t", 4, VIEW)["action"]) == 4
            handler.released.set()
            until(lambda: sum("writer opened" in line for line in handler.lines) == 2)
    finally:
        handler.released.set()
        logger.removeHandler(handler)
        logger.setLevel(level)
        assert logger.propagate == propagates
