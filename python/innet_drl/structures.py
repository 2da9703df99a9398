"""Structures: nested dictionaries and tuples of arrays, as observations and actions of several parts are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from innet_drl.errors import ConfigError


def map_leaves(function: Callable[..., Any], structure: Any, *others: Any) -> Any:
    """A structure of the function's results for each leaf, given with the leaves in its place in the others."""
    if isinstance(structure, dict):
        named = [named_parts(other, tuple(structure)) for other in others]
        return {name: map_leaves(function, part, *[other[name] for other in named]) for name, part in structure.items()}
    if isinstance(structure, tuple):
        return tuple(map_leaves(function, *parts) for parts in zip(structure, *others, strict=True))
    return function(structure, *others)


def named_parts(value: Any, names: Sequence[str]) -> Any:
    """A dictionary of the parts of a named tuple, such as a graph of Gymnasium, or of lists of those of several.

    A part that is missing is empty. Another value is returned as it is.
    """
    first = value
    while isinstance(first, (list, tuple)) and first and not hasattr(first, "_fields"):
        first = first[0]
    if not hasattr(first, "_fields"):
        return value

    def part(of: Any, name: str) -> Any:
        if not hasattr(of, "_fields"):
            return [part(one, name) for one in of]
        found = getattr(of, name, None)
        return () if found is None else found

    others = [name for name in first._fields if name not in names and getattr(first, name) is not None]
    return {name: part(value, name) for name in (*names, *others)}


def at_index(structure: Any, index: Any) -> Any:
    """The structure of each leaf's elements at an index."""
    return map_leaves(lambda leaf: leaf[index], structure)


def flatten(structure: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """The leaves by the path to them: `observation/camera`."""
    leaves: dict[str, Any] = {}
    for name, part in structure.items():
        if isinstance(part, tuple):
            part = {str(index): inner for index, inner in enumerate(part)}
        if isinstance(part, Mapping):
            leaves |= flatten(part, f"{path}{name}/")
        else:
            leaves[f"{path}{name}"] = part
    return leaves


def unflatten(leaves: Mapping[str, Any], *, tuples: bool = True) -> dict[str, Any]:
    """Dictionaries, and `tuples` where the parts are numbered, of leaves by their paths."""
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf

    def with_tuples(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        parts = {name: with_tuples(part) for name, part in value.items()}
        numbered = tuples and list(parts) == [str(index) for index in range(len(parts))]
        return tuple(parts.values()) if numbered else parts

    return {name: with_tuples(value) for name, value in tree.items()}


def check_part(name: object, whole: str) -> None:
    """Refuses a name that cannot be a part of a column's name.

    Raises:
        ConfigError: It is no text, empty, a number, or has a slash.
    """
    if not isinstance(name, str) or not name or "/" in name or name.isdecimal():
        raise ConfigError(
            f"{whole} has a part {name!r}: a part's name is a text without slashes, and no number; rename it"
        )
