"""Extension of griffe: the stubs of compiled classes have `__new__` where Python classes have `__init__`."""

from typing import Any

import griffe


class NewAsInit(griffe.Extension):
    """Documents `__new__` as the constructor."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Renames it."""
        if isinstance(new := cls.members.get("__new__"), griffe.Function) and "__init__" not in cls.members:
            del cls.members["__new__"]
            new.name = "__init__"
            cls.members["__init__"] = new
