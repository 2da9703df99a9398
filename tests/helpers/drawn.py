"""The axes of drawn pictures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from innet_drl.analysis import pictures


def keep_axes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets the axes of each picture."""
    kept: list[Any] = []
    drawing = pictures.drawing

    @contextlib.contextmanager
    def keeping(*arguments: Any, **keywords: Any) -> Iterator[Any]:
        with drawing(*arguments, **keywords) as figure:
            yield figure
            kept.extend(figure.axes)

    monkeypatch.setattr(pictures, "drawing", keeping)
    return kept


def check_that_linear_axes_begin_at_zero(axes: list[Any], *labels: str) -> None:
    """Bars that begin elsewhere show 66 beside 77 ms as 1 to 4. `labels` are of some linear axes."""
    seen = set()
    for axis in axes:
        for label, scale, (low, _) in (
            (axis.get_xlabel(), axis.get_xscale(), axis.get_xlim()),
            (axis.get_ylabel(), axis.get_yscale(), axis.get_ylim()),
        ):
            if label in labels:
                assert (scale, low) == ("linear", 0.0), label
                seen.add(label)
            else:
                assert scale == "log" or "logarithmic" not in label, label
    assert seen == set(labels)
