"""Columns of the spaces of Gymnasium."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from innet_drl import reading
from innet_drl.errors import ConfigError
from innet_drl.structures import check_part

Settings: TypeAlias = dict[str, Any]
"""Arguments of a `Column`."""


def columns_of_space(name: str, space: Any) -> Iterator[tuple[str, Settings]]:
    """A column of the space's dtype and shape, or one for each part of a space of several parts."""

    def refused(reason: str) -> ConfigError:
        return ConfigError(f'the space of "{name}" {reason}')

    parts = getattr(space, "spaces", None)
    if parts is not None and not len(parts):
        raise refused("has no parts")
    if isinstance(parts, Mapping):
        for part, inner in parts.items():
            check_part(part, f'the space of "{name}"')
            yield from columns_of_space(f"{name}/{part}", inner)
        return
    # A Tuple is a sequence of its parts; a OneOf is not.
    if parts is not None and isinstance(space, Sequence):
        for index, inner in enumerate(parts):
            yield from columns_of_space(f"{name}/{index}", inner)
        return
    if hasattr(space, "node_space"):
        yield f"{name}/nodes", _ragged_column(name, space.node_space)
        if space.edge_space is not None:
            yield f"{name}/edges", _ragged_column(name, space.edge_space)
        yield f"{name}/edge_links", {"dtype": "int32", "shape": (None, 2)}
        return
    if hasattr(space, "feature_space"):
        yield name, _ragged_column(name, space.feature_space)
        return
    dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
    if dtype is not None and reading.numpy_dtype(dtype).kind == "U":
        # A character has up to four bytes.
        most = 4 * (getattr(space, "max_length", None) or 0)
        yield name, {"dtype": "uint8", "shape": (None,), "max_length": most}
    elif dtype is not None and shape is not None:
        yield name, {"dtype": dtype, "shape": shape}
    else:
        raise refused(
            f"is of type {type(space).__name__}, whose values have no fixed dtype and shape: wrap the environment, so "
            "that it returns arrays of one shape (padded, with their length)"
        )


def _ragged_column(name: str, element: Any) -> Settings:
    """The column of sequences of a space's values."""
    columns = [column for _, column in columns_of_space(name, element) if None not in column["shape"]]
    if len(columns) != 1 or getattr(element, "spaces", None) is not None:
        raise ConfigError(
            f'the space of "{name}" has a sequence of values of {type(element).__name__}, and a ragged column has '
            "arrays of one shape: wrap the environment, so that it returns a sequence for each part"
        )
    return {"dtype": columns[0]["dtype"], "shape": (None, *columns[0]["shape"])}
