"""Training with a server that is killed, stopped or restarted: the page names it, Ctrl-C ends it, work continues."""

from __future__ import annotations

import io
import logging
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from serving import SERVER_CLI, Server, until
from training import lines, small

import innet_drl as innet
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.signals import Interrupted
from innet_drl.train.observe.display import Page
from innet_drl.train.settings.config import Config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(110)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(f"unix://{tmp_path}/s") as serving:
        yield serving


class Shown(io.StringIO):
    """Everything that was printed to the run's terminal."""

    def has(self, *parts: str) -> bool:
        text = self.getvalue()
        return all(part in text for part in parts)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Shown:
    shown = Shown()
    console = Console(file=shown, force_terminal=True, width=160, height=40)
    monkeypatch.setattr("innet_drl.train.observe.display.rich.get_console", lambda: console)
    return shown


def endless(server: Server, **changes: Any) -> Config:
    """A run that something else has to end."""
    return small(steps=None, minutes=30, replay=server.address, report_seconds=0.5, **changes)


def while_training(config: Config, run: Path, act: Callable[[], None]) -> BaseException | None:
    """Trains in the main thread, which signals go to, and acts in another one; returns the error of the training."""
    failed: list[BaseException] = []

    def acting() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=acting)
    thread.start()
    ended: BaseException | None = None
    try:
        start.train(config, run, display=Page, signals=True)
    except Interrupted:
        pass
    except innet.ReplayError as error:
        ended = error
    thread.join()
    if failed:
        raise failed[0]
    return ended


def updates(run: Path) -> int:
    """Updates in the last whole line of metrics."""
    try:
        return int(lines(run)[-1]["learner_updates"])
    except (FileNotFoundError, IndexError, ValueError):
        return 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_page_names_a_server_that_is_away_and_a_signal_ends_the_run(
    server: Server, terminal: Shown, tmp_path: Path, how: signal.Signals
) -> None:
    run = tmp_path / "run"

    def act() -> None:
        until(lambda: updates(run) > 20)
        server.send(how)
        until(lambda: terminal.has(f"waiting for the replay memory at {server.address}"))
        os.kill(os.getpid(), signal.SIGINT)

    # Without the signal it would wait for an hour, and the test has two minutes.
    assert while_training(endless(server, replay_patience=3600), run, act) is None
    server.send(signal.SIGCONT)
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert checkpoint.suffix == ".safetensors"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_run_gives_up_after_its_patience_with_a_checkpoint(
    server: Server, tmp_path: Path, how: signal.Signals
) -> None:
    run = tmp_path / "run"

    def act() -> None:
        until(lambda: updates(run) > 20)
        server.send(how)

    error = while_training(endless(server, replay_patience=1), run, act)
    assert isinstance(error, innet.ReplayError)
    assert server.address in str(error)
    assert list((run / "checkpoints").iterdir())


@pytest.mark.parametrize("roles", [False, True])
def test_a_server_that_comes_back_empty_gets_table_parameters_and_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, roles: bool
) -> None:
    run = tmp_path / "run"
    flags = []
    if roles:
        # The actors may not make the table: it comes from the learner.
        monkeypatch.setenv("INNET_TOKEN", "token of the learners")
        monkeypatch.setenv("INNET_ACTOR_TOKEN", "token of the actors")
        flags = ["--learner-token=token of the learners", "--actor-token=token of the actors"]
    serving = Server(f"unix://{tmp_path}/s", *flags)

    def act() -> None:
        until(lambda: updates(run) > 20)
        serving.kill()
        serving.start()
        reached = updates(run)
        with innet.connect(serving.address) as replay:
            until(lambda: sorted(replay.tables()) == ["run", "run/reports"] and list(replay.parameters()) == ["run"])
        until(lambda: updates(run) > reached + 50)
        os.kill(os.getpid(), signal.SIGINT)

    # No restart of an actor is left, and none is needed.
    with serving:
        assert while_training(endless(serving, actors=2, actor_restarts=0), run, act) is None


def test_a_server_that_comes_back_with_its_memory_is_no_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run, folder = tmp_path / "run", tmp_path / "snapshots"

    def said(part: str) -> list[str]:
        return [record.getMessage() for record in caplog.records if part in record.getMessage()]

    def act() -> None:
        until(lambda: updates(run) > 20)
        subprocess.run([*SERVER_CLI, "snapshot", serving.address], check=True, capture_output=True)
        reached = updates(run)
        # These steps are acknowledged, and lost.
        until(lambda: updates(run) > reached + 50)
        serving.kill()
        serving.start()
        until(lambda: bool(said("was started again: it ")) and bool(said("actor 0 is replaced")))
        reached = updates(run)
        until(lambda: updates(run) > reached + 50)
        os.kill(os.getpid(), signal.SIGINT)

    with Server(f"unix://{tmp_path}/s", f"--snapshot={folder}", "--snapshot-every=0s") as serving:
        # No restart of an actor is left, and none is needed.
        assert while_training(endless(serving, actors=1, actor_restarts=0), run, act) is None
    (restored,) = said("the server of the replay memory was started again: ")
    assert re.search(r": it restored [\d,]+ steps from its snapshot$", restored)
    (replaced, *_) = said("actor 0 is replaced, which is no restart: ")
    assert "it was started again from a snapshot without the last" in replaced
    assert any(re.search(r"with \d+ steps of its snapshot$", line) for line in said(" answers again after "))
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "snapshot restored" in line]
    assert f"{folder}/0000000001.snapshot" in line
    assert re.search(r" tables=2 steps=[1-9]\d* writers=[12] parameters=1 ", line), line


def test_a_signal_during_a_message_of_the_core_ends_the_call(server: Server) -> None:
    class Interrupting(logging.Handler):
        """As a terminal whose Ctrl-C comes while the line is written."""

        def emit(self, record: logging.LogRecord) -> None:
            assert "waiting up to" in record.getMessage()
            signal.raise_signal(signal.SIGINT)

    logger, handler = logging.getLogger("innet_drl"), Interrupting()
    handlers = signal.signal(signal.SIGINT, signal.default_int_handler)
    with innet.connect(server.address, reconnect_for=3600) as memory:
        server.send(signal.SIGKILL)
        logger.addHandler(handler)
        try:
            # The message comes after the first pause.
            with pytest.raises(KeyboardInterrupt):
                memory.stats(timeout=None)
        finally:
            logger.removeHandler(handler)
            signal.signal(signal.SIGINT, handlers)
        # It ends one call, not the next one.
        with pytest.raises(innet.errors.ConnectError):
            memory.stats(timeout=0.1)


def test_a_wrong_address_is_named_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_reached(*_: object) -> None:
        raise AssertionError("arithmetic was measured")

    monkeypatch.setattr("innet_drl.train.runs.trainer.choose_numerics", not_reached)
    run = str(tmp_path / "run")
    assert main(["train", "--preset", "cartpole", "--replay", "innet://no-such-host.invalid:7710", "--out", run]) == 1
    assert "cannot connect to innet://no-such-host.invalid:7710" in capsys.readouterr().err


def test_a_run_that_starts_before_its_server_waits_for_it(terminal: Shown, tmp_path: Path) -> None:
    run, address = tmp_path / "run", f"unix://{tmp_path}/s"
    serving: list[Server] = []

    def act() -> None:
        until(lambda: terminal.has(f"connecting to the replay memory at {address}"))
        serving.append(Server(address))
        until(lambda: updates(run) > 20)
        os.kill(os.getpid(), signal.SIGINT)

    try:
        config = small(steps=None, minutes=30, replay=address, report_seconds=0.5)
        assert while_training(config, run, act) is None
        assert updates(run) > 20
    finally:
        for server in serving:
            server.kill()
