"""The flags of `innet-drl train | learner | actor | evaluate | record | report`.

Every field of `Config` is a flag of the first two.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro
import yaml

from innet_drl.train.config import Config, KeywordArguments, read_settings
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.importing import Importable, path_of
from innet_drl.train.presets import PRESETS, preset
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.setting_values import read_value
from innet_drl.train.short_help import short_help

PresetName = Literal["atari", "breakout", "breakout-paper", "cartpole", "vector"]
Flags = TypeVar("Flags")

ELSEWHERE = {
    "--buffer-size": "--capacity",
    "--env": "--environment",
    "--env-id": "--environment",
    "--learning-starts": "--min-size",
    "--lr": "--learning-rate",
    "--n-envs": "--environments",
    "--num-envs": "--environments",
    "--target-network-frequency": "--target-period",
    "--timesteps": "--steps",
    "--total-timesteps": "--steps",
}
"""Flags of other programs that train agents, and ours."""


@dataclass(frozen=True)
class TrainFlags:
    """Train an agent with prioritized replay; actors and learner are processes of one machine, or of a Ray cluster."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    preset: PresetName = "breakout"
    """Settings to start from; every flag below changes one setting. With another `--environment` than an Atari game
    the default is `vector`."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """File of settings, YAML or TOML (`.toml`): it changes the preset, and flags change it."""
    out: Path | None = None
    """The run's folder; `runs/<name>-<date>-<time>` by default, with the name of the preset, or of the environment
    where that is not the preset's."""
    resume: Path | None = None
    """Folder of a run to continue from its newest checkpoint, with its settings changed by the given flags."""
    launcher: Importable = "local"
    """Place where actors and evaluations are processes: this machine (`local`); the cluster of `ray`, which needs the
    extra `ray`; or that of your own launcher, `module:name`. The environment variable RAY_ADDRESS has the cluster's
    address; without it a local one is started."""
    track: bool = False
    """Send settings and metrics to Weights & Biases; needs the extra `wandb`. Its settings are environment variables:
    WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline."""
    automatic: Annotated[tuple[str, ...], tyro.conf.Suppress] = ()
    """Settings that `--actors auto` chooses: `actors`, and `environments` unless they are given."""

    @property
    def name(self) -> str:
        """Name of the run: the preset, or the environment if it is not the preset's."""
        own = self.config.environment != PRESETS[self.preset].environment
        return self.config.environment_name if own else self.preset


@dataclass(frozen=True)
class LearnerFlags:
    """The learner of a run whose actors join by themselves, on any host (innet-drl actor)."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    out: Annotated[Path, tyro.conf.arg(aliases=("--resume",))]
    """The run's folder: a run in it is continued from its newest checkpoint, with its settings changed by the given
    flags. Its last part names the run at the server."""
    preset: PresetName = "breakout"
    """As of innet-drl train; for a new run."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """File of settings, as of innet-drl train."""
    track: bool = False
    """Send settings and metrics to Weights & Biases, as innet-drl train does."""


@dataclass(frozen=True)
class ActorFlags:
    """An actor of a run whose learner is elsewhere (innet-drl learner), which has all other settings."""

    replay: str
    """Address of the replay server: `innet://host:port`, `innets://host:port` or `unix:///path`. The environment
    variable INNET_ACTOR_TOKEN, or else INNET_TOKEN, has the token."""
    index: int
    """Number of this actor, from 0 and below the learner's `--actors`: it decides seed and exploration."""
    run: str | None = None
    """Name of the run, the last part of the learner's `--out`; needed where the server has several."""
    namespace: str = ""
    """Namespace of the run, if its learner has one: only runs of this namespace are joined."""
    replay_ca: Path | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    environment: str | None = None
    """The run's environment where this host has another name for it, such as `module:factory`."""
    environment_threads: int | None = None
    """Threads that step Atari environments; the run's `environment_threads` by default."""
    actor_threads: int | None = None
    """Threads of the network; the run's `actor_threads` by default."""


@dataclass(frozen=True)
class EvaluateFlags:
    """Play games with the agents of runs' newest checkpoints, and print a report as JSON."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of one environment; of several, the report has the interval over runs."""
    best: bool = False
    """Take the agents with the best evaluations of their runs."""
    follow: bool = False
    """Evaluate each new checkpoint of one run, until its training has ended: a report is printed for each, and the run
    keeps the best agent. The run may be on another host that shares its folder."""
    namespace: str | None = None
    """With `--follow`, the namespace that the run has to have; the folder alone names the run by default."""
    protocol: Literal["mnih2015", "machado2018"] | None = None
    """Conditions of a paper, for atari/<game>; the flags below change them. mnih2015: 30 games of 18,000 frames, 30
    no-ops, epsilon 0.05. machado2018: 100 games of 18,000 frames, sticky actions of 0.25, no no-ops, for agents trained
    with --full-action-set."""
    games: int | None = None
    """Games for each seed; the runs' `evaluation_games` by default."""
    seeds: Annotated[tuple[int, ...], tyro.conf.arg(aliases=("--seed",))] = (0,)
    """Seeds of the games: each run plays `games` with each."""
    epsilon: float | None = None
    """Probability of random actions; the runs' `evaluation_epsilon` by default."""
    frames: int | None = None
    """Emulator frames of a game; the runs' `evaluation_frames` by default (Mnih et al., 2015: 18,000)."""
    no_ops: int | None = None
    """Largest number of no-ops at the start of a game; the runs' `no_ops` by default (Mnih et al., 2015: 30)."""
    sticky_actions: float | None = None
    """Probability that the emulator repeats the last action; the runs' `sticky_actions` by default (Machado et al.,
    2018: 0.25)."""


@dataclass(frozen=True)
class RecordFlags:
    """Record a video of a game of the agent of a run's newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    best: bool = False
    """Take the agent with the best evaluation of the run."""
    to: Path | None = None
    """The mp4 to write; a file in the run's `videos/` by default."""
    seed: int = 0
    """Seeds the game."""
    seconds: float = 60.0
    """Length of the video."""


@dataclass(frozen=True)
class ReportFlags:
    """Write one HTML file with the curves, results, settings and videos of runs."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, which may be training."""
    out: Path | None = None
    """The HTML file to write; `report.html` in the folder of one run, and in the current directory for several."""


_REGISTRY = tyro.constructors.ConstructorRegistry()
"""How `tyro` reads types of `Config` that are more in Python than on the command line."""


@_REGISTRY.primitive_rule
def _importable(kind: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if kind.type != Importable:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME|MODULE:NAME",
        instance_from_str=lambda values: values[0],
        is_instance=lambda value: isinstance(value, str) or callable(value),
        str_from_instance=lambda value: [path_of(value)],
    )


@_REGISTRY.primitive_rule
def _keywords(kind: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    if kind.type != KeywordArguments:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[KEY=VALUE [KEY=VALUE ...]]",
        instance_from_str=_keyword_arguments,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [f"{key}={item}" for key, item in value.items()],
    )


def _keyword_arguments(items: list[str]) -> dict[str, Any]:
    """Reads `key=value`; values are YAML: numbers, true, false, null, [lists] and otherwise text."""
    found = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not (separator and key.isidentifier()):
            raise ValueError(f"{item!r} is not key=value")
        try:
            found[key] = read_value(value)
        except yaml.YAMLError:
            found[key] = value
    return found


def parse(flags: type[Flags], command: str, arguments: Sequence[str]) -> Flags:
    """Parses the flags of a command."""
    return tyro.cli(flags, prog=f"innet-drl {command}", args=list(arguments), registry=_REGISTRY)


def parse_train(arguments: Sequence[str]) -> TrainFlags:
    """Parses the flags of `innet-drl train`, which change the preset or the resumed run's settings.

    A file of settings (`--config`) changes the preset or the run's settings before the flags do.
    """
    known = _settings_flags(arguments)
    arguments = _helped("train", known, arguments)
    if known.resume is not None and known.preset is not None:
        raise ConfigurationError("--resume uses the run's settings: omit --preset")
    name, config, automatic = _settings(known, known.resume)
    flags = tyro.cli(
        TrainFlags,
        prog="innet-drl train",
        args=_without_auto(arguments),
        default=TrainFlags(config=config, preset=name, automatic=automatic),
        registry=_REGISTRY,
    )
    if flags.resume is not None and flags.out is not None:
        raise ConfigurationError("--resume uses the run's folder: omit --out")
    if automatic and flags.launcher != "local":
        raise ConfigurationError(
            f"--actors auto: it measures this machine, and with --launcher {path_of(flags.launcher)} the actors are on "
            "others: give their number"
        )
    return flags


def parse_learner(arguments: Sequence[str]) -> LearnerFlags:
    """Parses the flags of `innet-drl learner`, which change the preset, or the settings of the run in the folder."""
    known = _settings_flags(arguments)
    arguments = _helped("learner", known, arguments)
    out = known.out or known.resume
    has_run = out is not None and (out / "config.yaml").is_file()
    name, config, automatic = _settings(known, out if has_run else None)
    if automatic:
        raise ConfigurationError(
            "--actors auto: the actors of innet-drl learner are on hosts that this one does not know: give the number "
            "of all of them"
        )
    return tyro.cli(
        LearnerFlags,
        prog="innet-drl learner",
        args=list(arguments),
        default=LearnerFlags(config=config, out=tyro.MISSING, preset=name),
        registry=_REGISTRY,
    )


def _helped(command: str, known: argparse.Namespace, arguments: Sequence[str]) -> Sequence[str]:
    """Prints the short help if it is asked for; the long one is `tyro`'s."""
    if {"-h", "--help"} & set(arguments):
        is_atari = (known.environment or "atari/").startswith("atari/")
        name = known.preset if known.preset in PRESETS else "breakout" if is_atari else "vector"
        print(short_help(command, name), end="")
        raise SystemExit(0)
    return ["--help" if argument == "--help-all" else argument for argument in arguments]


def _settings_flags(arguments: Sequence[str]) -> argparse.Namespace:
    """The flags that decide which settings the others change.

    Raises:
        ConfigurationError: A flag of another program; the message names ours.
    """
    for argument in arguments:
        flag = argument.partition("=")[0].replace("_", "-")
        if flag in ELSEWHERE:
            raise ConfigurationError(f"there is no flag {flag}: it is {ELSEWHERE[flag]} here")
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("preset", "environment", "actors", "environments"):
        first.add_argument(f"--{name}")
    for name in ("resume", "out", "config"):
        first.add_argument(f"--{name}", type=Path)
    return first.parse_known_args(arguments)[0]


def _without_auto(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--actors auto`."""
    kept: list[str] = []
    for argument in arguments:
        if argument == "auto" and kept and kept[-1] == "--actors":
            kept.pop()
        elif argument != "--actors=auto":
            kept.append(argument)
    return kept


def _settings(known: argparse.Namespace, run: Path | None) -> tuple[PresetName, Config, tuple[str, ...]]:
    """The preset, and the settings of the preset or of an existing run, with the changes of a file of settings.

    The names are of the settings that `--actors auto`, or `actors: auto` of the file, chooses.
    """
    changes = {} if known.config is None else read_settings(known.config)
    actors = known.actors or changes.get("actors")
    if isinstance(actors, str) and actors != "auto" and not re.fullmatch(r"[-+]?[\d_]+", actors):
        raise ConfigurationError(f"--actors {actors}: it must be a number of processes, or auto")
    if changes.get("actors") == "auto":
        del changes["actors"]
    automatic: tuple[str, ...] = ()
    if actors == "auto":
        given = known.environments is not None or "environments" in changes
        automatic = ("actors",) if given else ("actors", "environments")
    environment = known.environment or str(changes.get("environment", "atari/"))
    is_atari = environment.startswith("atari/")
    name: PresetName = known.preset or ("breakout" if is_atari else "vector")
    chosen = preset(name)
    if chosen.is_atari and not is_atari:
        from innet_drl.train.environments import atari_hint

        raise ConfigurationError(
            f"--preset {name} is for Atari games, and --environment {environment} is none (they are named "
            f"atari/<game>): omit --preset, or take --preset vector{atari_hint(environment)}"
        )
    config = chosen if run is None else RunFolder.open(run).config()
    try:
        return name, dataclasses.replace(config, **changes), automatic
    except ConfigurationError as error:
        raise ConfigurationError(f"{known.config}: {error}") from error
