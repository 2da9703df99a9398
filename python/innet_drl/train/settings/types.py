"""Types of settings, and the messages of wrong ones."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

import innet_drl as innet
from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.importing import Importable, is_path
from innet_drl.train.settings.settings_file import plain

MAX_SEED = 1 << 30
"""Largest seed: evaluations and environments add to it, and Atari seeds have 31 bits."""

MAX_LEARNERS = 64
"""Largest number of workers of a gradient job."""


def named(*names: str) -> AfterValidator:
    """Accepts one of some names, an import path, or a function or class."""

    def check(value: Importable) -> Importable:
        if isinstance(value, str) and value not in names and not is_path(value):
            raise ValueError(f"it must be {', '.join(names)}, or an import path module:name")
        return value

    return AfterValidator(check)


def _address(value: str) -> str:
    if value != "embedded" and "://" not in value:
        raise ValueError("it must be embedded, or an address such as innet://host:7710")
    return value


def _namespace(value: str) -> str:
    if not re.fullmatch("[A-Za-z0-9._-]{0,40}", value):
        raise ValueError("it must be up to 40 ASCII letters, digits, '.', '_' and '-'")
    return value


def _switch(value: Any) -> Any:
    """Turns bools into words: YAML reads the words on and off as bools."""
    return ("off", "on")[value] if isinstance(value, bool) else value


Count = Annotated[int, Field(ge=1, le=2**40)]
Several = Annotated[int, Field(ge=2)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
Few = Annotated[int, Field(ge=0, le=1024)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Minutes = Annotated[float, Field(gt=0, le=1e7)]
Share = Annotated[float, Field(ge=0, le=1)]
Address = Annotated[str, AfterValidator(_address)]
Namespace = Annotated[str, AfterValidator(_namespace)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
KeywordArguments = dict[str, Any]
# Files have lists for tuples, and text for paths.
Converted = Field(strict=False)


class _ClearErrors(type):
    """Turns the errors of pydantic into one line that names the setting."""

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        """Makes the structure.

        Raises:
            ConfigurationError: An unknown setting, or a value of another type or out of range.
        """
        settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
        try:
            return super().__call__(*arguments, **settings)
        except pydantic.ValidationError as error:
            names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
            raise ConfigurationError(message_of(error, settings, names)) from None


_KINDS = {
    "bool_type": "true or false",
    "callable_type": "a function or class",
    "dict_type": "a mapping of names to values",
    "float_type": "a number",
    "int_type": "an integer",
    "is_instance_of": "a path",
    "path_type": "a path",
    "string_type": "text",
    "tuple_type": "a list",
}
"""Kinds of values, by the errors that pydantic has for other ones."""


def message_of(error: pydantic.ValidationError, settings: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """The message of the first wrong setting, of those with `names`; of a union, what each part says."""
    errors: list[Any] = error.errors(include_url=False)
    first = errors[0]
    context = first.get("ctx", {})
    if not first["loc"]:
        return str(context.get("error", first["msg"]))
    name, *parts = first["loc"]
    if isinstance(name, int):
        name = names[name]
    if first["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        return unknown(str(name), names, "innet-drl train --help lists them")
    if first["type"] == "multiple_argument_values":
        return f"{name}: it is given twice"
    if first["type"] == "missing" and not parts:
        return f"{name}: it has to be given"
    errors = [each for each in errors if each["loc"][0] == first["loc"][0]]
    wanted = [_KINDS.get(each["type"]) or each["msg"].removeprefix("Input should be ") for each in errors]
    listed = isinstance(settings.get(str(name)), list | tuple) and parts and isinstance(parts[0], int)
    item = f"item {parts[0] + 1}" if listed else "it"
    if first["type"] in ("missing", "too_long"):
        text = f"it must have {context.get('max_length') or errors[-1]['loc'][1] + 1} items"
    else:
        text = str(context.get("error") or f"{item} must be {' or '.join(dict.fromkeys(wanted))}")
    return f"{name} {settings.get(name, first['input'])!r}: {text}"


def unknown(name: str, names: Sequence[str], otherwise: str) -> str:
    """The message of a setting that does not exist."""
    hint = closest(name, names, otherwise)
    if name == "preset":
        hint = ": a preset is chosen by the flag --preset, or by train.preset(name)"
    return f"there is no setting {name!r} in innet-drl {innet.__version__}{hint}"


CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""How settings are checked when they are made."""


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class Settings(metaclass=_ClearErrors):
    """Base of settings, which do not change."""

    def changed(self, other: Settings, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the settings among `names` that differ between the two configurations."""
        ours, theirs = self.as_dict(), other.as_dict()
        return tuple(name for name in names if ours[name] != theirs[name])

    def as_dict(self, lost: list[str] | None = None) -> dict[str, Any]:
        """Returns every setting as YAML values; `lost` receives names of arguments that cannot be read back."""
        return plain({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, lost)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Immutable, so that deep copies of networks, whose modules refer to the settings, share it.
        return self
