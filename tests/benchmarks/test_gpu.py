"""`python -m benchmarks gpu` on the processor: every row without a graph."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import gpu
from benchmarks.__main__ import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_updates_and_batches_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu, "UPDATES", {"breakout": gpu.UPDATES["breakout"]})
    monkeypatch.setattr(gpu, "STEPS", 4_000)
    monkeypatch.setattr(gpu, "ROWS", 20_000)
    main(["gpu", "--device", "cpu", "--try", "--json", str(tmp_path / "gpu.json")])
    printed = capsys.readouterr().out
    assert "| breakout | update | float32 | single | 64 |" in printed
    for of in ("stacks, host", "stacks", "copy of stacks", "copy on the device", "256 rows", "1024 rows", "4096 rows"):
        assert f"| {of} | " in printed
    # The end of a training of seconds.
    assert "| time_s | agent_steps |" in printed


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit, match="device cuda"):
        main(["gpu", "--json", str(tmp_path / "gpu.json")])
