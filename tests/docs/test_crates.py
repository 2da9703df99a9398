"""The files of a crate import each other in one direction, at most three in a circle; types have at most 15 fields."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
CRATES = sorted(path.parent for folder in ("crates", "verify") for path in REPOSITORY.glob(f"{folder}/*/Cargo.toml"))
LARGEST = 3

Module = tuple[str, ...]


def paths(tree: str) -> Iterator[str]:
    """The paths of a `use` tree: `a::{b, c::{d, self}}` has `a::b`, `a::c::d` and `a::c`."""
    before, brace, rest = tree.strip().partition("{")
    if not brace:
        yield re.sub(r"\s+as\s+\w+|::\*$", "", before)
        return
    depth, part = 0, ""
    for letter in rest[: rest.rindex("}")] + ",":
        depth += {"{": 1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            for path in paths(part) if part.strip() else ():
                yield (before + path).removesuffix("::self")
            part = ""
        else:
            part += letter


class Crate:
    """The modules of a crate that have a file of their own, without tests."""

    def __init__(self, root: Path) -> None:
        self.texts: dict[Module, str] = {}
        for file in (root / "src").rglob("*.rs"):
            name = file.relative_to(root / "src").with_suffix("").parts
            if "tests" not in name:
                text = re.split(r"(?m)^#\[cfg\((?:all\()?test", file.read_text())[0]
                text = re.sub(r"//.*", "", text)
                self.texts[() if name in [("lib",), ("main",)] else name[: len(name) - (name[-1] == "mod")]] = text
        self.passed_on = {
            module: {
                path.rsplit("::", 1)[-1]: path for tree in self.trees(text, passed_on=True) for path in paths(tree)
            }
            for module, text in self.texts.items()
        }

    @staticmethod
    def trees(text: str, passed_on: bool) -> list[str]:
        found = re.findall(r"(?m)^\s*(pub(?:\([^)]*\))? )?use ([^;]+);", text)
        return [tree for public, tree in found if bool(public) == passed_on]

    def module_of(self, here: Module, path: str, depth: int = 0) -> Module | None:
        """The module in which the item of a path is; `None` in another crate."""
        names = path.split("::")
        module: Module = ()
        if names[0] == "crate":
            names = names[1:]
        elif names[0] in {"self", "super"}:
            module = here
            while names and names[0] in {"self", "super"}:
                module = module[:-1] if names.pop(0) == "super" else module
        elif (*here, names[0]) in self.texts:
            module = here
        else:
            return None
        while names and (*module, names[0]) in self.texts:
            module = (*module, names.pop(0))
        passed_on = self.passed_on.get(module, {}).get(names[0]) if names else None
        if passed_on and depth < 9:
            return self.module_of(module, passed_on, depth + 1)
        return module if module in self.texts else None

    def imports(self, module: Module) -> set[Module]:
        text = self.texts[module]
        used = {path for tree in self.trees(text, passed_on=False) for path in paths(tree)}
        used |= set(re.findall(r"(?<![\w:])(\w+(?:::\w+)+)", re.sub(r"\buse [^;]+;", "", text)))
        return {found for path in used if (found := self.module_of(module, path)) not in {None, module}}

    def circles(self) -> list[set[Module]]:
        """Sets of modules of which each reaches all others."""
        reached: dict[Module, set[Module]] = {module: self.imports(module) for module in self.texts}
        for between in self.texts:
            for module in self.texts:
                if between in reached[module]:
                    reached[module] |= reached[between]
        return [{other for other in reached[module] if module in reached[other]} for module in self.texts]


@pytest.mark.parametrize("root", CRATES, ids=lambda root: root.name)
def test_few_files_of_a_crate_import_each_other(root: Path) -> None:
    large = [circle for circle in Crate(root).circles() if len(circle) > LARGEST]
    assert not large, sorted("/".join(module) or "lib" for module in large[0])


def test_a_circle_is_found_through_trees_and_what_is_passed_on(tmp_path: Path) -> None:
    for name, text in {
        "lib.rs": "mod a;\nmod b;\npub use b::c::C;\n",
        "a.rs": "use crate::{b::{self, B}, C};\n",
        "b.rs": "pub mod c;\npub struct B;\nfn f() { c::g() }\n",
        "b/c.rs": "pub struct C(super::super::a::A);\n#[cfg(test)]\nmod tests { use crate::none; }\n",
        "d.rs": "use crate::a::A;\n",
    }.items():
        (tmp_path / "src/b").mkdir(parents=True, exist_ok=True)
        (tmp_path / "src" / name).write_text(text)
    crate = Crate(tmp_path)
    assert crate.imports(("a",)) == {("b",), ("b", "c")}
    assert max(crate.circles(), key=len) == {("a",), ("b",), ("b", "c")}


DEFINITIONS = {"GradientsConfig", "ServerConfig", "TableConfig"}


@pytest.mark.parametrize("crate", CRATES, ids=[crate.name for crate in CRATES])
def test_types_have_at_most_fifteen_fields(crate: Path) -> None:
    """All but definitions and settings, which have a field for each name that a user writes."""
    structure = re.compile(r"(?ms)^ *(?:pub(?:\([^)]*\))? )?struct (\w+)[^;{]*\{\n(.*?)^ *\}")
    fields = [
        (name, len(re.findall(r"(?m)^ +(?:pub(?:\([^)]*\))? )?(?:r#)?\w+: ", body)))
        for text in Crate(crate).texts.values()
        for name, body in structure.findall(text)
    ]
    assert [(name, count) for name, count in fields if count > 15 and name not in DEFINITIONS] == []
