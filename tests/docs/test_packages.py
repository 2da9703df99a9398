"""Imports between the packages point one way, and the client needs NumPy alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import innet_drl as innet

PACKAGE = Path(innet.__file__).parent

ALLOWED = {
    "client": {"client"},
    "datasets": {"client", "datasets"},
    "sb3": {"client", "sb3"},
    "torchrl": {"client", "torchrl"},
    "tianshou": {"client", "tianshou"},
    "train": {"client", "datasets", "train"},
    "launch": {"client", "train", "launch"},
    "analysis": {"client", "train", "launch", "analysis"},
    "redis": {"client", "train", "redis"},
    "distributed": {"client", "distributed"},
}
"""Packages that the files of a package may import. `client` is `innet_drl` without its packages."""

UPWARDS = {("train/__init__.py", "innet_drl.launch.start")}
"""`innet_drl.train.run`, the interface of training, starts processes when it is called."""

TRAINING = ("settings", "environments", "losses", "networks", "observe", "learn", "play", "runs")
"""Packages and modules of `train`; each imports those before it alone."""

CLIENT = {
    "__init__",
    "_core",
    "definitions",
    "errors",
    "gradients",
    "index_priorities",
    "ragged",
    "reading",
    "recorder",
    "signals",
    "spaces",
    "structures",
    "torch_batches",
}
"""Files of the client. `cli`, `server_cli` and `__main__` start commands of the other packages."""

THIRD_PARTY = {
    "_core": {"numpy", "torch", "typing_extensions"},
    "definitions": {"numpy"},
    "index_priorities": {"numpy"},
    "ragged": {"numpy", "torch"},
    "reading": {"numpy"},
    "recorder": {"numpy"},
    "torch_batches": {"numpy", "torch"},
}
"""Distributions that files of the client import: `_core` is a stub, read by type checkers alone, `torch_batches`
is imported for `Replay.batches(device=...)`, and `ragged` imports torch for `Ragged.torch`."""


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Absolute names that a file imports, each with whether that happens as soon as the file is imported."""
    tree = ast.parse(path.read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    deferred = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        at_once = id(node) not in deferred
        if isinstance(node, ast.Import):
            yield from ((alias.name, at_once) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from ((f"{node.module}.{alias.name}", at_once) for alias in node.names)


def package_of(name: str) -> str | None:
    """The package of an imported name; `None` for one from elsewhere."""
    parts = name.split(".")
    if parts[0] != "innet_drl":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in ALLOWED else "client"


def files(package: str) -> list[Path]:
    """The files of a package; of the client without the command line."""
    if package != "client":
        return sorted((PACKAGE / package).rglob("*.py"))
    return sorted(path for path in PACKAGE.glob("*.py*") if path.stem in CLIENT and path.suffix in (".py", ".pyi"))


def test_every_file_has_a_package() -> None:
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE}
    assert folders == ALLOWED.keys() - {"client"}
    assert {path.stem for path in PACKAGE.glob("*.py")} == (CLIENT - {"_core"}) | {"cli", "server_cli", "__main__"}


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_packages_import_downwards(package: str) -> None:
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in files(package)
        for name, _ in imports(path)
        if (imported := package_of(name)) is not None and imported not in ALLOWED[package]
        if (str(path.relative_to(PACKAGE)), name) not in UPWARDS
    ]
    assert not wrong


@pytest.mark.parametrize("package", TRAINING)
def test_packages_of_training_import_downwards(package: str) -> None:
    above = TRAINING[TRAINING.index(package) + 1 :]
    module = PACKAGE / f"train/{package}.py"
    found = [module] if module.exists() else files(f"train/{package}")
    assert found
    wrong = [
        f"{path.relative_to(PACKAGE)} imports {name}"
        for path in found
        for name, _ in imports(path)
        if f"{name}.".startswith(tuple(f"innet_drl.train.{other}." for other in above))
    ]
    assert not wrong


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_files_do_not_import_each_other_in_circles(package: str) -> None:
    modules = {".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts): path for path in files(package)}
    arrows: dict[str, set[str]] = {}
    for module, path in modules.items():
        found = {name if name in modules else name.rpartition(".")[0] for name, _ in imports(path)}
        # The stub names the class that a method returns; the core imports its module when it is called.
        arrows[module] = (found & modules.keys()) - {module} if path.suffix == ".py" else set()
    while arrows:
        leaves = {module for module, targets in arrows.items() if not targets & arrows.keys()}
        assert leaves, f"these import each other: {sorted(arrows)}"
        arrows = {module: targets for module, targets in arrows.items() if module not in leaves}


def test_the_client_imports_numpy_alone() -> None:
    known = set(sys.stdlib_module_names) | {"innet_drl"}
    for path in files("client"):
        found = {name.partition(".")[0] for name, _ in imports(path)} - known
        assert found <= THIRD_PARTY.get(path.stem, set()), path


def test_the_command_line_imports_packages_when_a_command_runs() -> None:
    for name in ("cli", "server_cli", "__main__"):
        at_once = {package_of(module) for module, immediate in imports(PACKAGE / f"{name}.py") if immediate}
        assert at_once <= {None, "client"}


def test_training_does_not_depend_on_the_baseline() -> None:
    """They know the interface `ReplayMemory`, and entry points by the scheme of an address."""
    naming = {path for package in ("train", "launch") for path in files(package) if "redis" in path.read_text().lower()}
    assert not naming


def test_the_baseline_takes_what_a_memory_needs_and_no_more() -> None:
    """`MemorySettings`, of `Config` the fields, and neither the actor nor the session."""
    reached = {
        name: re.findall(r"\bconfig\.\w+\(|train\.play|train\.runs", text)
        for name in ("messages.py", "memory.py", "store.py")
        for text in [(PACKAGE / "redis" / name).read_text()]
    }
    assert reached == {"messages.py": [], "memory.py": [], "store.py": []}


def test_importing_the_client_loads_numpy_and_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import innet_drl\n"
        "loaded = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "print(*sorted(loaded))\n"
        "print(*sorted(name for name in sys.modules if name.startswith('innet_drl.')))"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    packages, modules = printed.splitlines()
    assert set(packages.split()) <= {"innet_drl", "numpy"}
    assert modules.split() == [
        "innet_drl._core",
        *(f"innet_drl.{name}" for name in ("definitions", "errors", "ragged", "reading", "recorder", "spaces")),
        "innet_drl.structures",
    ]


def loaded_by(*arguments: str) -> set[str]:
    """Modules that the interpreter has after it ran `innet-drl` with these arguments."""
    code = (
        "import sys; from innet_drl.cli import main; assert main(sys.argv[1:]) == 0\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    ended = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return set(ended.stderr.split())


def loaded_by_numpy() -> set[str]:
    """Modules that the interpreter has after `import numpy`."""
    code = "import sys, numpy; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())


def test_help_and_version_load_little_more_than_numpy() -> None:
    """Modules are counted, and not their time."""
    for flag in ("--help", "--version"):
        added = loaded_by(flag) - loaded_by_numpy()
        assert {name for name in added if name.partition(".")[0] not in sys.stdlib_module_names} == {
            "innet_drl",
            "innet_drl._core",
            "innet_drl.cli",
            "innet_drl.definitions",
            "innet_drl.errors",
            "innet_drl.ragged",
            "innet_drl.reading",
            "innet_drl.recorder",
            "innet_drl.spaces",
            "innet_drl.structures",
        }
        assert len(added) < 20, sorted(added)
