"""What the tests share: the same replay in this process and behind a server."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias

import pytest
from calls import Lines

import innet_drl as innet

# PyTorch's threads spin while they wait for each other, and where other processes have the cores each small operation
# takes milliseconds. Read when PyTorch is imported, here and in the processes of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Imported before the first test: on a busy machine this alone takes longer than a test may.
with suppress(ImportError):
    import torch  # noqa: F401

# It would be every client's token.
os.environ.pop("INNET_TOKEN", None)

# A shell without job control starts programs in the background with SIGINT ignored, which their children inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Multiplies the time that each test may take by `INNET_PATIENCE`, for machines that are busy."""
    patience = float(os.environ.get("INNET_PATIENCE", 1))
    if patience == 1:
        return
    for item in items:
        own = item.get_closest_marker("timeout")
        seconds = own.args[0] if own else float(config.getini("timeout"))
        item.add_marker(pytest.mark.timeout(patience * seconds), append=False)


@pytest.fixture
def minari_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Minari data sets in a folder of the test."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path_factory.mktemp("minari")))


MakeReplay: TypeAlias = Callable[..., innet.Replay]


@pytest.fixture(params=["process", "unix", "tcp", "spinning"])
def make_replay(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MakeReplay]:
    """Makes a replay with tables: in this process, or the client of a server on a socket."""
    with ExitStack() as stack:

        def make(tables: Sequence[innet.Table] = ()) -> innet.Replay:
            memory = stack.enter_context(innet.Memory(tables if request.param == "process" else ()))
            if request.param == "process":
                return memory
            address = f"unix://{tmp_path}/innet.sock" if request.param == "unix" else "innet://127.0.0.1:0"
            spin = request.param == "spinning"
            server = stack.enter_context(memory.serve(address, spin=spin))
            return stack.enter_context(innet.connect(server.addresses[0], tables=tables, spin=spin))

        yield make


@pytest.fixture
def log() -> Iterator[Lines]:
    # Writers of earlier tests, which exceptions refer to, log when they are dropped.
    gc.collect()
    lines = Lines()
    package = logging.getLogger("innet_drl")
    package.addHandler(lines)
    yield lines
    package.removeHandler(lines)
