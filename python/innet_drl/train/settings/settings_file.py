"""Files of settings, YAML or TOML, and values that they can have."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml

from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.importing import import_path, path_in_other_programs


class _Loader(yaml.SafeLoader):
    """Reads `1e-3` as a number, as YAML 1.2 does; in YAML 1.1 it is text. Refuses a key that stands twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Makes the dictionary of a mapping."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise yaml.constructor.ConstructorError(None, None, f"{twice!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Writes the text `1e-3` in quotes, which `_Loader` needs."""


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def read_mapping(path: Path) -> dict[str, Any]:
    """Reads a file of settings: TOML if its name ends in `.toml`, and YAML otherwise."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigurationError(f"the settings {path} cannot be read: {reason}") from None
    try:
        values: Any = tomllib.loads(text) if path.suffix == ".toml" else yaml.load(text, _Loader)
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        kind = "TOML" if path.suffix == ".toml" else "YAML"
        raise ConfigurationError(f"{path} is not {kind}: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path} has no settings, lines such as `learning_rate: 0.001`")
    return values


def write_mapping(path: Path, values: Mapping[str, Any]) -> None:
    """Writes values of `plain` to a YAML file, which `read_mapping` reads."""
    path.write_text(yaml.dump(values, Dumper=_Dumper, sort_keys=False))


def read_value(text: str) -> Any:
    """Reads one value as in a YAML file of settings.

    Raises:
        yaml.YAMLError: It is not YAML.
    """
    return yaml.load(text, _Loader)


def plain(values: Mapping[str, Any], lost: list[str] | None = None) -> dict[str, Any]:
    """Converts values for YAML.

    NumPy's numbers and arrays become numbers and lists. A function or class becomes its import path (`import_path`),
    and any other object its text; `lost` receives the names of arguments (values of mappings) that become text.
    """

    def convert(name: str, value: Any, *, is_argument: bool = False) -> Any:
        if isinstance(value, np.generic | np.ndarray):
            value = value.tolist()
        if isinstance(value, Mapping):
            return {convert(name, key): convert(f"{name}.{key}", part, is_argument=True) for key, part in value.items()}
        if isinstance(value, tuple | list):
            return [convert(name, part, is_argument=is_argument) for part in value]
        if value is None or isinstance(value, bool):
            return value
        # Enum members may be numbers and text.
        for kind in (int, float):
            if isinstance(value, kind):
                return kind(value)
        if isinstance(value, str):
            text = str.__str__(value)
            return text if is_argument else path_in_other_programs(text)
        if isinstance(value, PurePath):
            return str(value)
        if is_argument and lost is not None:
            lost.append(name)
        return import_path(value) if callable(value) else str(value)

    return {name: convert(name, value) for name, value in values.items()}
