"""The stub of the compiled core says what the core has, and everything public is documented."""

from __future__ import annotations

import ast
import inspect
import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import innet_drl as innet
from innet_drl import _core, errors

STUB = Path(_core.__file__).parent / "_core.pyi"


@pytest.mark.timeout(400)
def test_the_stub_agrees_with_the_core(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    # Torch: one signature names it, and reading all of its types takes a minute.
    (tmp_path / "mypy.ini").write_text("[mypy]\n[mypy-torch.*]\nfollow_imports = skip\n")
    # PyO3 makes a slot of it, which has no name.
    (tmp_path / "allowed").write_text("innet_drl._core.Batch.__getattr__\n")
    stubtest = [sys.executable, "-m", "mypy.stubtest", "innet_drl._core"]
    options = ["--mypy-config-file", "mypy.ini", "--allowlist", "allowed"]
    done = subprocess.run([*stubtest, *options], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def public(names: list[str]) -> list[str]:
    return [name for name in names if not name.startswith("_")]


def test_every_public_name_is_documented() -> None:
    for name in innet.__all__:
        assert hasattr(innet, name), name
        if not name.startswith("_"):
            assert inspect.getdoc(getattr(innet, name)), name
    for name, error in vars(errors).items():
        if isinstance(error, type) and error.__module__ == errors.__name__:
            assert issubclass(error, innet.ReplayError), name
            assert inspect.getdoc(error), name


def test_the_stub_documents_every_class_method_and_property() -> None:
    tree = ast.parse(STUB.read_text())
    undocumented = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not ast.get_docstring(node):
            undocumented.append(node.name)
        if isinstance(node, ast.ClassDef):
            overloaded: set[str] = set()
            for member in node.body:
                if not isinstance(member, ast.FunctionDef) or member.name.startswith("_"):
                    continue
                if not ast.get_docstring(member) and member.name not in overloaded:
                    undocumented.append(f"{node.name}.{member.name}")
                overloaded.add(member.name)
    assert not undocumented


def test_help_shows_the_texts_of_the_stub() -> None:
    """The build compiles them in: `crates/replay_py/build.rs`."""
    for node in ast.parse(STUB.read_text()).body:
        if not isinstance(node, ast.ClassDef | ast.FunctionDef) or node.name.startswith("_"):
            continue
        assert inspect.getdoc(getattr(_core, node.name)) == ast.get_docstring(node), node.name
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and (text := ast.get_docstring(member)):
                compiled = inspect.getattr_static(getattr(_core, node.name), member.name)
                assert inspect.getdoc(compiled) == text, f"{node.name}.{member.name}"
    assert "beta: Importance-sampling exponent" in pydoc.render_doc(innet.Memory.sample)
