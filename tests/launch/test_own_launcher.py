"""A launcher of a user's own: `--launcher module:Class`, and `train.run(launcher=...)`."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from subprocess import Popen
from typing import Any, ClassVar

import pytest
from places import HELPERS
from processes import Command
from training import lines, small

from innet_drl import train
from innet_drl.cli import main
from innet_drl.launch.launcher import Ended, Launcher, LocalLauncher
from innet_drl.train.errors import ConfigurationError

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CALLED = Path("called")
"""File to which `Interpreters` writes what it starts."""
KEY = b"only this test's processes"


class Interpreters(Launcher):
    """Starts each process by a command, as a scheduler would, with a socket as its pipe."""

    listen = "innet://127.0.0.1:0"

    def __init__(self) -> None:
        self._processes: dict[str, tuple[Popen[bytes], Connection]] = {}

    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        """Starts an interpreter that connects back, and sends it the function."""
        with CALLED.open("a") as called:
            called.write(f"{name}\n")
        with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
            path = os.pathsep.join([str(HELPERS), *sys.path])
            command = [sys.executable, "-c", "import test_own_launcher as t; t.serve()", str(listener.address[1])]
            process = Popen(command, env=os.environ | {"PYTHONPATH": path})
            pipe = listener.accept()
        pipe.send_bytes(pickle.dumps((main, arguments)))
        self._processes[name] = process, pipe

    def messages(self) -> list[tuple[str, Any]]:
        """Returns the messages since the last call."""
        received: list[tuple[str, Any]] = []
        for name, (process, pipe) in list(self._processes.items()):
            try:
                while pipe.poll():
                    received.append((name, pipe.recv()))
            except (EOFError, ConnectionResetError):
                received.append((name, Ended(process.wait())))
                pipe.close()
                del self._processes[name]
        return received

    def close(self) -> None:
        """Sends SIGTERM to every process, and waits for it."""
        for process, _ in self._processes.values():
            process.terminate()
        for process, pipe in self._processes.values():
            process.wait()
            pipe.close()
        self._processes.clear()
        with CALLED.open("a") as called:
            called.write("closed\n")


def serve() -> None:
    """The main function of the interpreter."""
    multiprocessing.current_process().authkey = KEY
    with Client(("127.0.0.1", int(sys.argv[1])), authkey=KEY) as pipe:
        function, arguments = pickle.loads(pipe.recv_bytes())
        function(*arguments, pipe)


class Recording(LocalLauncher):
    """Notes the names of what is started."""

    started: ClassVar[list[str]] = []

    def start(self, name: str, main: Callable[..., None], *arguments: Any) -> None:
        self.started.append(name)
        super().start(name, main, *arguments)


class Half(Launcher):
    """A launcher that is not complete."""

    def close(self) -> None:
        """Ends nothing."""


def test_processes_of_a_run_are_started_by_a_users_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HELPERS), *sys.path]))
    flags = ["--preset=cartpole", "--environments=4", "--min-size=128", "--batch-size=32", "--layers=32", "--hidden=32"]
    flags += [
        "--steps=1000",
        "--actors=2",
        "--evaluation-period=50",
        "--evaluation-games=3",
        "--no-video",
        "--out=cart",
    ]
    with Command("train", "--launcher=test_own_launcher:Interpreters", *flags, folder=tmp_path) as training:
        assert training.end() == 0
    called = (tmp_path / CALLED).read_text().split("\n")[:-1]
    assert sorted(set(called)) == ["actor 0", "actor 1", "closed", "evaluator"]
    assert called.count("closed") == 2
    assert lines(tmp_path / "cart")[-1]["agent_steps"] >= 1000


def test_a_class_is_taken_as_it_is(tmp_path: Path) -> None:
    result = train.run(small(actors=2), folder=tmp_path / "run", launcher=Recording)
    assert result.agent_steps >= 1000
    assert Recording.started == ["actor 0", "actor 1"]


@pytest.mark.parametrize(
    ("launcher", "message"),
    [
        ("slurm", "launcher slurm: it must be local, ray, or your own launcher as module:name"),
        ("nowhere:Slurm", "launcher nowhere:Slurm: there is no module 'nowhere'"),
        ("test_own_launcher:Interpreter", "test_own_launcher has no 'Interpreter': did you mean Interpreters?"),
        ("test_own_launcher:serve", "it must be a subclass of innet_drl.launch.launcher.Launcher"),
        ("test_own_launcher:Half", "it lacks messages, start of innet_drl.launch.launcher.Launcher"),
    ],
)
def test_unusable_launchers(tmp_path: Path, capsys: pytest.CaptureFixture[str], launcher: str, message: str) -> None:
    out = tmp_path / "run"
    assert main(["train", "--preset=cartpole", f"--launcher={launcher}", f"--out={out}"]) == 1
    assert message in capsys.readouterr().err
    with pytest.raises(ConfigurationError, match="omit it in a serial run"):
        train.run(small(serial=True), folder=out, launcher=launcher)
    assert not out.exists()
