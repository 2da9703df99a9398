"""The flags of `innet-drl train | learner | actor | evaluate | record | report`.

Every field of `Config` is a flag of the first two.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypedDict, TypeVar, get_type_hints

import tyro
import yaml
from pydantic import TypeAdapter, ValidationError

from innet_drl.train.errors import ConfigurationError
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import ON_GPU, PRESETS, Config, meanings, preset, read_settings
from innet_drl.train.settings.machine import cores
from innet_drl.train.settings.short_help import short_help
from innet_drl.train.settings.slices import KeywordArguments, Threads, message_of
from innet_drl.train.settings.values import Importable, path_of, plain, read_value

PresetName = Annotated[str | None, tyro.conf.arg(metavar="{" + ",".join(PRESETS) + "}")]
Flags = TypeVar("Flags")

_shown: ContextVar[Config] = ContextVar("shown", default=PRESETS["breakout"])
"""The settings whose values are the defaults in the help."""


def _given() -> Any:
    """The type of the settings that are given as flags, each with its meaning and the default of the preset."""
    shown, help_of, fields = plain(vars(_shown.get())), meanings(), {}
    for name, hint in get_type_hints(Config).items():
        kind = hint | Literal["auto"] if name == "actors" else tuple[str, ...] if hint == KeywordArguments else hint
        fields[name] = Annotated[
            kind, tyro.conf.arg(help=help_of.get(name), help_behavior_hint=f"(default: {shown[name]})")
        ]
    return TypedDict("Given", fields, total=False)  # type: ignore[operator]


@dataclass(frozen=True)
class TrainFlags:
    """Train an agent with prioritized replay; actors and learner are processes of one machine, or of a Ray cluster."""

    given: Annotated[dict[str, Any], tyro.conf.arg(name="", constructor_factory=_given)]
    preset: PresetName = None
    """Settings to start from; every flag below changes one setting. With another `--environment` than an Atari game
    the default is `vector`, and otherwise `breakout`."""
    config_file: Annotated[Path | None, tyro.conf.arg(name="config")] = None
    """File of settings, YAML or TOML (`.toml`): it changes the preset, and flags change it."""
    out: Path | None = None
    """The run's folder; `runs/<name>-<date>-<time>` by default, with the name of the preset, or of the environment
    if that was changed."""
    resume: Path | None = None
    """Folder of a run to continue from its newest checkpoint, with its settings changed by the given flags."""
    launcher: Importable = "local"
    """Place where actors and evaluations are processes: this machine (`local`); the cluster of `ray`, which needs the
    extra `ray`; or that of your own launcher, `module:name`. The environment variable RAY_ADDRESS has the cluster's
    address; without it a local one is started."""
    track: bool = False
    """Send settings and metrics to Weights & Biases; needs the extra `wandb`. Its settings are environment variables:
    WANDB_PROJECT, WANDB_ENTITY, WANDB_MODE=offline."""


@dataclass(frozen=True)
class LearnerFlags:
    """The learner of a run whose actors join by themselves, on any host (innet-drl actor)."""

    given: Annotated[dict[str, Any], tyro.conf.arg(name="", constructor_factory=_given)]
    out: Annotated[Path, tyro.conf.arg(aliases=("--resume",))]
    """The run's folder: a run in it is continued from its newest checkpoint, with its settings changed by the given
    flags. Its last part names the run at the server."""
    preset: PresetName = None
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
    """Index of this actor, from 0 and below the learner's `--actors`: it decides seed and exploration."""
    run: str | None = None
    """Name of the run, the last part of the learner's `--out`; needed where the server has several."""
    namespace: str = ""
    """Namespace of the run, if its learner has one: only runs of this namespace are joined."""
    replay_ca: Path | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    environment: str | None = None
    """The run's environment where this host has another name for it, such as `module:factory`."""
    environment_threads: Threads | None = None
    """Threads that step Atari environments; the run's `environment_threads` by default."""
    actor_threads: Threads | None = None
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
"""How `tyro` reads a type that is more in Python than on the command line."""


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


def keyword_arguments(flag: str, items: Sequence[str]) -> dict[str, Any]:
    """Reads `key=value`; values are YAML: numbers, true, false, null, [lists] and otherwise text."""
    found = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not (separator and key.isidentifier()):
            raise ConfigurationError(f"{flag} {item}: it must be key=value")
        try:
            found[key] = read_value(value)
        except yaml.YAMLError:
            found[key] = value
    return found


def parse(flags: type[Flags], command: str, arguments: Sequence[str]) -> Flags:
    """Parses the flags of a command.

    Raises:
        ConfigurationError: A value out of the range of its flag.
    """
    parsed = tyro.cli(flags, prog=f"innet-drl {command}", args=list(arguments), registry=_REGISTRY)
    try:
        return TypeAdapter(flags).validate_python(vars(parsed))
    except ValidationError as error:
        raise ConfigurationError(message_of(error, vars(parsed))) from None


@dataclass(frozen=True)
class Chosen(Generic[Flags]):
    """The flags of `innet-drl train` or `learner`, and the settings that they choose."""

    flags: Flags
    config: Config
    preset: str

    @property
    def name(self) -> str:
        """Name of the run: the preset, or the environment if it is not the preset's."""
        own = self.config.environment != PRESETS[self.preset].environment
        return self.config.environment_name if own else self.preset


def parse_train(arguments: Sequence[str]) -> Chosen[TrainFlags]:
    """Parses the flags of `innet-drl train`, which change the preset or the resumed run's settings.

    A file of settings (`--config`) changes the preset or the run's settings before the flags do.
    """
    flags = _parsed(TrainFlags, "train", arguments)
    if flags.resume is not None and flags.preset is not None:
        raise ConfigurationError("--resume uses the run's settings: omit --preset")
    if flags.resume is not None and flags.out is not None:
        raise ConfigurationError("--resume uses the run's folder: omit --out")
    elsewhere = "" if flags.launcher == "local" else f"with --launcher {path_of(flags.launcher)}"
    return _chosen(flags, flags.resume, elsewhere)


def parse_learner(arguments: Sequence[str]) -> Chosen[LearnerFlags]:
    """Parses the flags of `innet-drl learner`, which change the preset, or the settings of the run in the folder."""
    flags = _parsed(LearnerFlags, "learner", arguments)
    return _chosen(flags, flags.out if (flags.out / "config.yaml").is_file() else None, "of innet-drl learner")


Given = TypeVar("Given", TrainFlags, LearnerFlags)


def _parsed(flags: type[Flags], command: str, arguments: Sequence[str]) -> Flags:
    """Parses flags that change settings.

    `--help` is the short help, and `--help-all` that of `tyro`: both show the defaults of the preset.
    """
    given = [argument.replace("_", "-") for argument in " ".join(arguments).replace("=", " ").split()]
    if {"-h", "--help", "--help-all"} & set(given):
        named = given[given.index("--preset") + 1 :][:1] if "--preset" in given else []
        name = next((each for each in named if each in PRESETS), "breakout")
        if "--help-all" not in given:
            print(short_help(command, name), end="")
            raise SystemExit(0)
        _shown.set(PRESETS[name])
        arguments = ["--help"]
    return parse(flags, command, arguments)


def _chosen(flags: Given, run: Path | None, elsewhere: str) -> Chosen[Given]:
    """The settings of the preset or of an existing run, changed by a file of settings, and by flags.

    `elsewhere` says whose actors are on other machines, if they are.
    """
    of_file = {} if flags.config_file is None else read_settings(flags.config_file)
    given: dict[str, Any] = {
        name: keyword_arguments(name, value) if name.endswith("_args") else value for name, value in flags.given.items()
    }
    changes = {**of_file, **given}
    automatic = changes.get("actors") == "auto"
    for settings in (of_file, given):
        if settings.get("actors") == "auto":
            del settings["actors"]
    environment = path_of(changes.get("environment", "atari/"))
    is_atari = environment.startswith("atari/")
    name = flags.preset or ("breakout" if is_atari else "vector")
    config = preset(name)
    if name in ON_GPU and run is None and not changes.get("serial") and not elsewhere:
        automatic = automatic or "actors" not in changes
    if config.is_atari and not is_atari:
        from innet_drl.train.environments import atari_hint

        raise ConfigurationError(
            f"--preset {name} is for Atari games, and --environment {environment} is not one (they are named "
            f"atari/<game>): omit --preset, or take --preset vector{atari_hint(environment)}"
        )
    if run is not None:
        config = RunFolder.open(run).config()
    try:
        config = dataclasses.replace(config, **of_file)
    except ConfigurationError as error:
        raise ConfigurationError(f"{flags.config_file}: {error}") from error
    config = dataclasses.replace(config, **given)
    if automatic:
        if config.serial:
            raise ConfigurationError("--actors auto: a serial run has one actor: omit --actors or --serial")
        if elsewhere:
            raise ConfigurationError(f"--actors auto: actors {elsewhere} are on other machines: give their number")
        config = dataclasses.replace(config, actors=_actors_of_this_machine(config))
    return Chosen(flags, config, name)


def _actors_of_this_machine(config: Config) -> int:
    """The cores that learners leave: one with a GPU takes two, for launches and for the sampler; others take half."""
    from innet_drl.train.learn.learner import choose_device

    left = cores() - 2 * config.learners if choose_device(config).type == "cuda" else cores() // 2
    return max(1, left // max(config.actor_threads, config.environment_threads))
