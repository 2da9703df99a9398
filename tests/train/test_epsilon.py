"""The epsilon ladder, its annealing, and the choice of actions."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from innet_drl import train
from innet_drl.cli import main
from innet_drl.train.play.exploration import annealed, choose, epsilon_ladder, unfinished_schedules


def test_the_ladder_is_the_formula_of_the_paper() -> None:
    ladder = epsilon_ladder(8)
    assert ladder.tolist() == pytest.approx([0.4 ** (1 + 7 * i / 7) for i in range(8)])


def test_a_single_environment_has_an_epsilon() -> None:
    (only,) = epsilon_ladder(1)
    assert 0.4**8 < only < 0.4


def test_annealing_falls_from_one_to_the_ladder() -> None:
    ladder = epsilon_ladder(4)
    assert annealed(ladder, 0, 100).tolist() == [1.0] * 4
    assert annealed(ladder, 50, 100).tolist() == pytest.approx(((1 + ladder) / 2).tolist())
    assert annealed(ladder, 100, 100).tolist() == ladder.tolist()
    assert annealed(ladder, 0, 0).tolist() == ladder.tolist()


def test_a_run_shorter_than_its_schedules_is_warned_of() -> None:
    def warned(name: str, **changes: Any) -> list[str]:
        return [str(message) for message in unfinished_schedules(train.preset(name, **changes))]

    (epsilon,) = warned("vector", steps=6000)
    assert epsilon == (
        "epsilon falls over 20,000 steps, and the run ends at 6,000: actors then take 72% random actions, and not "
        "8%; lower epsilon_anneal_steps"
    )
    (rate,) = warned("breakout", steps=1_000_000)
    assert "200,000 updates, and a run of 1,000,000 steps has some 30,938: lower learning_rate_anneal_updates" in rate
    assert len(warned("atari", steps=30_000)) == 2
    assert warned("vector") == warned("vector", steps=20_000) == warned("cartpole") == warned("breakout") == []


@pytest.mark.slow
def test_a_run_is_warned_of_each_start_that_does_not_finish_its_schedules(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = str(tmp_path / "run")

    def warned(*flags: str) -> list[str]:
        short = ["--evaluation-games=1", "--evaluation-period=0", "--no-video"]
        assert main(["train", *short, *flags]) == 0
        # The terminal's width breaks lines.
        printed = " ".join(capfd.readouterr().out.split())
        return re.findall(r"epsilon falls over [\d,]+ steps, and the run ends at [\d,]+.*?; lower [_a-z]+", printed)

    flags = ["--preset=cartpole", "--serial", "--min-size=100", "--epsilon-anneal-steps=600", "--out", run]
    (warning,) = warned(*flags, "--steps=200")
    assert warning.startswith("epsilon falls over 600 steps, and the run ends at 200: ")
    assert warning.endswith("; lower epsilon_anneal_steps")
    # Of the settings in the run's folder and the new flags.
    (warning,) = warned("--resume", run, "--steps=400")
    assert warning.startswith("epsilon falls over 600 steps, and the run ends at 400: ")
    assert warned("--resume", run, "--steps=600") == []


def test_epsilon_zero_is_greedy_and_epsilon_one_is_uniform() -> None:
    random = np.random.default_rng(0)
    q = np.tile(np.array([0.0, 3.0, 1.0], np.float32), (3000, 1))
    assert choose(q, np.zeros(3000), random).tolist() == [1] * 3000
    counts = np.bincount(choose(q, np.ones(3000), random), minlength=3)
    # Five standard deviations of a binomial count.
    assert np.abs(counts - 1000).max() < 5 * np.sqrt(3000 * (1 / 3) * (2 / 3))
