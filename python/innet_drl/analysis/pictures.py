"""Pictures by matplotlib: files, and SVG elements of a page."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from innet_drl.train.errors import ConfigurationError, writing
from innet_drl.train.files import check_output

SETTINGS: dict[Any, object] = {
    "font.size": 8,
    "svg.fonttype": "none",
    # The same picture has the same ids.
    "svg.hashsalt": "innet",
    "axes.spines.top": False,
    "axes.spines.right": False,
}
"""Settings of matplotlib."""
PICTURES = (".svg", ".png", ".pdf")
"""Formats of pictures."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


def check_outputs(json: Path, csv: Path | None, plot: Path | None, *, needs_plot: bool) -> None:
    """Checks the files of a command before it measures: they differ, and can be written.

    Raises:
        ConfigurationError: One cannot, or matplotlib is missing for a picture that is needed.
    """
    check_output("--json", json)
    check_output("--csv", csv)
    check_output("--plot", plot, PICTURES)
    named = [path.resolve() for path in (json, csv, plot) if path is not None]
    if len(set(named)) < len(named):
        raise ConfigurationError("--json, --csv and --plot: each needs a file of its own")
    if needs_plot and not can_draw():
        raise ConfigurationError("--plot: matplotlib is not installed (pip install 'innet-drl[bench]')")


@contextlib.contextmanager
def drawing(path: Path, width: float, height: float, style: dict[Any, object] | None = None) -> Iterator[Any]:
    """Yields a figure of the given size in inches, and writes it at the end.

    Raises:
        RunFolderError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS | (style or {})):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with writing(str(path), "choose another file with --plot"):
            figure.savefig(path, metadata=NO_METADATA if path.suffix == ".svg" else None)


def legend(area: Any, **style: Any) -> None:
    """Draws a legend of all axes of a figure, each label once, below them."""
    labels = [axis.get_legend_handles_labels() for axis in area.axes]
    handles = {label: handle for found in labels for handle, label in zip(*found, strict=True)}
    area.legend(handles.values(), handles, loc="outside lower center", **style)


def svg_of(figure: Any) -> str:
    """Returns a figure as an SVG element."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata=NO_METADATA)
    svg = drawn.getvalue()
    # Tenths of a point: matplotlib's six decimals double the size of a page.
    svg = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), svg)
    return svg[svg.index("<svg") :]
