"""A replay memory of another package, found by the scheme of its addresses: it says itself what it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import small

from innet_drl.launch import start
from innet_drl.train.errors import ConfigurationError, ReplayMemoryError
from innet_drl.train.memory import ServerMemory, memory_class

MODULE = """
from innet_drl.train.errors import ConfigurationError, ReplayMemoryError
from innet_drl.train.memory import EmbeddedMemory


class OwnMemory(EmbeddedMemory):
    @classmethod
    def check(cls, config, token):
        if config.n_step != 1:
            raise ConfigurationError(f"n_step {config.n_step}: it must be 1 in a memory of transitions")
        raise ReplayMemoryError(f"nothing answers at {config.replay}")
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a memory for `own://`."""
    metadata = tmp_path / "own-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[innet_drl.memories]\nown = brought_memory:OwnMemory\n")
    (tmp_path / "brought_memory.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_unknown_scheme_is_left_to_the_client() -> None:
    assert memory_class("own://host:1") is ServerMemory


@pytest.mark.usefixtures("installed")
def test_an_installed_memory_refuses_what_it_does_not_take(tmp_path: Path) -> None:
    assert memory_class("own://host:1").__name__ == "OwnMemory"
    with pytest.raises(ConfigurationError, match="n_step 5: it must be 1 in a memory of transitions"):
        start.train(small(replay="own://host:1"), tmp_path / "run")
    with pytest.raises(ReplayMemoryError, match="nothing answers at own://host:1"):
        start.train(small(replay="own://host:1", n_step=1), tmp_path / "run")
