"""The settings of a training run: one structure, and its file in the run's folder.

Every field has a flag of the same name (`learning_rate` is `--learning-rate`). The defaults suit vector observations
and no specific game: a game's preset is a `Config` with other defaults. A run writes its settings to `config.yaml`.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

import innet_drl as innet
from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.importing import Importable, can_be_imported, is_path, path_of
from innet_drl.train.settings.settings_file import plain, read_mapping, write_mapping

logger = logging.getLogger(__name__)

SERVER_SCHEMES = ("innet", "innets", "innet+fstack", "unix")
"""Schemes of server addresses. Other packages add memories with their own schemes."""

NETWORKS = ("auto", "nature", "impala", "mlp", "dict")
"""Names of `--network`."""

LOSSES = ("double_q", "categorical", "quantile")
"""Names of `--loss`."""

NEWER = "install the release that wrote the file, which may be newer"
"""Last part of messages about settings in a file."""

MAX_SEED = 1 << 30
"""Largest seed: evaluations and environments add to it, and Atari seeds have 31 bits."""

MAX_LEARNERS = 64
"""Largest number of workers of a gradient job."""


def _named(*names: str) -> AfterValidator:
    """Accepts one of some names, an import path, or a function or class."""

    def check(value: Importable) -> Importable:
        if isinstance(value, str) and value not in names and not is_path(value):
            raise ValueError(f"it must be {', '.join(names)}, or an import path module:name")
        return value

    return AfterValidator(check)


def _address(value: str) -> str:
    if value != "embedded" and "://" not in value:
        raise ValueError("it must be embedded, or an address such as innet://host:7710")
    return value


def _namespace(value: str) -> str:
    if not re.fullmatch("[A-Za-z0-9._-]{0,40}", value):
        raise ValueError("it must be up to 40 ASCII letters, digits, '.', '_' and '-'")
    return value


def _switch(value: Any) -> Any:
    """Turns bools into words: YAML reads the words on and off as bools."""
    return ("off", "on")[value] if isinstance(value, bool) else value


Count = Annotated[int, Field(ge=1, le=2**40)]
Several = Annotated[int, Field(ge=2)]
Natural = Annotated[int, Field(ge=0, le=2**40)]
Few = Annotated[int, Field(ge=0, le=1024)]
Threads = Annotated[int, Field(ge=1, le=1024)]
Seed = Annotated[int, Field(ge=0, lt=MAX_SEED)]
Positive = Annotated[float, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0, le=1e9)]
Minutes = Annotated[float, Field(gt=0, le=1e7)]
Share = Annotated[float, Field(ge=0, le=1)]
Address = Annotated[str, AfterValidator(_address)]
KeywordArguments = dict[str, Any]
# Files have lists for tuples, and text for paths.
_Converted = Field(strict=False)


class _ClearErrors(type):
    """Turns the errors of pydantic into one line that names the setting."""

    def __call__(cls, *arguments: Any, **settings: Any) -> Any:
        """Makes the structure.

        Raises:
            ConfigurationError: An unknown setting, or a value of another type or out of range.
        """
        settings = {name: value.item() if isinstance(value, np.generic) else value for name, value in settings.items()}
        try:
            return super().__call__(*arguments, **settings)
        except pydantic.ValidationError as error:
            raise ConfigurationError(message_of(error, settings)) from None


_KINDS = {
    "bool_type": "true or false",
    "callable_type": "a function or class",
    "dict_type": "a mapping of names to values",
    "float_type": "a number",
    "int_type": "an integer",
    "is_instance_of": "a path",
    "path_type": "a path",
    "string_type": "text",
    "tuple_type": "a list",
}
"""Kinds of values, by the errors that pydantic has for other ones."""


def message_of(error: pydantic.ValidationError, settings: Mapping[str, Any]) -> str:
    """The message of the first wrong setting; of a union, what each part says."""
    errors: list[Any] = error.errors(include_url=False)
    first = errors[0]
    context = first.get("ctx", {})
    if not first["loc"]:
        return str(context.get("error", first["msg"]))
    name, *parts = first["loc"]
    if isinstance(name, int):
        name = dataclasses.fields(Config)[name].name
    if first["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        return unknown(str(name), "innet-drl train --help lists them")
    if first["type"] == "multiple_argument_values":
        return f"{name}: it is given twice"
    if first["type"] == "missing" and not parts:
        return f"{name}: it has to be given"
    errors = [each for each in errors if each["loc"][0] == first["loc"][0]]
    wanted = [_KINDS.get(each["type"]) or each["msg"].removeprefix("Input should be ") for each in errors]
    listed = isinstance(settings.get(str(name)), list | tuple) and parts and isinstance(parts[0], int)
    item = f"item {parts[0] + 1}" if listed else "it"
    if first["type"] in ("missing", "too_long"):
        text = f"it must have {context.get('max_length') or errors[-1]['loc'][1] + 1} items"
    else:
        text = str(context.get("error") or f"{item} must be {' or '.join(dict.fromkeys(wanted))}")
    return f"{name} {settings.get(name, first['input'])!r}: {text}"


@pydantic.dataclasses.dataclass(
    frozen=True,
    config=ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True),
)
class Config(metaclass=_ClearErrors):
    """Settings of a run. Steps are agent steps: one action of one environment.

    Each is a flag of `innet-drl train`, too. Its help, and docs/reference/innet_drl.train.md, have the meanings.

    Raises:
        ConfigurationError: An unknown setting, or a value of another type or out of range.
    """

    # Environment, duration and memory.

    environment: Importable
    """`atari/<game>` as ale-py names its ROMs, a Gymnasium id such as `CartPole-v1`, or `module:factory`: a function or
    class that makes a Gymnasium environment. In Python also the function or class itself."""
    environment_args: KeywordArguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment, as `key=value ...` on the command line."""
    environment_wrappers: Annotated[tuple[Importable, ...], _Converted] = ()
    """Wrappers around each environment, the innermost first, each as `module:Wrapper`."""
    async_environments: bool = False
    """Step each environment in a process of its own: for slow ones. Not for `atari/<game>`, which has threads."""
    minutes: Minutes | None = None
    """Ends training after this many minutes of this session."""
    steps: Count | None = None
    """Ends training at this many agent steps, counted over all sessions of the run. Actor processes exceed it by up
    to a second of steps."""
    seed: Seed = 0
    """Seed of networks, environments, exploration and, if the memory is in this process, sampling."""
    serial: bool = False
    """Run one actor and the learner in turn in one process: the run is a function of the seed."""
    replay: Address = "embedded"
    """`embedded` keeps the memory in the learner; an address (`innet://host:port`, `innets://host:port`,
    `unix:///path`) uses a server. Packages add memories with schemes and options of their own
    (`scheme://host:port?option=value`). The environment variable INNET_TOKEN has the token or
    password, and INNET_ACTOR_TOKEN, if set, the actors' token of a server."""
    namespace: Annotated[str, AfterValidator(_namespace)] = ""
    """The run's namespace at a server that several runs share: the names of its tables and parameters there begin with
    it. Up to 40 ASCII letters, digits, `.`, `_` and `-`; empty for none."""
    replay_ca: Annotated[Path, _Converted] | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    replay_patience: Seconds = 60.0
    """Seconds that a run waits for a server (`--replay`) that is away or does not answer, before it ends with a
    checkpoint."""
    actor_patience: Seconds = 600.0
    """Seconds that the learner waits for steps while no actor is connected, before the run ends with a checkpoint."""

    preload: str | Path | None = None
    """Data set of demonstrations that the run starts from, as `innet_drl.datasets` names it: `FILE.parquet` or
    `minari:NAME`. Its observation is `observation`, or `frame` as in the export of a run."""
    preload_share: Share = 0.25
    """Share of the demonstrations in each batch; they are in a table of their own, which evicts none, and the replay
    ratio does not count them."""

    # Actors.

    actors: Count = 1
    """Actor processes; a serial run always has one actor. On the command line `auto` is the number for this machine:
    its cores, but for one of each learner with a GPU, or half of them for a learner on the CPU."""
    environments: Count = 8
    """Environments of one actor, stepped together."""
    environment_threads: Threads = 1
    """Threads that step one actor's Atari environments."""
    actor_threads: Threads = 1
    """Threads of one actor's network."""
    actor_restarts: Natural = 3
    """Actors that may die and be replaced within ten minutes before the run fails."""
    environment_timeout: Annotated[float, Field(ge=2, le=1e9)] | None = 300.0
    """Seconds of one step or reset of the environments after which an actor prints its stacks and is replaced, because
    they hang. None waits without limit, as a serial run does."""
    pull_period: Count = 4
    """Vector steps between checks for newer parameters."""
    epsilon_base: Share = 0.4
    """Environment i of N explores with base^(1 + exponent * i / (N - 1)) (Horgan et al., 2018)."""
    epsilon_exponent: float = 7.0
    """See `epsilon_base`."""
    epsilon_anneal_steps: Natural = 20_000
    """Steps of all actors over which epsilon falls from 1 to its final value; 0 starts with the final value."""

    stack: Count = 1
    """Observations that the network gets at a time, the newest and those before it."""

    # Atari.

    frame_size: Annotated[int, Field(ge=1, le=210)] = 84
    """Height and width to which frames are scaled (Mnih et al., 2015: 84). Smaller ones make quicker updates."""
    sticky_actions: Share = 0.0
    """Probability that the emulator repeats the last action (Machado et al., 2018, advise 0.25)."""
    no_ops: Natural = 30
    """Largest number of no-ops at the start of a game; each game has a random number of them (Mnih et al., 2015;
    Machado et al., 2018, advise 0, with sticky actions)."""
    full_action_set: bool = False
    """Give the agent all 18 actions of the console (Machado et al., 2018), and not the game's minimal set."""
    episode_frames: Count = 108_000
    """Emulator frames after which a game is truncated: 30 minutes of play."""
    clip_rewards: bool = False
    """Learn from the sign of rewards; scores are always reported unclipped."""
    life_loss_ends: bool = False
    """Let the loss of a life end the learner's episode, but not the game and not the frame stack."""

    # Network.

    network: Annotated[Importable, _named(*NETWORKS)] = "auto"
    """`nature` or `impala` for images, `mlp` for vectors, `dict` for dictionaries, or `module:Class`; `auto` chooses
    by the observation, and `nature` for images of 36 pixels and more."""
    channels: Annotated[tuple[Count, Count, Count], _Converted] = (16, 32, 32)
    """Filters of the three convolutions of `nature` (8x8 stride 4, 4x4 stride 2, 3x3 stride 1), or of the three
    sections of `impala`."""
    hidden: Count = 256
    """Units of each stream, value and advantages, of the dueling head (Wang et al., 2016)."""
    layers: Annotated[tuple[Count, ...], _Converted] = (128,)
    """Units of the layers before the head, if the observation is a vector."""
    layer_norm: bool = False
    """Normalise the hidden units of the head (Ba et al., 2016): stabilises higher learning rates."""

    # Loss.

    loss: Annotated[Importable, _named(*LOSSES)] = "double_q"
    """`double_q`, `categorical` (C51), `quantile` (QR-DQN), or `module:function`."""
    munchausen: bool = False
    """Add the scaled log-policy to the reward and bootstrap from the soft value (Vieillard et al., 2020)."""
    munchausen_scale: Share = 0.9
    """Alpha: factor of the log-policy."""
    munchausen_temperature: Positive = 0.03
    """Tau: temperature of the policy, softmax(Q / tau)."""
    munchausen_floor: Annotated[float, Field(le=0)] = -1.0
    """Lower bound of tau times the log-policy."""
    atoms: Several = 51
    """Atoms of `categorical`."""
    value_range: Annotated[tuple[float, float], _Converted] = (-10.0, 10.0)
    """Lowest and highest return of `categorical`."""
    quantiles: Several = 200
    """Quantiles of `quantile`."""

    # Replay.

    capacity: Count = 200_000
    """Steps in the memory."""
    min_size: Count = 2_000
    """Transitions before learning starts."""
    samples_per_insert: Positive = 8.0
    """Replay ratio: transitions sampled for each one inserted, independent of the machine's speed."""
    max_version_lag: Natural = 0
    """Published versions by which an actor's parameters may be behind while its steps are stored; it gets newer ones
    before further steps. 0 sets no limit, and a serial run has none."""
    priority_exponent: float = 0.6
    """Alpha of prioritized replay (Schaul et al., 2016); 0 samples uniformly."""
    importance_exponent: Share = 0.4
    """Beta of the importance weights."""
    normalize_weights: Literal["batch", "memory"] = "batch"
    """Importance weights are divided by the largest of the batch, or by the largest that the memory could give."""
    n_step: Count = 3
    """Steps of the return."""
    gamma: Share = 0.99
    """Discount of one step."""
    chunk_steps: Count = 4
    """Steps of one environment that an actor sends together."""
    prefetch: Few = 3
    """Batches sampled ahead of the learner."""
    max_bytes: Count = 4 << 30
    """Byte limit of an embedded memory; a capacity that does not fit is refused. A server has a limit of its own."""

    # Learner.

    batch_size: Count = 64
    """Transitions of one update."""
    learning_rate: Positive = 5e-4
    """Adam's step size."""
    learning_rate_final: Positive | None = None
    """Adam's step size after `learning_rate_anneal_updates`; None keeps `learning_rate`."""
    learning_rate_anneal_updates: Natural = 0
    """Updates over which the step size goes from `learning_rate` to `learning_rate_final` on a straight line."""
    adam_epsilon: Positive = 1.5e-4
    """Adam's epsilon (Hessel et al., 2018)."""
    max_gradient_norm: Positive = 10.0
    """Norm to which gradients are clipped."""
    target_period: Count = 250
    """Updates between copies to the target network."""
    average_decay: Share = 0.998
    """Decay of the running average of the weights that is evaluated and recorded; 0 uses the newest weights."""
    publish: Literal["average", "newest"] = "average"
    """Weights that actors play with: the running average, which evaluations play with, or the newest ones."""
    publish_period: Count = 10
    """Updates between publications of the parameters."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner's network; `auto` is CUDA if there is any, but the CPU in a serial run: results of CUDA
    are not a function of the seed."""
    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)] = 1
    """Learner processes. Each samples batches of its own, and all apply the mean of their gradients: an update uses
    `learners` times `batch_size` transitions."""
    gradients: Address = "embedded"
    """Aggregator of several learners' gradients: `embedded` is the first learner's process; an address
    (`innet://host:port`, `innets://host:port`) is a server with `--gradients`."""
    learner_threads: Few = 0
    """Threads of the learner's network on a CPU; 0 is one for each core not used by actors and `targets_ahead`."""
    targets_ahead: Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)] = "auto"
    """Compute the targets of the next batch in a second thread while the learner updates on this one; `auto`
    does for images on a CPU with more than one core."""
    numerics: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the learner's forward and backward pass; `auto` measures at start-up."""
    layout: Literal["auto", "contiguous", "channels_last", "space_to_depth"] = "auto"
    """Memory layout of the learner's images; `auto` measures at start-up. `space_to_depth`, for `nature` alone, turns
    blocks of 4x4 pixels into channels: the same convolution, with the shape that matrix units want."""

    # Evaluation.

    evaluation_environment: Importable = ""
    """Environment of evaluations and videos, as `environment`, with the same spaces; empty for the one that is trained
    on."""
    evaluation_environment_args: KeywordArguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of evaluations' environment, in place of `environment_args`. Without
    `evaluation_environment`, they apply to the training environment."""
    evaluation_games: Count = 30
    """Games of one evaluation."""
    evaluation_epsilon: Share = 0.0
    """Random actions in an evaluation."""
    evaluation_frames: Count = 18_000
    """Emulator frames, and steps outside Atari, after which an evaluated game is truncated: 5 minutes of play (Mnih et
    al., 2015). Environments with a shorter limit of their own keep it."""
    evaluation_period: Natural = 0
    """Updates between evaluations, which are played beside training; 0 evaluates only at the end."""
    target_return: float | None = None
    """Mean return of an evaluation at which training ends; `best.safetensors` is its agent."""
    video: bool = True
    """Record a game of the trained agent at the end."""

    # Files.

    checkpoint_minutes: Minutes = 5.0
    """Minutes between checkpoints; the last one is always written."""
    checkpoint_replay: bool = True
    """Write a snapshot of an embedded memory with each checkpoint, which a resumed run restores. A step takes as many
    bytes as in memory."""
    report_seconds: Seconds = 5.0
    """Seconds between lines of metrics."""
    report_steps: Count = 1000
    """Agent steps between lines of metrics of serial runs, which do not depend on the clock."""

    def __post_init__(self) -> None:
        """Checks the settings that depend on each other."""
        scheme, lowest = self.replay.partition("://")[0], self.environments * (self.chunk_steps + self.n_step)
        is_server = scheme in SERVER_SCHEMES
        for name, holds, wanted in (
            ("stack", self.stack >= 2 or not self.is_atari, "at least 2 in Atari games: one frame shows no motion"),
            ("value_range", self.value_range[0] < self.value_range[1], "a lower and a higher return"),
            (
                "async_environments",
                not (self.async_environments and self.is_atari),
                "omitted for Atari games, which environment_threads steps",
            ),
            (
                "replay",
                not self.serial or self.replay == "embedded",
                "omitted in a serial run, which is one process with its memory in it",
            ),
            (
                "namespace",
                not self.namespace or is_server,
                "empty without a server (replay innet://host:port), which other runs could share",
            ),
            (
                "preload",
                self.preload is None or self.replay == "embedded" or is_server,
                "omitted with the memory of another package",
            ),
            (
                "preload_share",
                self.preload is None or 0 < self.demonstrations < self.batch_size,
                f"a share of a batch ({self.batch_size}) that leaves items of each table",
            ),
            (
                "learning_rate_final",
                (self.learning_rate_final is None) == (self.learning_rate_anneal_updates == 0),
                "given with learning_rate_anneal_updates, and not without",
            ),
            (
                "publish",
                self.publish == "newest" or self.average_decay > 0,
                "newest without an average (average_decay 0)",
            ),
            ("learners", self.learners == 1 or not self.serial, "1 in a serial run"),
            ("min_size", self.min_size < self.capacity, f"below the capacity ({self.capacity})"),
            (
                "min_size",
                self.min_size > lowest,
                f"above {lowest}, the steps of an actor before its first chunks arrive",
            ),
            ("min_size", self.min_size >= self.batch_size, f"at least a batch ({self.batch_size})"),
        ):
            if not holds:
                raise ConfigurationError(f"{name} {getattr(self, name)!r}: it must be {wanted}")

    @property
    def is_atari(self) -> bool:
        """Whether the environment is an Atari game."""
        return isinstance(self.environment, str) and self.environment.startswith("atari/")

    @property
    def environment_name(self) -> str:
        """The environment's name or import path."""
        return path_of(self.environment)

    @property
    def demonstrations(self) -> int:
        """Items of a batch that are of the demonstrations' own table, as `Mix` rounds their share."""
        return math.ceil(self.batch_size * self.preload_share - 0.5 - 1e-6) if self.preload else 0

    @property
    def evaluated(self) -> Config:
        """The settings with the environment of evaluations."""
        if not (self.evaluation_environment or self.evaluation_environment_args):
            return self
        return dataclasses.replace(
            self,
            environment=self.evaluation_environment or self.environment,
            environment_args=self.evaluation_environment_args,
            evaluation_environment="",
            evaluation_environment_args={},
        )

    @property
    def playing_actors(self) -> int:
        """Number of actors, which is one in a serial run."""
        return 1 if self.serial else self.actors

    @property
    def all_environments(self) -> int:
        """Environments of all actors."""
        return self.playing_actors * self.environments

    @property
    def slack(self) -> float:
        """Sampled items by which the replay ratio may be off.

        The slack covers data in flight: a chunk of every environment being pushed while the next one fills, and
        the batches sampled ahead.
        """
        return self.slack_of(self.all_environments, self.learners)

    def slack_of(self, environments: int, learners: int) -> float:
        """`slack` with other numbers of all environments and learners."""
        pushed = 2 * self.chunk_steps * environments * self.samples_per_insert
        drawn = (self.prefetch + 2) * self.batch_size * learners
        return float(pushed + drawn)

    def changed(self, other: Config, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the settings among `names` that differ between the two configurations."""
        ours, theirs = self.as_dict(), other.as_dict()
        return tuple(name for name in names if ours[name] != theirs[name])

    def as_dict(self, lost: list[str] | None = None) -> dict[str, Any]:
        """Returns every setting as YAML values; `lost` receives names of arguments that cannot be read back."""
        return plain({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, lost)

    def save(self, path: Path) -> None:
        """Writes every field to a YAML file; the log names values that cannot be read back."""
        lost: list[str] = []
        write_mapping(path, self.as_dict(lost))
        if lost:
            logger.warning(
                "config.yaml has text instead of %s, and so have `train.load` and a run that is resumed by its folder "
                "alone: give numbers, text, lists and mappings, or make the object inside of the environment",
                ", ".join(lost),
            )
        own = (self.environment, *self.environment_wrappers, self.network, self.loss)
        own += (self.evaluation_environment,) if self.evaluation_environment else ()
        if hidden := [path_of(value) for value in own if not can_be_imported(value)]:
            logger.warning(
                "config.yaml has %s, which other programs cannot import, and `train.load` fails there: define it at "
                "the top level of a file whose name can be imported",
                " and ".join(hidden),
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Immutable, so that deep copies of networks, whose modules refer to the settings, share it.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions and classes of notebooks and scripts are pickled by value for other processes.
        import cloudpickle

        return _unpickled, (cloudpickle.dumps(vars(self)),)

    @classmethod
    def load(cls, path: Path) -> Config:
        """Reads a file that `save` wrote. Settings that this release does not have are left out, and logged."""
        values = read_mapping(path)
        known = {field.name for field in dataclasses.fields(cls)}
        if other := [str(name) for name in values if name not in known]:
            hints = [f"{name}{closest(name, known)}" for name in other]
            logger.warning(
                "%s: innet-drl %s does not have the setting %s; it is left out: for the run as it was, install the "
                "release that wrote the file",
                path,
                innet.__version__,
                ", ".join(hints),
            )
            values = {name: value for name, value in values.items() if name in known}
        if "environment" not in values:
            raise ConfigurationError(f"{path} names no environment: add `environment`, or start from a preset")
        try:
            return cls(**values)
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}; correct it, or {NEWER}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Reads some settings, or all, from a YAML or TOML file, for `Config` or `dataclasses.replace`."""
    values = read_mapping(path)
    known = {field.name for field in dataclasses.fields(Config)}
    for name in values:
        if name not in known:
            raise ConfigurationError(f"{path}: {unknown(str(name), f'remove it, or {NEWER}')}")
    return values


def unknown(name: str, otherwise: str) -> str:
    """The message of a setting that does not exist."""
    hint = closest(name, [field.name for field in dataclasses.fields(Config)], otherwise)
    if name == "preset":
        hint = ": a preset is chosen by the flag --preset, or by train.preset(name)"
    return f"there is no setting {name!r} in innet-drl {innet.__version__}{hint}"


def _unpickled(values: bytes) -> Config:
    import cloudpickle

    return Config(**cloudpickle.loads(values))
