"""The settings of a training run: one structure, its file in the run's folder, and presets.

Every field has a flag of the same name (`learning_rate` is `--learning-rate`). The defaults suit vector observations
and no specific game: a game's preset is a `Config` with other defaults. A run writes its settings to `config.yaml`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import logging
import sys
from pathlib import Path
from typing import Any

import pydantic.dataclasses

import innet_drl as innet
from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.slices import (
    CHECKED,
    ActorSettings,
    Count,
    KeywordArguments,
    LearnerSettings,
    Minutes,
    Natural,
    Seconds,
    Settings,
    Share,
    unknown,
)
from innet_drl.train.settings.values import Importable, can_be_imported, path_of, read_mapping, write_mapping

logger = logging.getLogger(__name__)

SERVER_SCHEMES = ("innet", "innets", "innet+fstack", "unix")
"""Schemes of server addresses. Other packages add memories with their own schemes."""
NEWER = "install the release that wrote the file, which may be newer"
"""Last part of messages about settings in a file."""


@pydantic.dataclasses.dataclass(frozen=True, config=CHECKED)
class Config(LearnerSettings, ActorSettings):
    """Settings of a run. Steps are agent steps: one action of one environment.

    Each is a flag of `innet-drl train`, too. `--help-all` shows the values of a preset.

    Raises:
        ConfigurationError: An unknown setting, or a value of another type or out of range.
    """

    minutes: Minutes | None = None
    """Ends training after this many minutes of this session."""
    steps: Count | None = None
    """Ends training at this many agent steps, counted over all sessions of the run. Actor processes exceed it by up
    to a second of steps."""
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


SLICES = [each for each in reversed(Config.__mro__) if issubclass(each, Settings) and each.__annotations__]
"""`Config` and its slices."""


def meanings() -> dict[str, str]:
    """The meaning of each setting, from the text below it; none without the sources."""
    found = {}
    with contextlib.suppress(OSError):
        for module in dict.fromkeys(each.__module__ for each in SLICES):
            for each in ast.parse(inspect.getsource(sys.modules[module])).body:
                for field, text in itertools.pairwise(each.body if isinstance(each, ast.ClassDef) else ()):
                    if isinstance(field, ast.AnnAssign):
                        found[field.target.id] = " ".join(text.value.value.split())  # type: ignore[union-attr, attr-defined]
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Reads some settings, or all, from a YAML or TOML file, for `Config` or `dataclasses.replace`."""
    values, known = read_mapping(path), [field.name for field in dataclasses.fields(Config)]
    for name in values:
        if name not in known:
            raise ConfigurationError(f"{path}: {unknown(str(name), known, f'remove it, or {NEWER}')}")
    return values


def _unpickled(values: bytes) -> Config:
    import cloudpickle

    return Config(**cloudpickle.loads(values))


_VECTOR = Config(environment="CartPole-v1", learner_threads=1, report_seconds=1.0)

_ATARI = Config(
    environment="atari/breakout",
    environments=16,
    stack=4,
    clip_rewards=True,
    life_loss_ends=True,
    pull_period=25,
    epsilon_anneal_steps=60_000,
    capacity=400_000,
    chunk_steps=20,
    publish_period=50,
    evaluation_epsilon=0.001,
)

# Two cores make few updates: small frames double the rate, and with a replay ratio of 2 learning continues for an hour,
# with 8 for a quarter of that. docs/how-to/training.md has the reasons for the other settings.
_RECIPE = dataclasses.replace(
    _ATARI,
    environment_threads=2,
    frame_size=64,
    layer_norm=True,
    samples_per_insert=2.0,
    priority_exponent=0.2,
    normalize_weights="memory",
    min_size=10_000,
    epsilon_base=0.1,
    epsilon_exponent=3.0,
    learning_rate=2.5e-4,
    learning_rate_final=5e-5,
    learning_rate_anneal_updates=200_000,
    adam_epsilon=1e-5,
    target_period=500,
    average_decay=0.995,
)

# An update of 256 takes a data-center GPU a millisecond, in which a dozen actors take some 15 steps: a replay ratio of
# 8 asks for half an update in that time, as far as the copies of batches keep up. Each environment thread would take a
# core from another actor. Not run on a GPU yet.
_GPU = dataclasses.replace(
    _RECIPE,
    actors=8,
    environment_threads=1,
    frame_size=84,
    channels=(32, 64, 64),
    hidden=512,
    capacity=1_000_000,
    min_size=40_000,
    samples_per_insert=8.0,
    batch_size=256,
    publish_period=200,
    device="cuda",
)
ON_GPU = ("atari-gpu", "breakout-gpu")
"""Presets whose actors are the number for the machine, on the command line."""

PRESETS: dict[str, Config] = {
    "atari": _RECIPE,
    "atari-gpu": _GPU,
    "breakout": _RECIPE,
    "breakout-gpu": _GPU,
    "breakout-paper": dataclasses.replace(
        _ATARI,
        actors=4,
        channels=(32, 64, 64),
        hidden=512,
        capacity=1_000_000,
        min_size=50_000,
        samples_per_insert=1.0,
        batch_size=512,
        learning_rate=1e-4,
        max_gradient_norm=40.0,
        target_period=2500,
        epsilon_anneal_steps=0,
        chunk_steps=50,
        prefetch=16,
        evaluation_frames=108_000,
        publish="newest",
    ),
    "cartpole": dataclasses.replace(
        _VECTOR,
        steps=120_000,
        epsilon_anneal_steps=2_000,
        capacity=20_000,
        min_size=1_000,
        n_step=5,
        batch_size=64,
        target_period=100,
        evaluation_games=100,
        evaluation_period=250,
        target_return=475.0,
        video=False,
    ),
    "vector": _VECTOR,
}
"""Settings of each preset; a flag changes one field. `vector` is for vector observations, and `atari` for any game:
`breakout` is `atari` with that game, and the presets for a GPU likewise."""


def preset(name: str, **changes: Any) -> Config:
    """Returns the settings of a preset, with some of them changed.

    Raises:
        ConfigurationError: There is no such preset or setting, or a value makes no sense.
    """
    if name not in PRESETS:
        hint = closest(name, PRESETS, f"there are {', '.join(PRESETS)}")
        raise ConfigurationError(f"there is no preset {name!r} in innet-drl {innet.__version__}{hint}")
    return dataclasses.replace(PRESETS[name], **changes)
