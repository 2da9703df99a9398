"""`innet-drl train --actors auto`: the recommendation of a sweep of this machine and these settings, or a rule."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from innet_drl.analysis.sweep import cache
from innet_drl.analysis.sweep.automatic import rule, with_recommendation
from innet_drl.analysis.sweep.machine import Gpu, Machine, this_machine
from innet_drl.analysis.sweep.point import Point
from innet_drl.analysis.sweep.sweep_file import Sweep
from innet_drl.cli import main
from innet_drl.train.flags import parse_train
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores
from innet_drl.train.settings.presets import PRESETS, preset

pytestmark = pytest.mark.slow

MACHINE = Machine("a processor", 8, 4, 1 << 34)
BOTH = ("actors", "environments")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the user's."""
    monkeypatch.setattr(cache, "cache_folder", lambda: tmp_path / "kept")
    return tmp_path / "kept"


def point(actors: int, environments: int, rate: float) -> Point:
    return Point(
        **dict.fromkeys((field.name for field in dataclasses.fields(Point)), 0.0)  # type: ignore[arg-type]
        | {"actors": actors, "threads": cores(), "environments": environments}
        | {"frames_per_s": rate, "updates_per_s": rate, "actor_shares": {}, "learner_shares": {}}
    )


def swept(config: Config) -> Sweep:
    """A finished sweep of this machine."""
    sweep = Sweep(this_machine(config.device), "cartpole", config)
    for each in (point(1, 4, 500.0), point(2, 4, 900.0), point(3, 4, 910.0), point(2, 8, 1000.0)):
        sweep.add(each)
    return sweep


def test_the_recommendation_of_a_kept_sweep(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = preset("cartpole")
    sweep = swept(config)
    path = cache.keep(sweep)
    assert path is not None
    assert path.parent == folder
    with caplog.at_level("INFO"):
        found = with_recommendation(config, BOTH, "cartpole")
    assert found == dataclasses.replace(config, actors=2, environments=8)
    (line,) = caplog.messages
    assert line.startswith(f"--actors auto: 2, with 8 environments each: recommended by the sweep of {sweep.measured}")
    assert f"with 4 points, where it reached 1,000 frames/s on {cores()} of {cores()} hardware threads" in line
    # A number of environments that is given stays; a smaller number of actors is nearly as fast as three.
    given = dataclasses.replace(config, environments=4)
    assert with_recommendation(given, ("actors",), "cartpole") == dataclasses.replace(given, actors=2)


def test_a_later_sweep_adds_its_points() -> None:
    config = preset("cartpole")
    cache.keep(swept(config))
    later = Sweep(this_machine(config.device), "cartpole", config)
    for each in (point(2, 8, 500.0), point(1, 16, 2000.0)):
        later.add(each)
    path = cache.keep(later)
    assert path is not None
    rates = {each.key[::2]: each.frames_per_s for each in Sweep.load(path).points}
    assert rates == {(1, 4): 500.0, (2, 4): 900.0, (3, 4): 910.0, (2, 8): 500.0, (1, 16): 2000.0}
    assert with_recommendation(config, BOTH, "cartpole").environments == 16


def test_other_settings_need_another_sweep(caplog: pytest.LogCaptureFixture) -> None:
    config = preset("cartpole")
    cache.keep(swept(config))
    # They do not change the rates.
    same = dataclasses.replace(config, seed=7, learning_rate=1e-4, steps=5, actors=9, environments=2)
    assert with_recommendation(same, BOTH, "cartpole").actors == 2
    other = dataclasses.replace(config, batch_size=2 * config.batch_size, layers=(8, 9))
    caplog.clear()
    with caplog.at_level("INFO"):
        assert with_recommendation(other, BOTH, "cartpole").environments == other.environments
    (line,) = caplog.messages
    assert "no sweep of these settings was measured on this machine, so a rule applies: " in line
    settings = f"--settings 'layers=[8, 9]' batch_size={other.batch_size}"
    assert f"measure with `innet-drl analyze ratio --preset cartpole {settings}` (about " in line
    caplog.clear()
    with caplog.at_level("INFO"):
        with_recommendation(dataclasses.replace(config, environments=5), ("actors",), "cartpole")
    (line,) = caplog.messages
    assert "has no point with so many environments, so a rule applies" in line
    assert "analyze ratio --preset cartpole --environments 5`" in line


@pytest.mark.parametrize("change", [{"processor": "other"}, {"threads": 9}, {"gpus": (Gpu("A", 80),)}])
def test_other_machines_need_another_sweep(change: dict[str, Any]) -> None:
    config = preset("cartpole")
    other = dataclasses.replace(MACHINE, **change)
    assert cache.file_of(other, config) != cache.file_of(MACHINE, config)
    assert cache.file_of(dataclasses.replace(MACHINE, memory_bytes=1), config) == cache.file_of(MACHINE, config)


def test_other_releases_need_another_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    before = cache.file_of(MACHINE, preset("cartpole"))
    monkeypatch.setattr("innet_drl.__version__", "9.9.9")
    assert cache.file_of(MACHINE, preset("cartpole")) != before


def test_settings_that_change_rates_exist() -> None:
    names = {field.name for field in dataclasses.fields(Config)}
    assert names >= set(cache.SPEED_SETTINGS)
    assert not {"actors", "environments", "seed", "steps"} & set(cache.SPEED_SETTINGS)


def test_without_a_sweep_a_rule_divides_the_threads() -> None:
    config = preset("cartpole")
    gpu = dataclasses.replace(MACHINE, gpus=(Gpu("A", 80),))
    assert rule(config, MACHINE)[0] == 4
    assert rule(config, dataclasses.replace(MACHINE, threads=1))[0] == 1
    assert rule(config, gpu)[0] == 7
    assert rule(dataclasses.replace(config, learners=2), gpu)[0] == 6
    assert rule(dataclasses.replace(config, environment_threads=3), gpu)[0] == 2


def test_a_damaged_sweep_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    config = preset("cartpole")
    path = cache.keep(swept(config))
    assert path is not None
    path.write_text("{")
    with caplog.at_level("INFO"):
        with_recommendation(config, BOTH, "cartpole")
    warning, line = caplog.messages
    assert warning.startswith(f"a kept sweep is ignored: {path} is no file of innet-drl analyze ratio")
    assert "so a rule applies" in line


def test_a_folder_that_cannot_be_written_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("a file in its place")
    assert cache.keep(swept(preset("cartpole"))) is None
    assert "the sweep is not kept for --actors auto" in caplog.text


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_folder() == tmp_path / ".cache/innet-drl/sweeps"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert cache.cache_folder() == tmp_path / "x/innet-drl/sweeps"


def test_flags_and_files_ask_for_it(tmp_path: Path) -> None:
    assert parse_train([]).automatic == ()
    for flags in (["--actors", "auto"], ["--actors=auto"], ["--seed", "3", "--actors", "auto", "--device", "auto"]):
        parsed = parse_train(flags)
        assert parsed.automatic == BOTH
        assert parsed.config.actors == PRESETS["breakout"].actors
    assert parse_train(["--actors", "auto", "--environments", "3"]).automatic == ("actors",)
    file = tmp_path / "settings.yaml"
    file.write_text("actors: auto\nenvironments: 5\n")
    assert parse_train(["--config", str(file)]).automatic == ("actors",)
    parsed = parse_train(["--config", str(file), "--actors", "3"])
    assert (parsed.automatic, parsed.config.actors) == ((), 3)


@pytest.mark.parametrize("value", ["many", "Auto", "auto4", "1.5"])
def test_another_word_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_train(["--actors", value])
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert value in printed
    assert "--actors INT|{auto}" in printed


def test_runs_whose_actors_cannot_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--preset", "cartpole", "--serial", "--actors", "auto", "--out", str(tmp_path / "run")]) == 1
    assert capsys.readouterr().err == ("error: --actors auto: a serial run has one actor: omit --actors or --serial\n")
    flags = ["--replay", "innet://127.0.0.1:1", "--out", str(tmp_path / "run"), "--actors", "auto"]
    assert main(["learner", *flags]) == 1
    assert "the actors of innet-drl learner are on hosts that this one does not know" in capsys.readouterr().err
    assert main(["train", "--launcher=ray", "--actors=auto", "--out", str(tmp_path / "run")]) == 1
    assert "it measures this machine, and with --launcher ray the actors are on others" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_run_has_the_recommended_actors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    changes = {"min_size": 128, "batch_size": 32, "steps": 400, "evaluation_games": 1, "video": False}
    file = tmp_path / "settings.yaml"
    file.write_text(json.dumps(changes | {"actors": "auto"}))
    cache.keep(swept(preset("cartpole", **changes)))
    assert main(["train", "--preset", "cartpole", "--config", str(file), "--out", str(run)]) == 0
    config = Config.load(run / "config.yaml")
    assert (config.actors, config.environments) == (2, 8)
    assert "--actors auto: 2, with 8 environments each: recommended by the sweep of" in capsys.readouterr().out
