"""A run whose output nobody reads goes on, and ends at a signal; so do the processes that join one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from full_pipe import full_pipe
from serving import Server, until
from training import newest

INNET_DRL = [sys.executable, "-m", "innet_drl"]
SMALL = ["--preset=cartpole", "--steps=100000000", "--min-size=200", "--actors=1", "--no-video"]
SMALL += ["--report-seconds=0.2", "--evaluation-period=0", "--evaluation-games=1"]


def test_a_run_whose_output_nobody_reads_goes_on_and_ends_with_its_checkpoint(tmp_path: Path) -> None:
    command = [*INNET_DRL, "train", *SMALL, "--out", str(tmp_path / "run")]
    metrics = tmp_path / "run/metrics.jsonl"
    with (
        full_pipe() as (_, writer),
        subprocess.Popen(command, stdout=writer, stderr=writer) as run,
    ):
        until(lambda: run.poll() is not None or (metrics.exists() and len(metrics.read_text().splitlines()) > 2))
        assert run.poll() is None
        run.send_signal(signal.SIGTERM)
        run.wait()
    assert list((tmp_path / "run/checkpoints").glob("*.safetensors"))


@pytest.mark.slow
def test_processes_that_join_a_run_go_on_and_end_while_nobody_reads_their_output(tmp_path: Path) -> None:
    with Server(f"unix://{tmp_path}/s") as server, full_pipe() as (_, writer):
        own = {"learner": [*SMALL, "--out", str(tmp_path / "run")], "actor": ["--index=0"]}
        processes = {
            name: subprocess.Popen([*INNET_DRL, name, "--replay", server.address, *flags], stdout=writer, stderr=writer)
            for name, flags in own.items()
        }
        try:

            def trained() -> bool:
                return int(newest(tmp_path / "run").get("learner_updates", 0)) > 10

            until(lambda: trained() or any(process.poll() is not None for process in processes.values()))
            assert [process.poll() for process in processes.values()] == [None, None]
            for process in processes.values():
                process.send_signal(signal.SIGTERM)
                assert process.wait() == -signal.SIGTERM
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    assert list((tmp_path / "run/checkpoints").glob("*.safetensors"))


LOGGING = """
import logging, sys
from innet_drl.train.observe.display import logs_on_console

log = logging.getLogger("innet_drl")
with logs_on_console():
    for number in range(int(sys.argv[1])):
        log.warning("line %d", number)
    open(sys.argv[2], "w").close()
    sys.stdin.read()
    log.warning("the last line")
"""


def test_lost_lines_are_counted(tmp_path: Path) -> None:
    written, logged = 6000, tmp_path / "logged"
    command = [sys.executable, "-c", LOGGING, str(written), str(logged)]
    with (
        full_pipe() as (reader, writer),
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=writer, env=os.environ | {"COLUMNS": "100"}) as process,
    ):
        # There is space for some of the lines.
        read = os.read(reader, 1 << 14)
        until(lambda: logged.exists() or process.poll() is not None)
        while b"line" not in read:
            read += os.read(reader, 1 << 12)
        assert process.stdin is not None
        process.stdin.close()
        while b"the last line\n" not in read:
            read += os.read(reader, 1 << 16)
        assert process.wait() == 0
    text = read.replace(bytes(1), b"").decode()
    numbers = [int(number) for number in re.findall(r"line (\d+)\n", text)]
    (lost,) = map(int, re.findall(r"(\d+) parts of the log are lost: nobody read it\n", text))
    # The oldest ones came, in their order.
    assert numbers == list(range(written - lost))
    assert lost > 1000


def test_lost_lines_are_counted_at_the_end(tmp_path: Path) -> None:
    ending, logged = LOGGING.replace('    log.warning("the last line")\n', ""), tmp_path / "logged"
    with (
        full_pipe() as (reader, writer),
        subprocess.Popen(
            [sys.executable, "-c", ending, "6000", str(logged)], stdin=subprocess.PIPE, stdout=writer
        ) as process,
    ):
        until(lambda: logged.exists() or process.poll() is not None)
        os.read(reader, 1 << 20)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0
        assert re.search(rb"\n\d+ parts of the log are lost: nobody read it\n$", os.read(reader, 1 << 20))
