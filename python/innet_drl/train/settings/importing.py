"""Import paths of settings: `module:name`, for the user's factories, wrappers, networks and losses."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import os
import sys
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

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
