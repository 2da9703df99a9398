"""Settings to start from, by name."""

from __future__ import annotations

from innet_drl.train.config import Config

PRESETS: dict[str, Config] = {
    "breakout": Config(
        environment_threads=2,
        layer_norm=True,
        learning_rate=5e-4,
        n_step=5,
        samples_per_insert=3.0,
        min_size=10_000,
        target_period=500,
    ),
    "breakout-paper": Config(
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
    "cartpole": Config(
        environment="CartPole-v1",
        environments=8,
        stack=1,
        clip_rewards=False,
        life_loss_ends=False,
        steps=120_000,
        epsilon_anneal_steps=2_000,
        capacity=20_000,
        min_size=1_000,
        samples_per_insert=8.0,
        chunk_steps=4,
        pull_period=4,
        batch_size=64,
        learning_rate=5e-4,
        target_period=100,
        publish_period=10,
        learner_threads=1,
        evaluation_games=100,
        evaluation_epsilon=0.0,
        evaluation_period=250,
        target_return=475.0,
        report_seconds=1.0,
        video=False,
    ),
}
"""Settings of each preset; a flag changes one field."""
