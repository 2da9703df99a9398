"""Expectations: what measured runs of a preset reached, in the last lines of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from places import ROOT

from innet_drl.train.observe import expected
from innet_drl.train.observe.expected import CURVES, Curve, expectation
from innet_drl.train.settings.presets import PRESETS

BREAKOUT = dataclasses.replace(PRESETS["breakout"], minutes=3.0, seed=7, evaluation_games=10, video=False)


def test_what_is_expected_is_on_the_curve(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = Curve("docs/reports/x.md", 3, ((0, 0.0), (10, 8.0), (100, 98.0)))
    monkeypatch.setattr(expected, "CURVES", {"breakout": curve})
    # 15,000 updates in 5 minutes: the other 85,000 take 28.
    assert expectation(BREAKOUT, 15_000, 300.0) == (
        "3 runs with these settings scored 13 after as many updates, and 98 after 100,000: "
        "28 minutes more at this rate (docs/reports/x.md)"
    )
    assert expectation(BREAKOUT, 120_000, 3_000.0) == (
        "3 runs with these settings scored 98 after as many updates (docs/reports/x.md)"
    )


@pytest.mark.parametrize("change", [{"learning_rate": 1e-3}, {"environment": "atari/pong"}, {"n_step": 5}])
def test_nothing_is_expected_of_other_settings(change: dict[str, Any]) -> None:
    assert expectation(BREAKOUT, 5_000, 100.0) is not None
    assert expectation(dataclasses.replace(BREAKOUT, **change), 5_000, 100.0) is None
    assert expectation(BREAKOUT, 0, 100.0) is None


def test_the_curves_are_those_of_reports() -> None:
    assert CURVES
    for name, curve in CURVES.items():
        assert name in PRESETS
        assert (ROOT / curve.report).is_file()
        assert [updates for updates, _ in curve.points] == sorted({updates for updates, _ in curve.points})
