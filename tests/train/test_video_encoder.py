"""The encoder of videos is needed by runs that record one, before they train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from training import small

from innet_drl.errors import MissingExtraError
from innet_drl.launch import start


def test_a_run_without_a_video_needs_no_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(MissingExtraError, match="imageio"):
        start.train(small(serial=True, steps=300, video=True), tmp_path / "filmed")
    assert not (tmp_path / "filmed").exists()
    start.train(small(serial=True, steps=300), tmp_path / "run")
    assert (tmp_path / "run" / "evaluation.json").exists()
