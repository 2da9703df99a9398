"""What a run shows elsewhere: TensorBoard's hyperparameters, and Weights & Biases."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from serving import until
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.hparams import api_pb2, list_session_groups
from tensorboard.plugins.hparams.backend_context import Context
from training import BothHavePlayed, lines, small

from innet_drl import train
from innet_drl.cli import main
from innet_drl.train.observe.metrics import values_of


def hyperparameters(logs: Path) -> Any:
    """The rows of TensorBoard's tab of hyperparameters."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(logs))
    multiplexer.Reload()
    context = Context(TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(logs))))
    asked = api_pb2.ListSessionGroupsRequest(slice_size=10, allowed_statuses=range(4))
    return list_session_groups.Handler(RequestContext(), context, "", asked).run().session_groups


def test_tensorboard_has_the_settings_of_a_run_with_its_last_metrics(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    result = train.run(small(serial=True, steps=400), folder=run)
    train.run(small(serial=True, steps=600), folder=run, resume=True)
    (group,) = hyperparameters(tmp_path / "runs")
    assert group.hparams["learning_rate"].number_value == 5e-4
    assert group.hparams["serial"].string_value == "True"
    assert group.hparams["environment"].string_value == "CartPole-v1"
    # Settings of the first session, metrics of the last.
    assert group.hparams["steps"].number_value == 400
    last = lines(run)[-1]
    values = {metric.name.tag: metric.value for metric in group.sessions[0].metric_values}
    assert values["counts/games"] == last["games"]
    assert values["charts/evaluation_return"] == pytest.approx(last["evaluation_mean"])
    assert values["actor_return/0"] == pytest.approx(last["actor_scores/0"])
    assert result.evaluation is not None


def test_metrics_of_a_run_have_lengths_gradients_and_epsilon(tmp_path: Path) -> None:
    config = small(actors=2, environments=2, epsilon_base=0.1, epsilon_exponent=0.0, steps=1_000_000)
    train.run(config, folder=tmp_path / "run", callbacks=[BothHavePlayed()])
    # A line without reports of actors, which the last one may be, has no epsilon.
    played = [line for line in lines(tmp_path / "run") if "td_loss" in line and values_of(line, "actor_steps_per_s")]
    last = played[-1]
    assert last["epsilon"] == pytest.approx(0.1)
    assert last["gradient_norm"] > 0
    # CartPole's score is the number of its steps.
    assert last["length_mean"] == last["return_mean"]
    assert values_of(last, "actor_scores").keys() == {"0", "1"}


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_PROJECT", "tests")


@pytest.mark.usefixtures("offline")
def test_a_resumed_run_goes_on_in_its_run_of_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    flags = ["--preset", "cartpole", "--serial", "--evaluation-games", "2", "--min-size", "300", "--track"]
    assert main(["train", *flags, "--steps", "400", "--out", str(run)]) == 0
    assert "tracked by Weights & Biases: offline in" in capsys.readouterr().out
    known = json.loads((run / "wandb.json").read_text())["id"]
    assert main(["train", "--resume", str(run), "--steps", "500", "--track"]) == 0
    records = sorted(run.glob(f"wandb/offline-run-*-{known}*/run-{known}.wandb"))
    assert len(records) == 2
    assert len(list(run.glob("wandb/offline-run-*"))) == 2
    sent = (b"learning_rate", b"charts/episodic_return", b"charts/evaluation_return")
    for record in records:
        # W&B's process writes it.
        until(lambda record=record: all(name in record.read_bytes() for name in sent))  # type: ignore[misc]


@pytest.mark.usefixtures("offline")
def test_an_error_ends_the_run_of_wandb(tmp_path: Path) -> None:
    import wandb

    class Broken(train.Callback):
        def on_metrics(self, metrics: train.Metrics) -> None:
            raise ZeroDivisionError

    tracked = train.WandbCallback(project="other")
    with pytest.raises(ZeroDivisionError):
        train.run(small(serial=True, steps=400), callbacks=[tracked, Broken()], folder=tmp_path / "run")
    assert wandb.run is None
    (record,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    until(lambda: b"other" in record.read_bytes())


@pytest.mark.usefixtures("offline")
def test_a_tracked_run_that_fails_at_its_start_leaves_no_folder(tmp_path: Path) -> None:
    class Broken(train.Callback):
        def on_start(self, config: train.Config, folder: Path) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train.run(small(serial=True), callbacks=[train.WandbCallback(), Broken()], folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_callback_is_told_of_the_error_that_ends_a_run(tmp_path: Path) -> None:
    told: list[BaseException] = []

    class Broken(train.Callback):
        def on_checkpoint(self, path: Path) -> None:
            raise ZeroDivisionError

        def on_error(self, error: BaseException) -> None:
            told.append(error)

    with pytest.raises(ZeroDivisionError) as raised:
        train.run(small(serial=True, steps=300), callbacks=[Broken()], folder=tmp_path / "run")
    assert told == [raised.value]
    told.clear()
    train.run(small(serial=True, steps=300), callbacks=[train.Callback()], folder=tmp_path / "other")
    assert not told


def test_a_missing_wandb_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert main(["train", "--preset", "cartpole", "--track", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == "error: wandb is not installed: pip install 'innet-drl[wandb]'\n"
    assert not (tmp_path / "run").exists()
