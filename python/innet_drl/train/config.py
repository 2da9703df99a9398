"""The settings of a training run: one structure, and its file in the run's folder.

Every field has a default and a flag of the same name (`learning_rate` is `--learning-rate`). A preset is a
`Config` with some defaults changed. A run writes its settings to `config.yaml`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from innet_drl.train.errors import ConfigurationError

RELAYS = {"redis": "innet_drl.bench.redis_memory:RedisMemory"}
"""Memories that experience reaches through a relay, by the scheme of `--replay`: module and class."""

MAX_SEED = 1 << 30
"""Evaluations and environments add to the seed, and Atari seeds have 31 bits."""


MAX_LEARNERS = 64
"""Largest number of workers of a gradient job."""


@dataclass(frozen=True)
class Config:
    """Settings of a run. Steps are agent steps: one action of one environment."""

    # Environment, duration and memory.

    environment: str = "atari/breakout"
    """`atari/<game>` as ale-py names its ROMs, or a Gymnasium id such as `CartPole-v1`."""
    minutes: float | None = None
    """Ends training after this many minutes of this session."""
    steps: int | None = None
    """Ends training at this many agent steps, counted over all sessions of the run."""
    seed: int = 0
    """Seed of networks, environments, exploration and, if the memory is in this process, sampling."""
    serial: bool = False
    """Run one actor and the learner in turn in one process: the run is a function of the seed."""
    replay: str = "embedded"
    """`embedded` keeps the memory in the learner; an address (`innet://host:port`, `innets://host:port`,
    `unix:///path`) uses a server. `redis://host:port` is the baseline: a Redis relays experience and parameters, and
    the learner samples from a memory of its own. The environment variable INNET_TOKEN has the token of the server or
    the password of the Redis."""
    replay_ca: Path | None = None
    """Certificate (PEM) to verify an `innets://` server with."""
    message: Literal["frames", "stacks"] = "frames"
    """Messages to a Redis: `frames` has each frame once, compressed with LZ4; `stacks` is the paper's format, whole
    transitions of stacked float32 observations."""
    message_transitions: int = 200
    """Transitions of one message to a Redis; with `frames` rounded up to whole steps of an actor's environments."""

    # Actors.

    actors: int = 1
    """Actor processes; a serial run always has one actor."""
    environments: int = 16
    """Environments of one actor, stepped together."""
    environment_threads: int = 1
    """Threads that step one actor's Atari environments."""
    actor_threads: int = 1
    """Threads of one actor's network."""
    actor_restarts: int = 3
    """Actors that may die and be replaced before the run fails."""
    pull_period: int = 25
    """Vector steps between checks for newer parameters."""
    epsilon_base: float = 0.4
    """Environment i of N explores with base^(1 + exponent * i / (N - 1)) (Horgan et al., 2018)."""
    epsilon_exponent: float = 7.0
    """See `epsilon_base`."""
    epsilon_anneal_steps: int = 60_000
    """Steps of all actors over which epsilon falls from 1 to its final value; 0 starts with the final value."""

    # Atari.

    stack: int = 4
    """Frames in an observation."""
    sticky_actions: float = 0.0
    """Probability that the emulator repeats the last action (Machado et al., 2018, advise 0.25)."""
    episode_frames: int = 108_000
    """Emulator frames after which a game is truncated: 30 minutes of play."""
    clip_rewards: bool = False
    """Learn from the sign of rewards; scores are always reported unclipped."""
    life_loss_ends: bool = False
    """Let the loss of a life end the learner's episode, but not the game and not the frame stack."""

    # Network.

    channels: tuple[int, int, int] = (16, 32, 32)
    """Filters of the three convolutions (8x8 stride 4, 4x4 stride 2, 3x3 stride 1)."""
    hidden: int = 256
    """Units of each stream, value and advantages, of the dueling head (Wang et al., 2016)."""
    layers: tuple[int, ...] = (128,)
    """Units of the layers before the head, if the observation is a vector."""
    layer_norm: bool = False
    """Normalise the inputs and the hidden units of the head (Ba et al., 2016): stabilises higher learning rates."""

    # Replay.

    capacity: int = 400_000
    """Steps in the memory."""
    min_size: int = 20_000
    """Transitions before learning starts."""
    samples_per_insert: float = 4.0
    """Replay ratio: transitions sampled for each one inserted, independent of the machine's speed."""
    priority_exponent: float = 0.6
    """Alpha of prioritized replay (Schaul et al., 2016); 0 samples uniformly."""
    importance_exponent: float = 0.4
    """Beta of the importance weights."""
    n_step: int = 3
    """Steps of the return."""
    gamma: float = 0.99
    """Discount of one step."""
    chunk_steps: int = 20
    """Steps of one environment that an actor sends together."""
    prefetch: int = 3
    """Batches sampled ahead of the learner."""
    max_bytes: int = 4 << 30
    """Byte limit of an embedded memory; a capacity that does not fit is refused. A server has a limit of its own."""

    # Learner.

    batch_size: int = 64
    """Transitions of one update."""
    learning_rate: float = 2e-4
    """Adam's step size."""
    adam_epsilon: float = 1.5e-4
    """Adam's epsilon (Hessel et al., 2018)."""
    max_gradient_norm: float = 10.0
    """Norm to which gradients are clipped."""
    target_period: int = 1000
    """Updates between copies to the target network."""
    average_decay: float = 0.998
    """Decay of the running average of the weights that is evaluated and recorded; 0 uses the newest weights."""
    publish_period: int = 50
    """Updates between publications of the parameters."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the learner's network; `auto` is CUDA if there is any, but the CPU in a serial run: results of CUDA
    are not a function of the seed."""
    learners: int = 1
    """Learner processes. Each samples batches of its own, and all apply the mean of their gradients: an update uses
    `learners` times `batch_size` transitions."""
    gradients: str = "embedded"
    """Aggregator of several learners' gradients: `embedded` is the first learner's process; an address
    (`innet://host:port`, `innets://host:port`) is a server with `--gradients`."""
    learner_deadline: float = 300.0
    """Seconds that a learner waits for the others before the run fails; they include evaluations and checkpoints."""
    learner_threads: int = 0
    """Threads of the learner's network on a CPU; 0 is one for each core not used by actors and `targets_ahead`."""
    targets_ahead: Literal["auto", "on", "off"] = "auto"
    """Compute the targets of the next batch in a second thread while the learner updates on this one; `auto`
    does for images on a CPU with more than one core."""
    numerics: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the learner's forward and backward pass; `auto` measures at start-up."""
    layout: Literal["auto", "contiguous", "channels_last"] = "auto"
    """Memory layout of the learner's images; `auto` measures at start-up."""

    # Evaluation.

    evaluation_games: int = 30
    """Games of one evaluation."""
    evaluation_epsilon: float = 0.001
    """Random actions in an evaluation."""
    evaluation_frames: int = 18_000
    """Emulator frames after which an evaluated game is truncated: 5 minutes of play (Mnih et al., 2015)."""
    evaluation_period: int = 0
    """Updates between evaluations; 0 evaluates only at the end."""
    target_return: float | None = None
    """Mean return of an evaluation at which training ends."""
    video: bool = True
    """Record a game of the trained agent at the end."""

    # Files.

    checkpoint_minutes: float = 5.0
    """Minutes between checkpoints; the last one is always written."""
    checkpoint_replay: bool = True
    """Write a snapshot of an embedded memory with each checkpoint, which a resumed run restores. A step takes as many
    bytes as in memory. A serial run of environments that can be restored keeps a journal instead."""
    report_seconds: float = 5.0
    """Seconds between lines of metrics."""
    report_steps: int = 1000
    """Agent steps between lines of metrics of serial runs, which do not depend on the clock."""

    def __post_init__(self) -> None:
        for name in (
            "actors",
            "learners",
            "environments",
            "environment_threads",
            "actor_threads",
            "pull_period",
            "stack",
            "episode_frames",
            "hidden",
            "capacity",
            "min_size",
            "message_transitions",
            "n_step",
            "chunk_steps",
            "batch_size",
            "target_period",
            "publish_period",
            "evaluation_games",
            "evaluation_frames",
            "report_steps",
            "max_bytes",
        ):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in (
            "actor_restarts",
            "epsilon_anneal_steps",
            "prefetch",
            "learner_threads",
            "evaluation_period",
        ):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "at least 0")
        _require(0 <= self.seed < MAX_SEED, "seed", self.seed, f"from 0 to {MAX_SEED - 1}")
        _require(
            self.stack >= 2 or not self.is_atari,
            "stack",
            self.stack,
            "at least 2 in Atari games: one frame shows no motion",
        )
        _require(len(self.channels) == 3, "channels", self.channels, "of three convolutions")
        for name in ("channels", "layers"):
            widths = getattr(self, name)
            _require(all(width >= 1 for width in widths), name, widths, "at least 1 each")
        for name in (
            "samples_per_insert",
            "learner_deadline",
            "learning_rate",
            "adam_epsilon",
            "max_gradient_norm",
            "checkpoint_minutes",
            "report_seconds",
        ):
            _require(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in (
            "gamma",
            "sticky_actions",
            "evaluation_epsilon",
            "epsilon_base",
            "importance_exponent",
            "average_decay",
        ):
            _require(0 <= getattr(self, name) <= 1, name, getattr(self, name), "from 0 to 1")
        for name in ("minutes", "steps"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "above 0")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            _require(not isinstance(value, float) or math.isfinite(value), field.name, value, "a finite number")
        _require(
            self.replay_ca is None or self.replay_ca.is_file(), "replay_ca", self.replay_ca, "a file with a certificate"
        )
        _require(
            not (self.serial and self.relayed),
            "replay",
            self.replay,
            "left away in a serial run, which is one process with its memory in it",
        )
        _require(
            self.learners == 1 or not (self.serial or self.relayed),
            "learners",
            self.learners,
            "1 in a serial run, and where a Redis passes the experience on",
        )
        _require(self.learners <= MAX_LEARNERS, "learners", self.learners, f"at most {MAX_LEARNERS}")
        _require(self.min_size < self.capacity, "min_size", self.min_size, f"below the capacity ({self.capacity})")
        under_way = self.environments * (self.chunk_steps + self.n_step)
        _require(
            self.min_size > under_way,
            "min_size",
            self.min_size,
            f"above {under_way}, the steps of an actor before its first chunks arrive",
        )
        _require(
            self.min_size >= self.batch_size,
            "min_size",
            self.min_size,
            f"at least a batch ({self.batch_size})",
        )

    @property
    def relayed(self) -> bool:
        """Whether experience and parameters pass through a relay to a memory in the learner's process."""
        return self.replay.partition("://")[0] in RELAYS

    @property
    def is_atari(self) -> bool:
        """Whether the environment is an Atari game."""
        return self.environment.startswith("atari/")

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
        pushed = 2 * self.chunk_steps * self.all_environments * self.samples_per_insert
        drawn = (self.prefetch + 2) * self.batch_size * self.learners
        return float(pushed + drawn)

    def changed_flags(self, other: Config, names: Iterable[str]) -> str:
        """Returns the flags of the named settings that differ from the other's, for a message; may be empty."""
        return flags(name for name in names if getattr(self, name) != getattr(other, name))

    def save(self, path: Path) -> None:
        """Writes every field to a YAML file."""
        values = dataclasses.asdict(self)
        values["replay_ca"] = None if self.replay_ca is None else str(self.replay_ca)
        plain = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}
        path.write_text(yaml.safe_dump(plain, sort_keys=False))

    @classmethod
    def load(cls, path: Path) -> Config:
        """Reads a file that `save` wrote.

        Raises:
            ConfigurationError: The file is missing, or does not hold settings.
        """
        try:
            values: Any = yaml.safe_load(path.read_text())
        except OSError as error:
            raise ConfigurationError(f"{path.parent} is no run: {path} cannot be read ({error.strerror})") from error
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{path} is not YAML: {error}") from error
        known = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or not values.keys() <= known:
            unknown = sorted(values.keys() - known) if isinstance(values, dict) else "no fields"
            raise ConfigurationError(f"{path} does not hold the settings of this release: {unknown}")
        try:
            for name in ("channels", "layers"):
                if name in values:
                    values[name] = tuple(values[name])
            if values.get("replay_ca") is not None:
                values["replay_ca"] = Path(values["replay_ca"])
            return cls(**values)
        except TypeError as error:
            raise ConfigurationError(f"{path} has a field of a wrong type: {error}") from error


def flag(name: str) -> str:
    """Returns the flag of a field: `learning_rate` is `--learning-rate`."""
    return f"--{name.replace('_', '-')}"


def flags(names: Iterable[str]) -> str:
    """Returns the flags of several fields, for a message."""
    return " and ".join(flag(name) for name in names)


def _require(holds: bool, name: str, value: object, wanted: str) -> None:
    if not holds:
        raise ConfigurationError(f"{flag(name)} {value}: it must be {wanted}")
