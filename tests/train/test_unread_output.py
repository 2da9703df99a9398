"""A run whose output nobody reads goes on, and ends at a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from full_pipe import full_pipe
from serving import until


def test_a_run_whose_output_nobody_reads_goes_on_and_ends_with_its_checkpoint(tmp_path: Path) -> None:
    flags = ["--preset", "cartpole", "--steps", "100000000", "--min-size", "200", "--actors", "1", "--no-video"]
    flags += ["--report-seconds", "0.2", "--evaluation-period", "0", "--evaluation-games", "1"]
    command = [sys.executable, "-m", "innet_drl", "train", *flags, "--out", str(tmp_path / "run")]
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
