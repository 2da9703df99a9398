"""Forks of a process that serves, or that is connected: the children do not keep its sockets."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import Server, until
from steps import table

import innet_drl as innet
from conftest import MakeReplay
from innet_drl import errors

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


@contextlib.contextmanager
def forked_child() -> Iterator[None]:
    """A child that does nothing, as one that steps an environment."""
    fork = multiprocessing.get_context("fork")
    began, end = fork.Event(), fork.Event()

    def wait() -> None:
        began.set()
        end.wait()

    child = fork.Process(target=wait)
    child.start()
    began.wait()
    yield
    end.set()
    child.join()


@pytest.mark.parametrize("address", ["innet://127.0.0.1:0", "unix://{}/s"])
def test_a_closed_server_leaves_nothing_in_a_child(address: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"http": "127.0.0.1:0", "gradients": "127.0.0.1:0"}
    with innet.Memory(table()) as memory:
        server = memory.serve(address.format(tmp_path), **options)
        client = innet.connect(server.addresses[0], reconnect_for=0)
        with forked_child():
            server.close()
            with pytest.raises(errors.ReplayError):
                client.stats()
            with pytest.raises(errors.ConnectError, match=r"refused|No such file"):
                innet.connect(server.addresses[0], timeout=0)
            # The addresses are free.
            assert server.http is not None
            again: dict[str, Any] = {"http": server.http.removeprefix("http://"), "gradients": server.gradients}
            with memory.serve(server.addresses[0], **again) as other, innet.connect(other.addresses[0]) as connected:
                assert connected.table("t") == table()


def test_a_closed_server_leaves_its_snapshot_folder(tmp_path: Path) -> None:
    with innet.Memory(table()) as memory:
        server = memory.serve("innet://127.0.0.1:0", snapshot=tmp_path / "saved")
        with forked_child():
            server.close()
            with memory.serve("innet://127.0.0.1:0", snapshot=tmp_path / "saved"):
                pass


@pytest.mark.parametrize("address", ["innet://127.0.0.1:0", "unix://{}/s"])
def test_a_closed_client_leaves_nothing_in_a_child(address: str, tmp_path: Path) -> None:
    with Server(address.format(tmp_path)) as server, innet.connect(server.address) as watching:
        client = innet.connect(server.address, tables=table())
        with forked_child():
            assert watching.stats()["server"]["connections"] > 1
            client.close()
            until(lambda: watching.stats()["server"]["connections"] == 1)


def test_a_parent_goes_on_with_its_sockets(make_replay: MakeReplay) -> None:
    replay = make_replay([table()])
    for _ in range(3):
        with forked_child():
            assert replay.table("t") == table()
