"""Values of settings: import paths `module:name` for the user's factories, wrappers, networks and losses; and files."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import re
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

import numpy as np
import yaml

from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError

Importable = str | Callable[..., Any]
"""A name, an import path `module:name`, or the function or class itself."""

importing: ContextVar[bool] = ContextVar("importing", default=False)
"""Whether the module of an import path is being imported: it may be a script that would start training."""


def is_path(value: Importable) -> bool:
    """Whether a setting's value is an import path."""
    return isinstance(value, str) and ":" in value


def path_of(value: Importable) -> str:
    """Returns the import path of a function or class; strings are returned unchanged."""
    return value if isinstance(value, str) else import_path(value)


def import_module(name: str) -> ModuleType:
    """Imports the module of an import path."""
    token = importing.set(True)
    try:
        return importlib.import_module(name)
    finally:
        importing.reset(token)


def load(value: Importable, setting: str) -> Any:
    """Imports the object of a setting's path `module:name`; functions and classes are returned unchanged."""
    if not isinstance(value, str):
        return value

    def unusable(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{setting} {value}{reason}")

    module, separator, name = value.partition(":")
    if not (separator and name and all(part.isidentifier() for part in module.split("."))):
        raise unusable(": a path is module:name, with dots for folders, such as mypackage.envs:make")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        advice = (
            "a path is module:name, with dots for folders; install the module, or start in the directory that has it"
        )
        raise unusable(f": there is no module {error.name!r}: {advice}") from error
    except Exception as error:
        raise unusable(f": importing {module} raises {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part) and module == "__main__":
            raise unusable(
                f": __main__ is the program that runs, and this one has no {name!r}: the script or notebook that "
                "trained defined it. In the run's config.yaml, replace __main__ by the name of a file that defines it "
                f"and can be imported: my_file:{name} for my_file.py"
            )
        if not hasattr(found, part):
            advice = "name a function or class of the module, or give it to Config itself if it is made inside of "
            hint = closest(part, vars(found), f"{advice}another function")
            raise unusable(f": {module} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise unusable(f": it is {type(found).__name__}, and has to be a function or class")
    return found


def import_path(value: Callable[..., Any]) -> str:
    """Returns `module:name` of a function or class, or of the class of another callable.

    A script is `__main__` only while it runs, so that its functions and classes get its importable name, if it has one.
    """
    named = value if hasattr(value, "__qualname__") else type(value)
    return path_in_other_programs(f"{named.__module__}:{named.__qualname__}")


def can_be_imported(value: str | Callable[..., Any]) -> bool:
    """Whether other programs can import a function or class by its path."""
    path = path_in_other_programs(value) if isinstance(value, str) else import_path(value)
    if isinstance(value, str) or path.startswith("__main__:"):
        return not path.startswith("__main__:")
    try:
        found = operator.attrgetter(value.__qualname__)(sys.modules[value.__module__])
    except (AttributeError, KeyError):
        return False
    return bool(found == value)


def path_in_other_programs(path: str) -> str:
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
