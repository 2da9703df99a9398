"""Whatever takes long shows how far it is: on the page of a run, beside a command's output, and in a log."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from training import small

from innet_drl import train
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train import environments
from innet_drl.train.learn import numerics
from innet_drl.train.memory import ReplayMemory
from innet_drl.train.observe import display
from innet_drl.train.observe.display import Display
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs.session import file_position

DEADLINE = 60.0


class Watched(Display):
    """Keeps what is shown; `seen` is set at the activity, and its progress, that are waited for."""

    shown: list[tuple[str, str]]

    def __init__(self, title: str = "", awaited: tuple[str, str] = ("", "")) -> None:
        super().__init__(title)
        self.shown = []
        self.awaited = awaited
        self.seen = threading.Event()

    def progress(self, activity: str, done: str) -> None:
        self.shown.append((activity, done))
        if activity == self.awaited[0] and done.startswith(self.awaited[1]):
            self.seen.set()


def test_a_run_shows_its_last_evaluation_and_its_video(tmp_path: Path) -> None:
    watched = Watched()
    config = small(environment="brought:Drawn", serial=True, steps=300, video=True, evaluation_games=4)
    start.train(config, tmp_path / "run", display=lambda _: watched)
    evaluated = [done for activity, done in watched.shown if activity == "evaluation"]
    assert [done.partition(",")[0] for done in evaluated] == sorted(done.partition(",")[0] for done in evaluated)
    assert evaluated[0] == "0 of 4 games, step 1"
    recorded = [done for activity, done in watched.shown if activity == "recording a game"]
    assert recorded[0] == "0 of at most 60 s, score 1"


@pytest.mark.parametrize("method", ["save", "restore"])
def test_a_snapshot_shows_how_many_bytes_are_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """The snapshot waits with an open file until its progress was shown."""
    config = small(steps=300)
    if method == "restore":
        first = start.train(config, tmp_path / "run")
        config = small(steps=first.agent_steps + 100)
    activity = {"save": "saving the replay memory", "restore": "restoring the replay memory"}[method]
    watched = Watched(awaited=(activity, "3 of "))
    original: Callable[[ReplayMemory, Path], None] = getattr(ReplayMemory, method)

    def wait(memory: ReplayMemory, path: Path) -> None:
        file = RunFolder(tmp_path / "run").partial_snapshot if method == "save" else path
        if method == "save":
            file.write_bytes(bytes(3 << 20))
        with file.open("rb") as opened:
            opened.seek(3 << 20)
            assert watched.seen.wait(DEADLINE)
        original(memory, path)

    monkeypatch.setattr(ReplayMemory, method, wait)
    start.train(config, tmp_path / "run", resume=method == "restore", display=lambda _: watched)
    assert watched.seen.is_set()


def test_the_position_of_a_file_is_that_of_this_process(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    assert file_position(path) == 0
    with path.open("rb", buffering=0) as file:
        file.read(40)
        assert file_position(path) == 40
    assert file_position(tmp_path / "missing") == 0


def test_measuring_arithmetic_shows_each_candidate() -> None:
    config = train.preset("breakout", channels=(2, 2, 2), hidden=8, batch_size=4)
    spec = environments.make(config, 1).spec
    shown: list[tuple[str, str]] = []
    numerics.choose_numerics(config, spec, lambda activity, done: shown.append((activity, done)))
    assert {activity for activity, _ in shown} == {"measuring the fastest arithmetic"}
    assert [done.partition(",")[0] for _, done in shown] == [f"{number} of 6" for number in range(1, 7)]


def test_a_log_has_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    now = 100.0
    monkeypatch.setattr("innet_drl.train.observe.display.time.monotonic", lambda: now)
    plain = Display("run")
    monkeypatch.setattr(plain, "print", printed.append)
    for second in range(25):
        now = 100.0 + second
        plain.progress("evaluation", f"{second} of 30 games")
    # After two seconds, and then every ten.
    assert printed == [f"evaluation: {second} of 30 games" for second in (2, 12, 22)]
    plain.progress("recording a game", "0 s")
    assert len(printed) == 3


@pytest.mark.parametrize("command", ["evaluate", "record"])
def test_commands_show_it_beside_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    run = tmp_path / "run"
    train.run(small(environment="brought:Drawn", serial=True, steps=300), folder=run)
    monkeypatch.setattr(display, "PROGRESS_SECONDS", 0.0)
    capsys.readouterr()
    assert main([command, str(run)]) == 0
    output = capsys.readouterr()
    told = {"evaluate": f"evaluation of {run}: 0 of 3 games", "record": "recording a game: "}[command]
    assert told in output.err
    assert told not in output.out
