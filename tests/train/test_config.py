"""Settings: presets, the file of a run, and the flags."""

import dataclasses
import enum
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import brought
import numpy as np
import own_networks
import pytest
from calls import Lines

import innet_drl as innet
from innet_drl.cli import main
from innet_drl.train.errors import ConfigurationError, RunFolderError
from innet_drl.train.flags import parse_learner, parse_train
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import PRESETS, Config, read_settings


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_a_preset_survives_its_file(preset: str, tmp_path: Path) -> None:
    PRESETS[preset].save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml") == PRESETS[preset]


class Wind(enum.StrEnum):
    """Text that is a member of an enumeration."""

    STRONG = "strong"


def test_arguments_of_an_environment_survive_the_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "slippery": np.bool_(False),
        "size": np.int64(8),
        "gravity": np.float64(0.5),
        "wind": Wind.STRONG,
        "text": "1e-3",
        "number": 1e-3,
        "grid": np.eye(2, dtype=np.int32),
        "nested": {np.int64(1): (np.float32(1.5), None)},
        "path": Path("map.txt"),
    }
    config = dataclasses.replace(PRESETS["cartpole"], environment="brought:Counter", environment_args=given)
    config.save(tmp_path / "config.yaml")
    assert Config.load(tmp_path / "config.yaml").environment_args == {
        "slippery": False,
        "size": 8,
        "gravity": 0.5,
        "wind": "strong",
        "text": "1e-3",
        "number": 0.001,
        "grid": [[1, 0], [0, 1]],
        "nested": {1: [1.5, None]},
        "path": "map.txt",
    }
    assert not caplog.records


def test_arguments_that_a_file_cannot_have_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = {"length": 5, "locks": [threading.Lock()], "inner": {"make": dict}}
    config = dataclasses.replace(PRESETS["cartpole"], environment=dict, environment_args=given)
    config.save(tmp_path / "config.yaml")
    (record,) = caplog.records
    assert "text instead of environment_args.locks, environment_args.inner.make, and so" in record.getMessage()
    assert Config.load(tmp_path / "config.yaml").environment_args["length"] == 5


@pytest.mark.parametrize(
    ("flags", "gpu", "actors"),
    [
        ([], False, 4),
        ([], True, 6),
        (["--learners", "2"], True, 4),
        (["--device", "cpu"], True, 4),
        (["--environment-threads", "3"], True, 2),
        (["--actor-threads", "9"], False, 1),
    ],
)
def test_actors_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], gpu: bool, actors: int
) -> None:
    monkeypatch.setattr("innet_drl.train.flags.cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    file = tmp_path / "settings.yaml"
    file.write_text("actors: auto\nenvironments: 5\n")
    assert parse_train(["--preset=cartpole", "--actors=auto", *flags]).config.actors == actors
    config = parse_train(["--preset=cartpole", "--config", str(file), *flags]).config
    assert (config.actors, config.environments) == (actors, 5)
    assert parse_train(["--config", str(file), "--actors", "3", *flags]).config.actors == 3


def test_presets_for_a_gpu_have_the_actors_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("innet_drl.train.flags.cores", lambda: 16)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert parse_train(["--preset=breakout-gpu"]).config.actors == 14
    assert parse_train(["--preset=atari-gpu", "--actors", "3"]).config.actors == 3
    assert parse_train(["--preset=atari-gpu", "--serial"]).config.actors == 8
    assert parse_train(["--preset=breakout"]).config.actors == 1


@pytest.mark.parametrize("value", ["many", "Auto", "auto4", "1.5"])
def test_another_number_of_actors_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        parse_train(["--actors", value])
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    assert value in printed
    assert "--actors INT|{auto}" in printed


def test_runs_whose_actors_cannot_be_chosen() -> None:
    auto = ["--preset", "cartpole", "--actors", "auto"]
    with pytest.raises(ConfigurationError, match="a serial run has one actor: omit --actors or --serial"):
        parse_train([*auto, "--serial"])
    with pytest.raises(ConfigurationError, match="actors with --launcher ray are on other machines: give their number"):
        parse_train([*auto, "--launcher", "ray"])
    with pytest.raises(ConfigurationError, match="actors of innet-drl learner are on other machines: give their"):
        parse_learner([*auto, "--replay", "innet://127.0.0.1:1", "--out", "run"])


def test_a_number_of_an_argument_is_read_as_in_a_file() -> None:
    flags = parse_train(["--environment", "brought:Counter", "--environment-args", "rate=1e-3", "name=a-3", "on=true"])
    assert flags.config.environment_args == {"rate": 0.001, "name": "a-3", "on": True}


def test_settings_are_compared_with_those_of_a_file(tmp_path: Path) -> None:
    """Functions, classes and NumPy's numbers are as their file has them."""
    given: dict[str, Any] = {
        "environment": brought.Counter,
        "network": own_networks.Linear,
        "loss": own_networks.squared,
    }
    config = dataclasses.replace(PRESETS["cartpole"], **given, environment_args={"images": np.bool_(False)})
    config.save(tmp_path / "config.yaml")
    saved = Config.load(tmp_path / "config.yaml")
    names = ["environment", "environment_args", "network", "loss", "layers", "seed"]
    assert config.changed(saved, names) == ()
    other = dataclasses.replace(config, environment=brought.Sampler, seed=3)
    assert other.changed(saved, names) == ("environment", "seed")


@pytest.mark.parametrize("help_flag", ["--help", "--help-all"])
def test_every_field_is_in_the_help(capsys: pytest.CaptureFixture[str], help_flag: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_train(["--preset", "cartpole", help_flag])
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    for field in dataclasses.fields(Config):
        assert f"--{field.name.replace('_', '-')}" in printed
    for flag in ("--preset", "--out", "--resume", "--config", "--launcher", "--track"):
        assert flag in printed


def test_the_short_help_begins_with_ten_flags_and_the_preset_s_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_train(["--preset", "cartpole", "-h"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 60
    assert max(map(len, lines)) <= 120
    explained = [line for line in lines if line.startswith("  --")]
    assert len(explained) == 10
    assert "(CartPole-v1)" in explained[1]
    shown = re.findall(r"--([a-z-]+)", "\n".join(lines[lines.index("  Environment") :]))
    assert {field.name.replace("_", "-") for field in dataclasses.fields(Config)} <= set(shown)


def test_flags_change_the_preset() -> None:
    flags = parse_train(
        [
            "--preset",
            "cartpole",
            "--learning-rate",
            "0.01",
            "--layers",
            "32",
            "16",
            "--serial",
            "--minutes",
            "2",
        ]
    )
    assert flags.config == dataclasses.replace(
        PRESETS["cartpole"], learning_rate=0.01, layers=(32, 16), serial=True, minutes=2.0
    )


def test_breakout_is_the_default() -> None:
    assert parse_train([]).config == PRESETS["breakout"]


def test_a_resumed_run_keeps_its_settings_but_for_the_flags(tmp_path: Path) -> None:
    own = dataclasses.replace(PRESETS["cartpole"], seed=7, gamma=0.9)
    RunFolder.new(tmp_path / "run").begin(own)
    flags = parse_train(["--resume", str(tmp_path / "run"), "--steps", "99"])
    assert flags.config == dataclasses.replace(own, steps=99)


def test_resume_and_out_contradict_each_other(tmp_path: Path) -> None:
    RunFolder.new(tmp_path / "run").begin(PRESETS["cartpole"])
    with pytest.raises(ConfigurationError) as refused:
        parse_train(["--resume", str(tmp_path / "run"), "--out", "elsewhere"])
    assert "omit --out" in str(refused.value)


def test_resume_and_preset_contradict_each_other(tmp_path: Path) -> None:
    RunFolder.new(tmp_path / "run").begin(PRESETS["cartpole"])
    with pytest.raises(ConfigurationError, match="--preset"):
        parse_train(["--resume", str(tmp_path / "run"), "--preset", "cartpole"])


def test_a_serial_run_explores_as_one_actor() -> None:
    paper = dataclasses.replace(PRESETS["breakout-paper"], serial=True)
    assert paper.playing_actors == 1
    assert paper.all_environments == paper.environments


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"config\.yaml"):
        parse_train(["--resume", str(tmp_path)])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"gamma": 1.5}, "gamma 1.5: it must be less than or equal to 1"),
        ({"batch_size": 0}, "batch_size 0: it must be greater than or equal to 1"),
        ({"learning_rate": 0.0}, "learning_rate 0.0: it must be greater than 0"),
        ({"replay_patience": 1e19}, r"replay_patience 1e\+19: it must be less than or equal to 1000000000"),
        ({"report_seconds": 1e300}, r"report_seconds 1e\+300: it must be less than or equal to 1000000000"),
        ({"prefetch": 2**31}, "prefetch 2147483648: it must be less than or equal to 1024"),
        ({"actors": 2**63}, r"actors 9223372036854775808: it must be less than or equal to 1099511627776"),
        ({"min_size": 500_000}, "below the capacity"),
        ({"minutes": -1.0}, "minutes -1.0"),
        ({"seed": -1}, "seed -1: it must be greater than or equal to 0"),
        ({"stack": 1}, "stack 1: it must be at least 2 in Atari games"),
        ({"prefetch": -1}, "prefetch -1: it must be greater than or equal to 0"),
        ({"learner_threads": -1}, "learner_threads -1: it must be greater than or equal to 0"),
        ({"evaluation_period": -1}, "evaluation_period -1: it must be greater than or equal to 0"),
        ({"environment_timeout": 0.5}, "environment_timeout 0.5: it must be greater than or equal to 2"),
        ({"actor_restarts": -1}, "actor_restarts -1: it must be greater than or equal to 0"),
        ({"average_decay": 0.0}, "publish 'average': it must be newest without an average"),
        ({"epsilon_anneal_steps": -1}, "epsilon_anneal_steps -1: it must be greater than or equal to 0"),
        ({"checkpoint_minutes": 0.0}, "checkpoint_minutes 0.0: it must be greater than 0"),
        ({"value_range": (-10.0, np.inf)}, r"value_range \(-10.0, inf\): item 2 must be a finite number"),
        ({"max_bytes": 0}, "max_bytes 0: it must be greater than or equal to 1"),
        ({"layers": (32, 0)}, r"layers \(32, 0\): item 2 must be greater than or equal to 1"),
        ({"channels": (16, 0, 32)}, r"channels \(16, 0, 32\): item 2 must be greater than or equal to 1"),
        ({"target_return": float("nan")}, "target_return nan: it must be a finite number"),
        ({"learning_rate": float("inf")}, "learning_rate inf: it must be a finite number"),
        ({"quantiles": 1}, "quantiles 1: it must be greater than or equal to 2"),
        ({"channels": (16, 32)}, r"channels \(16, 32\): it must have 3 items"),
    ],
)
def test_a_setting_that_makes_no_sense_is_refused(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        dataclasses.replace(PRESETS["breakout"], **flags)


def test_settings_may_be_at_their_limits() -> None:
    limits = {"prefetch": 0, "learner_threads": 0, "evaluation_period": 0, "actor_restarts": 0, "layers": ()}
    dataclasses.replace(PRESETS["breakout"], **limits)  # type: ignore[arg-type]


def test_words_that_yaml_takes_for_bools_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    for written, read in (("on", "on"), ("off", "off"), ("'on'", "on")):
        file.write_text(f"environment: CartPole-v1\ntargets_ahead: {written}\n")
        assert Config.load(file).targets_ahead == read


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("gamma: [", "not YAML"),
        ("gamma: 0.9\nseed: 1\ngamma: 0.8", "is not YAML: 'gamma' stands twice"),
        ("environment_args: {size: 1, size: 2}", "is not YAML: 'size' stands twice"),
        ("channels: 3", "channels 3: it must be a list"),
        ("layers:", "layers None: it must be a list"),
        ("replay_ca: 3", "replay_ca 3: it must be a path"),
        ("gamma: high", "gamma 'high': it must be a number"),
        ("device: tpu", "device 'tpu': it must be 'auto', 'cpu' or 'cuda'"),
        ("serial: 1", "serial 1: it must be true or false"),
        ("channels: [1, 2]", r"channels \[1, 2\]: it must have 3 items"),
        # Of a newer release: its networks.
        (
            "network: rnn",
            r"config.yaml: network 'rnn': it must be auto, .*; correct it, or install the release that wrote",
        ),
    ],
)
def test_a_damaged_file_is_refused(content: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"environment: CartPole-v1\n{content}\n")
    with pytest.raises(ConfigurationError, match=reason):
        Config.load(tmp_path / "config.yaml")


def test_settings_of_another_release_are_left_out_and_named(tmp_path: Path, log: Lines) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("environment: CartPole-v1\nfar_sight: 3\ngama: 0.9\nseed: 5\n")
    assert Config.load(file) == Config(environment="CartPole-v1", seed=5)
    (line,) = log.lines
    assert re.search(r"does not have the setting far_sight, gama: did you mean gamma\?; it is left out: for", line)
    # A file of one's own is refused.
    with pytest.raises(ConfigurationError, match="no setting 'far_sight'"):
        read_settings(file)


def test_a_file_without_an_environment_is_refused(tmp_path: Path) -> None:
    for content, reason in (("- 1", "has no settings"), ("gamma: 0.9", "names no environment")):
        (tmp_path / "config.yaml").write_text(content)
        with pytest.raises(ConfigurationError, match=reason):
            Config.load(tmp_path / "config.yaml")


def test_a_wrong_flag_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--gamma", "2"]) == 1
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: gamma 2")
    assert "\n" not in message


def test_an_unknown_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fly"]) == 2
    assert "train" in capsys.readouterr().err


def test_a_mistyped_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert capsys.readouterr().err == "error: there is no command 'trian': did you mean train?\n"


def test_the_release_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"innet-drl {innet.__version__}\n"


def test_an_own_environment_inherits_nothing_of_breakout() -> None:
    flags = parse_train(["--environment", "LunarLander-v3"])
    assert flags.preset == "vector"
    assert flags.name == "LunarLander-v3"
    assert not flags.config.clip_rewards
    assert not flags.config.life_loss_ends
    other = parse_train(["--environment", "atari/space_invaders"]).name
    assert RunFolder.default_path(other).name.startswith("space_invaders-")
    assert parse_train(["--preset", "cartpole"]).name == "cartpole"
    with pytest.raises(ConfigurationError, match=r"--preset breakout is for Atari games.*--preset vector"):
        parse_train(["--preset", "breakout", "--environment", "LunarLander-v3"])
    with pytest.raises(ConfigurationError, match=r"did you mean atari/breakout\?"):
        parse_train(["--preset", "breakout", "--environment", "ALE/Breakout-v5"])


@pytest.mark.parametrize(
    ("missing", "extra", "command"),
    [
        ("tyro", "train", "train"),
        ("torch", "train", "train --preset cartpole"),
        ("redis", "redis", "train --preset cartpole --replay redis://127.0.0.1:1"),
        ("lz4", "redis", "train --preset cartpole --replay redis://127.0.0.1:1"),
    ],
)
def test_a_missing_extra_is_named(tmp_path: Path, missing: str, extra: str, command: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from innet_drl.cli import main; sys.exit(main())"
    run = [sys.executable, "-c", code, *command.split()]
    ended = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.fullmatch(
        rf"error: {missing}(\.\w+)? is not installed: pip install 'innet-drl\[{extra}\]'\n", ended.stderr
    )
    assert not list(tmp_path.iterdir())
