"""Presets: settings to start from, by name. Only presets have settings of specific games."""

from __future__ import annotations

import dataclasses
from typing import Any

import innet_drl as innet
from innet_drl.errors import closest
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.settings.config import Config

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

PRESETS: dict[str, Config] = {
    "atari": _RECIPE,
    "breakout": _RECIPE,
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
`breakout` is `atari` with that game."""


def preset(name: str, **changes: Any) -> Config:
    """Returns the settings of a preset, with some of them changed.

    Raises:
        ConfigurationError: There is no such preset or setting, or a value makes no sense.
    """
    if name not in PRESETS:
        hint = closest(name, PRESETS, f"there are {', '.join(PRESETS)}")
        raise ConfigurationError(f"there is no preset {name!r} in innet-drl {innet.__version__}{hint}")
    return dataclasses.replace(PRESETS[name], **changes)
