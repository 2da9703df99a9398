"""File systems without locks (Lustre, NFS), without the fsync of folders (FUSE), or slow: by a library before C's."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import SERVE

import innet_drl as innet

SOURCE = Path(__file__).parents[1] / "helpers" / "refusing.c"
COMPILER = shutil.which("cc")

pytestmark = pytest.mark.skipif(COMPILER is None, reason="there is no C compiler")

NO_LOCKS = [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP]

SAVE = """
import logging, sys, innet_drl as innet
logging.basicConfig(format="%(message)s", stream=sys.stdout)
memory = innet.Memory(innet.Table("t", {"x": "int64"}, 100))
for _ in range(2):
    try:
        memory.save(sys.argv[1])
    except innet.errors.StorageError as error:
        print(error)
"""
TRAIN = "import sys; from innet_drl.cli import main; sys.exit(main())"


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("refusing") / "refusing.so"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return library


Run = Callable[..., list[str]]


@pytest.fixture
def run(library: Path) -> Run:
    """Runs a program on a file system that refuses what the variables say; its lines of output."""

    def run(program: str, *arguments: object, **refused: int) -> list[str]:
        environment = os.environ | {name: str(value) for name, value in refused.items()}
        done = subprocess.run(
            [sys.executable, "-c", program, *map(str, arguments)],
            env=environment | {"LD_PRELOAD": str(library)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout.splitlines()

    return run


def restored(path: Path) -> list[str]:
    with innet.Memory() as memory:
        memory.restore(path)
        return list(memory.stats()["tables"])


@pytest.mark.parametrize("number", NO_LOCKS, ids=errno.errorcode.get)
def test_a_save_without_locks_warns_once(run: Run, tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.snapshot"
    (line,) = run(SAVE, path, FLOCK=number)
    assert "cannot be locked" in line
    assert os.strerror(number) in line
    assert restored(path) == ["t"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP], ids=errno.errorcode.get)
def test_a_folder_that_cannot_be_synced_is_no_error(run: Run, tmp_path: Path, number: int) -> None:
    path = tmp_path / "a.snapshot"
    assert run(SAVE, path, FSYNC=number) == []
    assert restored(path) == ["t"]


def test_a_disk_that_fails_keeps_the_file_before(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "a.snapshot"
    path.write_bytes(b"the one before")
    lines = run(SAVE, path, FSYNC=errno.EIO)
    assert len(lines) == 2
    assert all("cannot be written: Input/output error" in line for line in lines)
    assert path.read_bytes() == b"the one before"
    # It fails after the rename.
    for line in run(SAVE, path, FSYNC=errno.EIO, FSYNC_FROM=2)[:1]:
        assert f"{path} is complete and in place" in line
    assert restored(path) == ["t"]
    assert os.listdir(tmp_path) == [path.name]


def test_a_server_saves_without_locks(library: Path, tmp_path: Path) -> None:
    refused = {"LD_PRELOAD": str(library), "FLOCK": str(errno.ENOSYS), "FSYNC": str(errno.EINVAL)}
    command = [*SERVE, f"unix://{tmp_path}/s", "--snapshot", str(tmp_path / "snapshots")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | refused) as server:
        assert server.stdout is not None
        assert b" ready on " in server.stdout.readline()
        server.send_signal(signal.SIGTERM)
        _, log = server.communicate()
    assert server.returncode == 0
    assert log.count(b"cannot be locked (Function not implemented") == 1
    assert [path.suffix for path in (tmp_path / "snapshots").iterdir() if path.name != "lock"] == [".snapshot"]


def test_systemd_hears_that_a_start_and_an_end_go_on_while_the_disk_is_slow(library: Path, tmp_path: Path) -> None:
    held, supervisor = tmp_path / "held", tmp_path / "supervisor"
    os.mkfifo(held)
    environment = os.environ | {"LD_PRELOAD": str(library), "HELD": str(held), "NOTIFY_SOCKET": str(supervisor)}
    command = [*SERVE, f"unix://{tmp_path}/s", "--snapshot", str(tmp_path / "snapshots"), "--snapshot-every=0s"]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told:
        told.bind(str(supervisor))
        told.settimeout(60)

        def hear_until(state: bytes) -> None:
            while state not in told.recv(4096):
                pass

        def hear_of_a_held_disk() -> None:
            """Asks for more time go on; then lets the disk go on, too."""
            for _ in range(3):
                hear_until(b"EXTEND_TIMEOUT_USEC=")
            held.write_bytes(b"")

        # The interval of messages is half of the watchdog's.
        with subprocess.Popen(
            command, stdout=subprocess.DEVNULL, env=environment | {"WATCHDOG_USEC": "100000"}
        ) as server:
            hear_of_a_held_disk()
            hear_until(b"READY=1")
            server.send_signal(signal.SIGTERM)
            hear_until(b"STOPPING=1")
            hear_of_a_held_disk()
    assert server.returncode == 0
    assert (tmp_path / "snapshots" / "0000000001.snapshot").exists()


def test_a_run_saves_without_locks(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    folder = tmp_path / "run"
    flags = ["--preset", "cartpole", "--serial", "--steps", "400", "--min-size", "300", "--evaluation-games", "1"]
    lines = run(TRAIN, "train", *flags, "--no-video", "--out", folder, FLOCK=errno.ENOLCK, FSYNC=errno.EINVAL)
    # Of the run's folder, and of the memory's file.
    assert sum("cannot be locked" in line for line in lines) == 2
    assert list((folder / "checkpoints").iterdir())
    assert restored(folder / "replay.snapshot") == ["apex"]
