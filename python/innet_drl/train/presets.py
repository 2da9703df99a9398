"""Settings to start from, by name. Settings that belong to a game are here alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import innet_drl as innet
from innet_drl.train.config import Config, check_names
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.setting_values import did_you_mean

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

PRESETS: dict[str, Config] = {
    "breakout": dataclasses.replace(
        _ATARI,
        environment_threads=2,
        layer_norm=True,
        n_step=5,
        samples_per_insert=3.0,
        min_size=10_000,
        target_period=500,
    ),
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
"""Settings of each preset; a flag changes one field. `vector` is for environments whose observations are vectors."""


def preset(name: str, **changes: Any) -> Config:
    """Returns the settings of a preset, with some of them changed.

    Raises:
        ConfigurationError: There is no such preset or setting, or a value makes no sense.
    """
    if name not in PRESETS:
        hint = did_you_mean(name, PRESETS, otherwise=f"there are {', '.join(PRESETS)}")
        raise ConfigurationError(f"there is no preset {name!r} in innet-drl {innet.__version__}{hint}")
    check_names(changes)
    return dataclasses.replace(PRESETS[name], **changes)
