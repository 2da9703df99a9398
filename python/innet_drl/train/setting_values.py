"""Values of settings: types, and files of settings."""

from __future__ import annotations

import collections.abc
import contextlib
import difflib
import importlib.util
import numbers
import operator
import os
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePath
from typing import Any, Literal, Union, get_args, get_origin

import numpy as np
import yaml

from innet_drl.train.errors import ConfigurationError

_KINDS: dict[Any, tuple[Any, Callable[[Any], Any], str]] = {
    bool: (bool, bool, "true or false"),
    int: (numbers.Integral, int, "an integer"),
    float: (numbers.Real, float, "a number"),
    str: (str, lambda text: text, "text"),
    Path: ((str, Path), Path, "a path"),
    type(None): (type(None), lambda _: None, "none"),
}
"""For each type of a setting: accepted types, the conversion, and the type's name."""


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


def conform(name: str, value: Any, hint: Any) -> Any:
    """Converts a value to its setting's type: a list to a tuple, an integer to a float, text to a path."""
    try:
        return _conform(value, hint)
    except TypeError:
        raise ConfigurationError(
            f"{{{name}}} {{value!r}}: it must be {{kind}}", value=value, kind=_describe(hint)
        ) from None


def _conform(value: Any, hint: Any) -> Any:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        for part in parts[:-1]:
            with contextlib.suppress(TypeError):
                return _conform(value, part)
        return _conform(value, parts[-1])
    if origin is tuple and isinstance(value, tuple | list):
        # The bounds of the setting report a wrong number of parts.
        hints = [parts[0]] * len(value) if parts[-1] is Ellipsis else [*parts, *parts[-1:] * len(value)]
        return tuple(_conform(part, hint) for part, hint in zip(value, hints, strict=False))
    if origin is dict and isinstance(value, Mapping):
        return dict(value)
    if origin is Literal and isinstance(value, bool):
        # YAML reads the words on and off as bools.
        value = "on" if value else "off"
    if (origin is Literal and value in parts) or (origin is collections.abc.Callable and callable(value)):
        return value
    if origin is not None:
        raise TypeError
    takes, convert, _ = _KINDS[hint]
    if not isinstance(value, takes) or (isinstance(value, bool) and hint is not bool):
        raise TypeError
    return convert(value)


def _describe(hint: Any) -> str:
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(part) for part in parts)
    if origin is Literal:
        return "one of " + ", ".join(map(str, parts))
    if origin is collections.abc.Callable:
        return "a function or class"
    if origin is dict:
        return "a mapping of names to values"
    if origin is tuple:
        return f"a list, each {_describe(parts[0])}"
    return _KINDS[hint][2]


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
            return text if is_argument else _of_script(text)
        if isinstance(value, PurePath):
            return str(value)
        if is_argument and lost is not None:
            lost.append(name)
        return import_path(value) if callable(value) else str(value)

    return {name: convert(name, value) for name, value in values.items()}


def import_path(value: Callable[..., Any]) -> str:
    """Returns `module:name` of a function or class, or of the class of another callable.

    A script is `__main__` only while it runs, so that its functions and classes get its importable name, if it has one.
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    return _of_script(f"{named.__module__}:{named.__qualname__}")


def can_be_imported(value: str | Callable[..., Any]) -> bool:
    """Whether other programs can import a function or class by its path."""
    path = _of_script(value) if isinstance(value, str) else import_path(value)
    if isinstance(value, str) or path.startswith("__main__:"):
        return not path.startswith("__main__:")
    try:
        found = operator.attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except (AttributeError, KeyError):
        return False
    return bool(found == value)


def _of_script(path: str) -> str:
    """The import path with the script's name instead of `__main__`, if the script is a file that can be imported."""
    module, _, name = path.partition(":")
    main = sys.modules["__main__"]
    if module != "__main__" or not hasattr(main, name.partition(".")[0]):
        return path
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        # The program is `python -m module`.
        return f"{spec.name}:{name}"
    script = Path(file or "")
    try:
        found = importlib.util.find_spec(script.stem)
        same = found is not None and found.origin is not None and os.path.samefile(found.origin, script)
    except (ImportError, OSError, ValueError):
        same = False
    return f"{script.stem}:{name}" if same else path


def did_you_mean(name: str, known: Iterable[str], *, otherwise: str = "") -> str:
    """Returns the last part of a message about an unknown name: the closest known names, or `otherwise`."""
    close = difflib.get_close_matches(name, list(known), n=2)
    hint = f"did you mean {' or '.join(close)}?" if close else otherwise
    return f": {hint}" if hint else ""
