"""Serial runs: a function of the seed, a falling loss, and resuming with the memory."""

import time
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
from training import lines, small, without_times

from innet_drl.launch import start
from innet_drl.train.errors import RunFolderError
from innet_drl.train.play.evaluation import evaluate
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.runs import evaluation_schedule


def test_two_runs_from_one_seed_are_the_same(tmp_path: Path) -> None:
    for name in ("one", "two"):
        start.train(small(serial=True), tmp_path / name)
    one, two = (without_times(lines(tmp_path / name)) for name in ("one", "two"))
    assert one == two
    assert one[-1]["learner_updates"] > 150
    start.train(small(serial=True, seed=1), tmp_path / "three")
    assert without_times(lines(tmp_path / "three")) != one


def test_the_loss_falls_where_the_target_stands_still(tmp_path: Path) -> None:
    config = small(serial=True, steps=3_000, target_period=100_000, gamma=0.0, clip_rewards=False, learning_rate=1e-3)
    start.train(config, tmp_path / "run")
    losses = [line["td_loss"] for line in lines(tmp_path / "run") if "td_loss" in line]
    assert losses[-1] < 0.2 * losses[0]


def test_evaluations_in_line_are_no_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that is an hour further after each evaluation."""
    clock, evaluated = time.perf_counter, 0

    def evaluate_for_an_hour(*arguments: Any, **settings: Any) -> Any:
        nonlocal evaluated
        evaluated += 1
        return evaluate(*arguments, **settings)

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + 3600.0 * evaluated)
    monkeypatch.setattr(evaluation_schedule, "evaluate", evaluate_for_an_hour)
    result = start.train(small(serial=True, evaluation_period=50, minutes=30), tmp_path / "run")
    assert evaluated > 2
    assert result.agent_steps >= 1_000, "an evaluation took of the minutes"
    assert result.seconds < 3600
    assert max(line["time_s"] for line in lines(tmp_path / "run")) < 3600


def test_a_damaged_checkpoint_is_told_with_its_path(tmp_path: Path) -> None:
    run = tmp_path / "run"
    start.train(small(serial=True, steps=300), run)
    path = RunFolder(run).latest_checkpoint().path
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunFolderError, match=path.name):
        start.train(small(serial=True), run, resume=True)


@pytest.mark.parametrize(
    "changes", [{}, {"environment": "atari/breakout", "stack": 4, "channels": (4, 4, 4)}], ids=["cartpole", "atari"]
)
def test_a_resumed_run_starts_new_games_and_keeps_all_else(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = small(
        serial=True,
        **changes,
        hidden=8,
        min_size=64,
        steps=160,
        batch_size=8,
        samples_per_insert=1.0,
        evaluation_games=1,
        evaluation_frames=100,
    )
    run = tmp_path / "run"
    first = start.train(config, run)
    second = start.train(small(**{**vars(config), "steps": 320}), run, resume=True)
    assert second.agent_steps >= 320
    assert second.learner_updates > first.learner_updates > 0
    resumed = lines(run)[-1]
    # More than it has played since.
    assert resumed["replay_steps"] > second.agent_steps - first.agent_steps
    assert resumed["samples_per_insert"] <= config.samples_per_insert


def test_a_lower_replay_ratio_counts_from_where_the_run_is(tmp_path: Path) -> None:
    first = start.train(small(serial=True), tmp_path / "run")
    lower = small(serial=True, samples_per_insert=1.0, steps=1_400)
    second = start.train(lower, tmp_path / "run", resume=True)
    # Without it the next update came after six times as many steps.
    assert 0 < second.learner_updates - first.learner_updates < 20


def test_checkpoints_are_plain_safetensors(tmp_path: Path) -> None:
    start.train(small(serial=True, steps=300), tmp_path / "run")
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    names = safetensors.torch.load_file(path).keys()
    for prefix in ("model.", "target.", "average.", "optimizer."):
        assert any(name.startswith(prefix) for name in names)
