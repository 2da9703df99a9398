"""The settings of a training run: one structure, and its file in the run's folder.

Every field has a flag of the same name (`learning_rate` is `--learning-rate`). The defaults suit vector observations
and no specific game: a game's preset is a `Config` with other defaults. A run writes its settings to `config.yaml`.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args, get_type_hints

import innet_drl as innet
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.importing import Importable, is_path, near_path, path_of
from innet_drl.train.setting_values import (
    can_be_imported,
    conform,
    did_you_mean,
    plain,
    read_mapping,
    write_mapping,
)

logger = logging.getLogger(__name__)

SERVER_SCHEMES = ("innet", "innets", "innet+fstack", "unix")
"""Schemes of server addresses. Other packages add memories with their own schemes."""

NETWORKS = ("auto", "nature", "impala", "mlp", "dict")
"""Names of `--network`."""

LOSSES = ("double_q", "categorical", "quantile")
"""Names of `--loss`."""

PATH = "an import path module:name"
"""Last part of messages about settings that may be import paths."""

NEWER = "install the release that wrote the file, which may be newer"
"""Last part of messages about settings in a file."""

EMBEDDED = "embedded, or an address such as innet://host:7710"

NAMESPACE = "[A-Za-z0-9._-]{1,40}"
"""Pattern of namespaces, as in `innet_drl.connect`."""

MAX_SEED = 1 << 30
"""Largest seed: evaluations and environments add to it, and Atari seeds have 31 bits."""

MAX_LEARNERS = 64
"""Largest number of workers of a gradient job."""

Bound = tuple[Callable[[Any], bool], str]
"""A check of a setting's value, which may be `None` if its type allows it, and the allowed values in words."""
Count = Annotated[int, (lambda value: value is None or 1 <= value <= 2**40, "at least 1 and at most 2^40")]
Several = Annotated[int, (lambda value: value >= 2, "at least 2")]
Natural = Annotated[int, (lambda value: 0 <= value <= 2**40, "at least 0 and at most 2^40")]
Few = Annotated[int, (lambda value: 0 <= value <= 1024, "at least 0 and at most 1024")]
Threads = Annotated[int, (lambda value: 1 <= value <= 1024, "at least 1 and at most 1024")]
Seed = Annotated[int, (lambda value: 0 <= value < MAX_SEED, f"from 0 to {MAX_SEED - 1}")]
Positive = Annotated[float, (lambda value: value is None or value > 0, "above 0")]
Seconds = Annotated[float, (lambda value: value is None or 0 < value <= 1e9, "above 0 and at most 1e9")]
Minutes = Annotated[float, (lambda value: value is None or 0 < value <= 1e7, "above 0 and at most 1e7")]
Share = Annotated[float, (lambda value: 0 <= value <= 1, "from 0 to 1")]
KeywordArguments = dict[str, Any]


class _Named:
    """Raises a clear error for unknown arguments, unlike a dataclass."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        check_names(settings)
        return super().__new__(cls)


@dataclass(frozen=True)
class Config(_Named):
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
    environment_wrappers: tuple[Importable, ...] = ()
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
    replay: str = "embedded"
    """`embedded` keeps the memory in the learner; an address (`innet://host:port`, `innets://host:port`,
    `unix:///path`) uses a server. Packages add memories with schemes and options of their own
    (`scheme://host:port?option=value`). The environment variable INNET_TOKEN has the token or
    password, and INNET_ACTOR_TOKEN, if set, the actors' token of a server."""
    namespace: str = ""
    """The run's namespace at a server that several runs share: the names of its tables and parameters there begin with
    it. Up to 40 ASCII letters, digits, `.`, `_` and `-`; empty for none."""
    replay_ca: Path | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    replay_patience: Seconds = 60.0
    """Seconds that a run waits for a server (`--replay`) that is away or does not answer, before it ends with a
    checkpoint."""
    actor_patience: Seconds = 600.0
    """Seconds that the learner waits for steps while no actor is connected, before the run ends with a checkpoint."""

    preload: str | Path | None = None
    """Data set of demonstrations that the run starts from, as `innet_drl.datasets` names it: `FILE.parquet`, `FILE.npz`
    or `minari:NAME`. Its observation is `observation`, or `frame` as in the export of a run."""
    preload_share: Share = 0.25
    """Share of the demonstrations in each batch; they are in a table of their own, which evicts none, and the replay
    ratio does not count them. 0 puts them into the run's own table, as fast as the replay ratio admits them, where new
    steps evict them."""

    # Actors.

    actors: Count = 1
    """Actor processes; a serial run always has one actor. On the command line `--actors auto` takes the number that a
    sweep recommends (`innet-drl analyze ratio`)."""
    environments: Count = 8
    """Environments of one actor, stepped together."""
    environment_threads: Threads = 1
    """Threads that step one actor's Atari environments."""
    actor_threads: Threads = 1
    """Threads of one actor's network."""
    actor_restarts: Natural = 3
    """Actors that may die and be replaced within ten minutes before the run fails."""
    environment_timeout: Seconds | None = None
    """Seconds of one step or reset of the environments after which an actor prints its stacks and is replaced: for
    environments that may hang. None waits, and the log names the actor after a minute. Not in a serial run."""
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

    frame_size: Count = 84
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

    network: Importable = "auto"
    """`nature` or `impala` for images, `mlp` for vectors, `dict` for dictionaries, or `module:Class`; `auto` chooses
    by the observation, and `nature` for images of 36 pixels and more."""
    channels: tuple[int, int, int] = (16, 32, 32)
    """Filters of the three convolutions of `nature` (8x8 stride 4, 4x4 stride 2, 3x3 stride 1), or of the three
    sections of `impala`."""
    hidden: Count = 256
    """Units of each stream, value and advantages, of the dueling head (Wang et al., 2016)."""
    layers: tuple[int, ...] = (128,)
    """Units of the layers before the head, if the observation is a vector."""
    layer_norm: bool = False
    """Normalise the hidden units of the head (Ba et al., 2016): stabilises higher learning rates."""

    # Loss.

    loss: Importable = "double_q"
    """`double_q`, `categorical` (C51), `quantile` (QR-DQN), or `module:function`."""
    munchausen: bool = False
    """Add the scaled log-policy to the reward and bootstrap from the soft value (Vieillard et al., 2020)."""
    munchausen_scale: Share = 0.9
    """Alpha: factor of the log-policy."""
    munchausen_temperature: Positive = 0.03
    """Tau: temperature of the policy, softmax(Q / tau)."""
    munchausen_floor: float = -1.0
    """Lower bound of tau times the log-policy."""
    atoms: Several = 51
    """Atoms of `categorical`."""
    value_range: tuple[float, float] = (-10.0, 10.0)
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
    learners: Count = 1
    """Learner processes. Each samples batches of its own, and all apply the mean of their gradients: an update uses
    `learners` times `batch_size` transitions."""
    gradients: str = "embedded"
    """Aggregator of several learners' gradients: `embedded` is the first learner's process; an address
    (`innet://host:port`, `innets://host:port`) is a server with `--gradients`."""
    learner_threads: Few = 0
    """Threads of the learner's network on a CPU; 0 is one for each core not used by actors and `targets_ahead`."""
    targets_ahead: Literal["auto", "on", "off"] = "auto"
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
    """Keyword arguments of evaluations' environment, in place of `environment_args`; alone they are for the same
    environment."""
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
    trace_seconds: Seconds | None = None
    """Seconds, from the first update on, of which every process records a trace for `innet-drl analyze breakdown
    --trace`; none by default."""

    def __post_init__(self) -> None:
        for name, (hint, _) in _hints().items():
            object.__setattr__(self, name, conform(name, getattr(self, name), hint))
        for name, holds, wanted in self._checks():
            if not holds:
                value = getattr(self, name)
                near = near_path(value) if wanted.endswith(PATH) else ""
                raise ConfigurationError(f"{{{name}}} {{value}}: it must be {wanted}{{near}}", value=value, near=near)

    def _checks(self) -> Iterator[tuple[str, bool, str]]:
        """Yields names of settings, whether their values are valid, and the allowed values as a message template."""
        for name, (_, bounds) in _hints().items():
            value = getattr(self, name)
            yield name, not isinstance(value, float) or math.isfinite(value), "a finite number"
            yield from ((name, holds(value), wanted) for holds, wanted in bounds)
        scheme, lowest = self.replay.partition("://")[0], self.environments * (self.chunk_steps + self.n_step)
        motion = "at least 2 in Atari games, where one frame shows no motion (the preset breakout has 4)"
        yield "stack", self.stack >= 2 or not self.is_atari, motion
        patient = self.environment_timeout is None or self.environment_timeout >= 2
        yield "environment_timeout", patient, "at least 2: a busy machine delays steps"
        yield "frame_size", self.frame_size <= 210, "at most 210, the height of the console's picture"
        yield "channels", len(self.channels) == 3, "of three convolutions"
        for name in ("channels", "layers"):
            yield name, min(getattr(self, name), default=1) >= 1, "at least 1 each"
        for name, known in (("network", NETWORKS), ("loss", LOSSES)):
            own = getattr(self, name)
            yield name, callable(own) or is_path(own) or own in known, f"{', '.join(known)}, or {PATH}"
        bounded = len(self.value_range) == 2 and -math.inf < self.value_range[0] < self.value_range[1] < math.inf
        yield "value_range", bounded, "a lower and a higher return"
        yield "munchausen_floor", self.munchausen_floor <= 0, "at most 0"
        threads = "omitted for Atari games, which {environment_threads} steps"
        yield "async_environments", not (self.async_environments and self.is_atari), threads
        one = "omitted in a serial run, which is one process with its memory in it"
        yield "replay", not self.serial or self.replay == "embedded", one
        fits = not self.namespace or re.fullmatch(NAMESPACE, self.namespace) is not None
        yield "namespace", fits, "up to 40 ASCII letters, digits, '.', '_' and '-'"
        shared = "empty without a server ({replay} innet://host:port), which other runs could share"
        yield "namespace", not self.namespace or scheme in SERVER_SCHEMES, shared
        ours = self.preload is None or self.replay == "embedded" or scheme in SERVER_SCHEMES
        yield "preload", ours, "omitted with the memory of another package"
        both = not (self.preload and self.preload_share) or 0 < self.demonstrations < self.batch_size
        yield "preload_share", both, f"0, or a share of a batch ({self.batch_size}) that leaves items of each table"
        for name in ("replay", "gradients"):
            yield name, not _is_nearly_embedded(getattr(self, name)), EMBEDDED
        both = (self.learning_rate_final is None) == (self.learning_rate_anneal_updates == 0)
        yield "learning_rate_final", both, "given with {learning_rate_anneal_updates}, and not without"
        averaged = self.publish == "newest" or self.average_decay > 0
        yield "publish", averaged, "newest without an average ({average_decay} 0)"
        yield "learners", self.learners == 1 or not self.serial, "1 in a serial run"
        yield "learners", self.learners <= MAX_LEARNERS, f"at most {MAX_LEARNERS}"
        yield "min_size", self.min_size < self.capacity, f"below the capacity ({self.capacity})"
        arrive = f"above {lowest}, the steps of an actor before its first chunks arrive"
        yield "min_size", self.min_size > lowest, arrive
        yield "min_size", self.min_size >= self.batch_size, f"at least a batch ({self.batch_size})"

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
            hints = [f"{name}{did_you_mean(name, known)}" for name in other]
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
            # The error spells settings as the file does.
            raise ConfigurationError(f"{path}: {error}; correct it, or {NEWER}") from error


def read_settings(path: Path) -> dict[str, Any]:
    """Reads some settings, or all, from a YAML or TOML file, for `Config` or `dataclasses.replace`."""
    values = read_mapping(path)
    check_names(values, f"{path}: ")
    return values


def check_names(names: Iterable[str], where: str = "") -> None:
    """Checks names of settings."""
    known = [field.name for field in dataclasses.fields(Config)]
    unknown = f"remove it, or {NEWER}" if where else "innet-drl train --help lists them"
    for name in names:
        if name not in known:
            hint = did_you_mean(str(name), known, otherwise=unknown)
            if name == "preset":
                hint = ": a preset is chosen by the flag --preset, or by train.preset(name)"
            raise ConfigurationError(f"{where}there is no setting {name!r} in innet-drl {innet.__version__}{hint}")


@functools.cache
def _hints() -> dict[str, tuple[Any, list[Bound]]]:
    """Types of the settings, each with its bounds."""
    types, found = get_type_hints(Config), {}
    for name, hint in get_type_hints(Config, include_extras=True).items():
        bounds = [bound for each in (hint, *get_args(hint)) for bound in getattr(each, "__metadata__", ())]
        found[name] = types[name], bounds
    return found


def _unpickled(values: bytes) -> Config:
    import cloudpickle

    return Config(**cloudpickle.loads(values))


def _is_nearly_embedded(address: str) -> bool:
    return address != "embedded" and bool(difflib.get_close_matches(address, ["embedded"], cutoff=0.8))
