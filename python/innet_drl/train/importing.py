"""Import paths of settings: `module:name`, for the user's factories, wrappers, networks and losses."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from innet_drl.train.errors import ConfigurationError
from innet_drl.train.setting_values import did_you_mean, import_path

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


def near_path(value: str) -> str:
    """Returns the last part of a message about an invalid import path: the intended path, such as `grid:Grid`.

    Known mistakes are a file, `grid.py:Grid` or `./grid:Grid`, a dot, `grid.Grid`, and a missing name.
    """
    file, _, given = value.partition(":")
    dotted = file.removeprefix("./").removesuffix(".py").replace("/", ".")
    for module, name in ((dotted, given), dotted.rpartition(".")[::2]):
        if not module or module.partition(".")[0] in sys.stdlib_module_names:
            continue
        try:
            found = vars(import_module(module))
        except Exception:
            continue
        own = [key for key, item in found.items() if callable(item) and getattr(item, "__module__", None) == module]
        public = [key for key in own if not key.startswith("_")]
        names = [name] if name in found else difflib.get_close_matches(name, public, n=1) if name else public
        if names:
            return f": did you mean {' or '.join(f'{module}:{key}' for key in names[:3])}?"
    return ""


def load(value: Importable, setting: str) -> Any:
    """Imports the object of a setting's path `module:name`; functions and classes are returned unchanged."""
    if not isinstance(value, str):
        return value

    def unusable(reason: str) -> ConfigurationError:
        return ConfigurationError(f"{{{setting}}} {{value}}{{reason}}", value=value, reason=reason)

    module, separator, name = value.partition(":")
    if not (separator and module and name):
        raise unusable(": an import path is module:name, such as mypackage.envs:make")
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        hint = near_path(value) or ": install it, or start in the directory that has it"
        raise unusable(f": there is no module {error.name!r}{hint}") from error
    except Exception as error:
        raise unusable(near_path(value) or f": importing {module} raises {type(error).__name__}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part) and module == "__main__":
            raise unusable(
                f": __main__ is the program that runs, and this one has no {name!r}: the script or notebook that "
                "trained defined it. In the run's config.yaml, replace __main__ by the name of a file that defines it "
                f"and can be imported: my_file:{name} for my_file.py"
            )
        if not hasattr(found, part):
            advice = "name a function or class of the module, or give it to Config itself if it is made inside of "
            hint = did_you_mean(part, vars(found), otherwise=f"{advice}another function")
            raise unusable(f": {module} has no {name!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise unusable(f": it is {type(found).__name__}, and has to be a function or class")
    return found
