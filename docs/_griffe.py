"""Extension of griffe for stubs of compiled classes, which differ from Python classes."""

from typing import Any

import griffe


class Stubs(griffe.Extension):
    """Documents `__new__` as the constructor, and methods that have overloads alone."""

    def on_class_members(self, *, cls: griffe.Class, **_: Any) -> None:
        """Renames `__new__`, and adds each overloaded method with the docstring of its first overload."""
        if isinstance(new := cls.members.get("__new__"), griffe.Function) and "__init__" not in cls.members:
            del cls.members["__new__"]
            new.name = "__init__"
            cls.members["__init__"] = new
        for name, overloads in cls.overloads.items():
            if overloads and name not in cls.members:
                overloads[0].overloads = overloads
                cls.members[name] = overloads[0]
