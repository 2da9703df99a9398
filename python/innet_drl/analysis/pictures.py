"""Small SVG files from matplotlib: text as text, one path for neighbours of one style, rounded coordinates."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from innet_drl.train.errors import writing

SVG = "http://www.w3.org/2000/svg"
LINK = "http://www.w3.org/1999/xlink"
SETTINGS: dict[Any, object] = {
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "innet",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
"""Settings of matplotlib. Ticks have no marks, as each mark would be a separate SVG element."""


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextlib.contextmanager
def drawing(path: Path, width: float, height: float, style: dict[Any, object] | None = None) -> Iterator[Any]:
    """Yields a figure of the given size in inches, and writes it at the end, as an SVG file without dates.

    Raises:
        RunFolderError: The file cannot be written.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(SETTINGS | (style or {})):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure
        with writing(str(path), "choose another file with --plot"):
            if path.suffix == ".svg":
                path.write_text(svg_of(figure))
            else:
                figure.savefig(path)


def svg_of(figure: Any) -> str:
    """Returns a figure as lean SVG."""
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg", metadata={"Date": None})
    return lean(drawn.getvalue())


def lean(text: str) -> str:
    """Removes the parts of matplotlib's SVG files that the picture does not need."""
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK)
    root = ElementTree.fromstring(text)
    for metadata in root.findall(f"{{{SVG}}}metadata"):
        root.remove(metadata)
    root.set("font-family", "'DejaVu Sans', sans-serif")
    _shrink(root)
    for element in root.iter():
        element.tail = "\n"
        if len(element):
            element.text = "\n"
    return ElementTree.tostring(root, encoding="unicode").rstrip() + "\n"


def _shrink(element: ElementTree.Element) -> None:
    """Removes groups that only name their content, joins neighbouring paths of one style, and rounds numbers."""
    kept: list[ElementTree.Element] = []
    for child in element:
        _shrink(child)
        named_only = child.tag == f"{{{SVG}}}g" and set(child.attrib) <= {"id"}
        for part in list(child) if named_only else [child]:
            if kept and _style(kept[-1]) == _style(part) is not None:
                kept[-1].set("d", f"{kept[-1].get('d')} {part.get('d')}")
            else:
                kept.append(part)
    element[:] = kept
    for name, value in list(element.items()):
        if name == "style":
            value = re.sub(r"font-family: [^;]+(; )?", "", value)
        elif name not in ("id", f"{{{LINK}}}href", "clip-path"):
            value = re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), value)
        element.set(name, " ".join(value.split()))


def _style(element: ElementTree.Element) -> dict[str, str] | None:
    """Attributes of a path except its points; `None` for other elements and for referenced paths."""
    if element.tag != f"{{{SVG}}}path" or "id" in element.attrib:
        return None
    return {name: value for name, value in element.items() if name != "d"}
