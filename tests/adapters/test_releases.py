"""A framework that is missing or too old for its adapter is named, with the command that installs it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("framework", "extra", "old", "needed"),
    [
        ("stable_baselines3", "sb3", "2.6.0", "2.9"),
        ("torchrl", "torchrl", "0.9.1", "0.14"),
        ("tianshou", "tianshou", "1.2.0", "2.0"),
    ],
)
def test_a_missing_or_old_framework_is_named(framework: str, extra: str, old: str, needed: str) -> None:
    for found, error in (
        ("None", f"{framework} is not installed: pip install 'innet-drl[{extra}]'"),
        (
            f"types.SimpleNamespace(__version__={old!r})",
            f"{framework} is {old}, and {needed} is needed: pip install -U",
        ),
    ):
        code = f"import sys, types; sys.modules[{framework!r}] = {found}; import innet_drl.{extra}"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert f"MissingExtraError: {error}" in ended.stderr
