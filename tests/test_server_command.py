"""`innet-replay` as the wheel brings it: the Rust command line behind a Python function."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import innet_drl as innet
from steps import VIEW, fill, table

COMMAND = [sys.executable, "-c", "from innet_drl.server_cli import main; main()"]


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_it_is_told_to_end(tmp_path: Path, end: signal.Signals) -> None:
    address = f"unix://{tmp_path}/s"
    serve = [*COMMAND, "serve", "--listen", address]
    with subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert f"ready on {address}" in server.stdout.readline()
        with innet.connect(address, tables=[table()]) as replay:
            fill(replay, 20)
            assert len(replay.sample("t", 4, VIEW, timeout=10)) == 4
        server.send_signal(end)
        _, problems = server.communicate(timeout=60)
        assert server.returncode == 0, problems


def test_its_exit_status_is_that_of_the_command() -> None:
    version = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout == f"innet-replay {innet.__version__}\n"
    wrong = subprocess.run([*COMMAND, "serve", "--listen", "http://a"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "http://a" in wrong.stderr
