"""Settings to start from, by name."""

from __future__ import annotations

import dataclasses

from innet_drl.train.config import Config

_VECTOR = Config(
    environment="CartPole-v1",
    environments=8,
    epsilon_anneal_steps=20_000,
    capacity=200_000,
    min_size=2_000,
    samples_per_insert=8.0,
    chunk_steps=4,
    pull_period=4,
    learning_rate=5e-4,
    target_period=250,
    publish_period=10,
    learner_threads=1,
    evaluation_epsilon=0.0,
    report_seconds=1.0,
)

PRESETS: dict[str, Config] = {
    "breakout": Config(
        environment="atari/breakout",
        stack=4,
        clip_rewards=True,
        life_loss_ends=True,
        environment_threads=2,
        layer_norm=True,
        learning_rate=5e-4,
        n_step=5,
        samples_per_insert=3.0,
        min_size=10_000,
        target_period=500,
    ),
    "breakout-paper": Config(
        environment="atari/breakout",
        stack=4,
        clip_rewards=True,
        life_loss_ends=True,
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
