"""A run that cannot start says so at once: before torch is imported, by the names that the caller wrote."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import own_networks
import pytest
from training import small

import innet_drl as innet
from innet_drl import train
from innet_drl.cli import main
from innet_drl.launch import start
from innet_drl.train.errors import ConfigurationError, RunFolderError, resuming
from innet_drl.train.run_folder import RunFolder

COMMAND = "from innet_drl.cli import main; status = main(sys.argv[1:])"
RUN = """
from innet_drl import train
try:
    train.run(train.preset("cartpole"), callbacks=[print])
except ValueError as error:
    print(error, file=sys.stderr)
"""


def refused(code: str, *arguments: str, **environment: str) -> str:
    """What an interpreter prints that ends without having imported torch."""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nassert 'torch' not in sys.modules", *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("CartPol-v1", "Did you mean: `CartPole`?"),
        ("atari/brekout", "did you mean breakout?"),
        ("nothing_here:make", "environment nothing_here:make: there is no module 'nothing_here'"),
    ],
)
def test_a_misspelt_environment(tmp_path: Path, name: str, message: str) -> None:
    run = tmp_path / "run"
    assert message in refused(COMMAND, "train", "--environment", name, "--out", str(run))
    assert not run.exists()


def test_a_folder_that_holds_a_run(tmp_path: Path) -> None:
    folder = RunFolder.new(tmp_path / "run")
    folder.begin(small())
    assert "holds a run already: continue it with --resume" in refused(COMMAND, "train", "--out", str(folder.path))
    assert "has no checkpoint yet" in refused(COMMAND, "train", "--resume", str(folder.path))


def test_a_server_that_cannot_be_used(tmp_path: Path) -> None:
    with innet.Memory([]) as memory, memory.serve(f"unix://{tmp_path}/replay", token="secret of the tests") as server:
        flags = ("train", "--preset", "cartpole", "--out", str(tmp_path / "run"), "--replay", server.addresses[0])
        assert "token" in refused(COMMAND, *flags, INNET_TOKEN="another secret than this one")
    assert not (tmp_path / "run").exists()


def test_a_callback_that_is_none() -> None:
    assert "callbacks: print is no train.Callback" in refused(RUN)


class Watch(train.Callback):
    """Overrides a method."""

    def on_metrics(self, metrics: train.Metrics) -> None:
        pass


class Misspelt(Watch):
    """Overrides a method that no run calls."""

    def on_metric(self, metrics: train.Metrics) -> None:
        pass


class OfAnotherLibrary(train.Callback):
    """Overrides a method that runs of other libraries call."""

    def on_rollout(self) -> None:
        pass


class WithoutArgument(train.Callback):
    """Overrides a method without its argument."""

    def on_metrics(self) -> None:  # type: ignore[override]
        pass


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([Watch(), Watch], r"Watch is a class: give an object, Watch\(\)"),
        ([print], r"print is no train.Callback: call it in a method of a subclass \(on_start, on_metrics, "),
        ([Misspelt()], "Misspelt has on_metric, which no run calls: did you mean on_metrics"),
        ([OfAnotherLibrary()], "OfAnotherLibrary has on_rollout, which no run calls: "),
        ([WithoutArgument()], r"on_metrics of WithoutArgument has to take \(self, metrics\): too many positional"),
        (Watch(), r"it must be a list, callbacks=\[\.\.\.\], and is Watch"),
    ],
)
def test_callbacks_that_no_run_would_call(tmp_path: Path, callbacks: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=f"^callbacks: {message}"):
        train.run(small(serial=True), callbacks=callbacks, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_name_of_a_preset_is_no_config() -> None:
    preset: Any = "cartpole"
    with pytest.raises(ConfigurationError, match=r"config: it must be a train.Config, and is 'cartpole': train.run\("):
        train.run(preset)
    assert {"Config", "load", "preset", "run"} <= set(dir(train))


def test_a_misspelt_setting_is_told_its_name() -> None:
    wrong: dict[str, Any] = {"learn_rate": 1.0}
    with pytest.raises(ConfigurationError, match=r"no setting 'learn_rate' in .*: did you mean learning_rate"):
        train.Config("CartPole-v1", **wrong)
    with pytest.raises(ConfigurationError, match=r"no setting 'learn_rate' in .*: did you mean learning_rate"):
        dataclasses.replace(small(), **wrong)


def test_messages_name_what_the_caller_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    wrong: Any = "64"
    with pytest.raises(ConfigurationError, match=r"^batch_size '64': it must be an integer$"):
        small(batch_size=wrong)
    assert main(["train", "--preset", "cartpole", "--batch-size", "0"]) == 1
    assert capsys.readouterr().err == "error: batch_size 0: it must be greater than or equal to 1\n"


def test_a_message_says_how_to_continue_a_run() -> None:
    assert resuming("my runs/x") == "--resume 'my runs/x' (in Python resume=True)"
    assert resuming("runs/x", further=True) == "--resume runs/x --steps N (in Python resume=True)"


class Counted(own_networks.Linear):
    """Counts how often it is made."""

    made = 0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        type(self).made += 1


@pytest.mark.parametrize(("serial", "most"), [(True, 2), (False, 1)])
def test_a_network_is_made_for_the_learner_and_the_actor(tmp_path: Path, serial: bool, most: int) -> None:
    class AtStart(train.Callback):
        def on_start(self, config: train.Config, folder: Path) -> None:
            seen.append(Counted.made)

    seen: list[int] = []
    Counted.made = 0
    start.train(small(network=Counted, serial=serial, steps=200), tmp_path / "run", callbacks=[AtStart()])
    assert seen == [most]


@pytest.mark.parametrize(
    "command",
    [
        "--help",
        "--version",
        "train --help",
        "evaluate --help",
        "record --help",
        "analyze --help",
        "analyze ratio --help",
    ],
)
def test_output_without_a_reader_ends_quietly(command: str) -> None:
    """As in `innet-drl train --help | head -1`, after the first line."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "innet_drl", *command.split()], stdout=output, stderr=subprocess.PIPE, text=True
        )
    assert ended.stderr == ""
    assert ended.returncode == 141


@pytest.mark.parametrize("network", ["own_networks.Linear", "own_networks.py:Linear", "./own_networks:Linear"])
def test_the_form_of_a_path_of_a_network_is_named(network: str, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"network .*it must be .*an import path module:name$|a path is module:name, with dots"
    ):
        start.train(small(network=network, serial=True), tmp_path / "run")


@pytest.mark.parametrize("setting", ["replay", "gradients"])
def test_nearly_embedded_is_no_address(setting: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"{setting} 'embeded': it must be embedded, or an address such as"):
        small(**{setting: "embeded"})
    small(**{setting: "innet://embeded"})


INTERRUPTED = """
import os, signal, sys
from innet_drl.cli import main

def interrupt(event, arguments):
    if event == "import" and arguments[0] == "tyro":
        os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(interrupt)
sys.exit(main())
"""


@pytest.mark.parametrize("command", ["train --help", "train --preset cartpole", "evaluate --help"])
def test_ctrl_c_while_a_command_starts_ends_it_quietly(command: str) -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED, *command.split()], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_no_columns_are_an_unknown_number_of_them(tmp_path: Path) -> None:
    flags = ["--preset", "cartpole", "--serial", "--steps", "200", "--evaluation-games", "1", "--out", "run"]
    command = [sys.executable, "-m", "innet_drl", "train", *flags]
    environment = {**os.environ, "COLUMNS": "0", "LINES": "0"}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "everything is in run" in ended.stdout


def test_a_file_in_place_of_a_folder_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "run", file / "runs" / "run"):
        with pytest.raises(
            RunFolderError, match=rf"the run's folder {folder}: {file} is a file: choose another folder"
        ):
            train.run(small(serial=True), folder=folder)
    with pytest.raises(RunFolderError, match=f"{file} is a file: choose another folder"):
        RunFolder.unused(file / "run")
