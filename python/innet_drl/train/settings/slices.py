"""Slices of the settings of a run: what environments, networks, the memory, actors and learners are made from.

A `Config` has all of them and is passed as a whole; the type of a parameter says which slice a part reads, and mypy
checks it.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
import pydantic.dataclasses
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

import innet_drl as innet
from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.values import Importable, is_path, path_of, plain

MAX_SEED = 1 << 30
"""Largest seed: evaluations and environments add to it, and Atari seeds have 31 bits."""

MAX_LEARNERS = 64
"""Largest number of workers of a gradient job."""


def named(*names: str) -> AfterValidator:
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
Namespace = Annotated[str, AfterValidator(_namespace)]
Switch = Annotated[Literal["auto", "on", "off"], BeforeValidator(_switch)]
KeywordArguments = dict[str, Any]
# Files have lists for tuples, and text for paths.
Converted = Field(strict=False)


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
            names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
            raise ConfigurationError(message_of(error, settings, names)) from None


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


def message_of(error: pydantic.ValidationError, settings: Mapping[str, Any], names: Sequence[str] = ()) -> str:
    """The message of the first wrong setting, of those with `names`; of a union, what each part says."""
    errors: list[Any] = error.errors(include_url=False)
    first = errors[0]
    context = first.get("ctx", {})
    if not first["loc"]:
        return str(context.get("error", first["msg"]))
    name, *parts = first["loc"]
    if isinstance(name, int):
        name = names[name]
    if first["type"] in ("unexpected_keyword_argument", "unexpected_positional_argument"):
        return unknown(str(name), names, "innet-drl train --help lists them")
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


def unknown(name: str, names: Sequence[str], otherwise: str) -> str:
    """The message of a setting that does not exist."""
    hint = closest(name, names, otherwise)
    if name == "preset":
        hint = ": a preset is chosen by the flag --preset, or by train.preset(name)"
    return f"there is no setting {name!r} in innet-drl {innet.__version__}{hint}"


CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, defer_build=True)
"""How settings are checked when they are made."""


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class Settings(metaclass=_ClearErrors):
    """Base of settings, which do not change."""

    def changed(self, other: Settings, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the settings among `names` that differ between the two configurations."""
        ours, theirs = self.as_dict(), other.as_dict()
        return tuple(name for name in names if ours[name] != theirs[name])

    def as_dict(self, lost: list[str] | None = None) -> dict[str, Any]:
        """Returns every setting as YAML values; `lost` receives names of arguments that cannot be read back."""
        return plain({field.name: getattr(self, field.name) for field in dataclasses.fields(self)}, lost)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # Immutable, so that deep copies of networks, whose modules refer to the settings, share it.
        return self


NETWORKS = ("auto", "nature", "impala", "mlp", "dict")
"""Names of `--network`."""
LOSSES = ("double_q", "categorical", "quantile")
"""Names of `--loss`."""


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class EnvironmentSettings(Settings):
    """What makes environments."""

    environment: Importable
    """`atari/<game>` as ale-py names its ROMs, a Gymnasium id such as `CartPole-v1`, or `module:factory`: a function or
    class that makes a Gymnasium environment. In Python also the function or class itself."""
    environment_args: KeywordArguments = dataclasses.field(default_factory=dict)
    """Keyword arguments of the environment, as `key=value ...` on the command line."""
    environment_wrappers: Annotated[tuple[Importable, ...], Converted] = ()
    """Wrappers around each environment, the innermost first, each as `module:Wrapper`."""
    async_environments: bool = False
    """Step each environment in a process of its own: for slow ones. Not for `atari/<game>`, which has threads."""
    environment_threads: Threads = 1
    """Threads that step one actor's Atari environments."""
    stack: Count = 1
    """Observations that the network gets at a time, the newest and those before it."""
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

    @property
    def is_atari(self) -> bool:
        """Whether the environment is an Atari game."""
        return isinstance(self.environment, str) and self.environment.startswith("atari/")

    @property
    def environment_name(self) -> str:
        """The environment's name or import path."""
        return path_of(self.environment)


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class NetworkSettings(Settings):
    """The network and its loss."""

    network: Annotated[Importable, named(*NETWORKS)] = "auto"
    """`nature` or `impala` for images, `mlp` for vectors, `dict` for dictionaries, or `module:Class`; `auto` chooses
    by the observation, and `nature` for images of 36 pixels and more."""
    channels: Annotated[tuple[Count, Count, Count], Converted] = (16, 32, 32)
    """Filters of the three convolutions of `nature` (8x8 stride 4, 4x4 stride 2, 3x3 stride 1), or of the three
    sections of `impala`."""
    hidden: Count = 256
    """Units of each stream, value and advantages, of the dueling head (Wang et al., 2016)."""
    layers: Annotated[tuple[Count, ...], Converted] = (128,)
    """Units of the layers before the head, if the observation is a vector."""
    layer_norm: bool = False
    """Normalise the hidden units of the head (Ba et al., 2016): stabilises higher learning rates."""
    loss: Annotated[Importable, named(*LOSSES)] = "double_q"
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
    value_range: Annotated[tuple[float, float], Converted] = (-10.0, 10.0)
    """Lowest and highest return of `categorical`."""
    quantiles: Several = 200
    """Quantiles of `quantile`."""


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class ProcessSettings(Settings):
    """The processes of a run, as far as all of them know each other."""

    seed: Seed = 0
    """Seed of networks, environments, exploration and, if the memory is in this process, sampling."""
    serial: bool = False
    """Run one actor and the learner in turn in one process: the run is a function of the seed."""
    actors: Count = 1
    """Actor processes; a serial run always has one actor. On the command line `auto` is the number for this machine:
    its cores minus two for each learner with a GPU, or half of them for a learner on the CPU."""
    environments: Count = 8
    """Environments of one actor, stepped together."""
    actor_threads: Threads = 1
    """Threads of one actor's network."""
    learners: Annotated[int, Field(ge=1, le=MAX_LEARNERS)] = 1
    """Learner processes. Each samples batches of its own, and all apply the mean of their gradients: an update uses
    `learners` times `batch_size` transitions."""

    @property
    def playing_actors(self) -> int:
        """Number of actors, which is one in a serial run."""
        return 1 if self.serial else self.actors

    @property
    def all_environments(self) -> int:
        """Environments of all actors."""
        return self.playing_actors * self.environments


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class ReplaySettings(ProcessSettings):
    """What the replay memory depends on; the slack of its ratio is that of the processes."""

    replay: Address = "embedded"
    """`embedded` keeps the memory in the learner; an address (`innet://host:port`, `innets://host:port`,
    `unix:///path`) uses a server. Packages add memories with schemes and options of their own
    (`scheme://host:port?option=value`). The environment variable INNET_TOKEN has the token or
    password, and INNET_ACTOR_TOKEN, if set, the actors' token of a server."""
    namespace: Namespace = ""
    """The run's namespace at a server that several runs share: the names of its tables and parameters there begin with
    it. Up to 40 ASCII letters, digits, `.`, `_` and `-`; empty for none."""
    replay_ca: Annotated[Path, Converted] | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    replay_patience: Seconds = 60.0
    """Seconds that a run waits for a server (`--replay`) that is away or does not answer, before it ends with a
    checkpoint."""
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
    batch_size: Count = 64
    """Transitions of one update."""
    clip_rewards: bool = False
    """Learn from the sign of rewards; scores are always reported unclipped."""
    life_loss_ends: bool = False
    """Let the loss of a life end the learner's episode, but not the game and not the frame stack."""
    preload: str | Path | None = None
    """Data set of demonstrations that the run starts from, as `innet_drl.datasets` names it: `FILE.parquet` or
    `minari:NAME`. Its observation is `observation`, or `frame` as in the export of a run."""
    preload_share: Share = 0.25
    """Share of the demonstrations in each batch; they are in a table of their own, which evicts none, and the replay
    ratio does not count them."""

    @property
    def demonstrations(self) -> int:
        """Items of a batch that are of the demonstrations' table, as `Mix` rounds their share."""
        return math.ceil(self.batch_size * self.preload_share - 0.5 - 1e-6) if self.preload else 0

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


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class ActorSettings(ReplaySettings, NetworkSettings, EnvironmentSettings):
    """What an actor reads."""

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


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class LearnerSettings(ReplaySettings, NetworkSettings):
    """What a learner reads."""

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
    gradients: Address = "embedded"
    """Aggregator of several learners' gradients: `embedded` is the first learner's process; an address
    (`innet://host:port`, `innets://host:port`) is a server with `--gradients`."""
    learner_threads: Few = 0
    """Threads of the learner's network on a CPU; 0 is one for each core not used by actors and `targets_ahead`."""
    targets_ahead: Switch = "auto"
    """Compute the targets of the next batch in a second thread while the learner updates on this one; `auto`
    does for images on a CPU with more than one core."""
    numerics: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the learner's forward and backward pass; `auto` measures at start-up."""
    layout: Literal["auto", "contiguous", "channels_last", "space_to_depth"] = "auto"
    """Memory layout of the learner's images; `auto` measures at start-up. `space_to_depth`, for `nature` alone, turns
    blocks of 4x4 pixels into channels: the same convolution, with the shape that matrix units want."""
    capture: Annotated[Literal["auto", "off"], BeforeValidator(_switch)] = "auto"
    """Whether an update on CUDA is one graph of kernels; `off` launches them one by one, for comparison."""
    actor_patience: Seconds = 600.0
    """Seconds that the learner waits for steps while no actor is connected, before the run ends with a checkpoint."""
