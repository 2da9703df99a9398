"""A video of the trained agent; Atari games are in colour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from numpy.typing import NDArray
from torch import nn

from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError, UnavailableEnvironmentError
from innet_drl.train.files import new_file, replaceable
from innet_drl.train.networks import q_values
from innet_drl.train.observe.display import Progress, silent
from innet_drl.train.observe.metrics import score_of
from innet_drl.train.play.exploration import choose
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.machine import cores

GAMES = 9
"""Number of games from which the game with the median score is shown."""
UPSCALE = 3
FRAMES_PER_SECOND = {True: 60 // environments.ATARI_FRAME_SKIP, False: 50}
"""Frames per second by `is_atari`: 60 emulator frames, 4 for each step; 50 steps in classic control."""


def record(
    config: Config,
    network: nn.Module,
    path: Path,
    *,
    seed: int = 0,
    seconds: float = 60.0,
    progress: Progress = silent,
) -> float:
    """Plays a game, writes it as an mp4 (H.264), and returns the score so far.

    For Atari it is the game with the median score of `GAMES`; other environments may be unable to repeat a game. The
    video ends after `seconds` at the speed of a human player.
    """
    config = config.evaluated
    if path.suffix != ".mp4":
        raise ConfigurationError(f"--to {path}: videos are mp4 files, name it {path.with_suffix('.mp4').name}")
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"--seconds {seconds}: it must be a number above 0")
    path = replaceable(path)
    partial = path.with_suffix(".partial.mp4")
    # Checked here, because ffmpeg's error of a missing or read-only folder is unclear.
    new_file(partial).close()
    try:
        recorded = _record(config, network, partial, seed, seconds, progress)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return recorded


def _record(config: Config, network: nn.Module, path: Path, seed: int, seconds: float, progress: Progress) -> float:
    frames_per_second = FRAMES_PER_SECOND[config.is_atari]
    play = _play_atari if config.is_atari else _play_gymnasium
    writer: Any = None
    rewards = 0.0
    try:
        game = islice(play(config, network, seed, progress), max(1, int(seconds * frames_per_second)))
        for frame, (picture, reward) in enumerate(game):
            rewards += reward
            done = f"{frame / frames_per_second:.0f} of at most {seconds:.0f} s, score {rewards:g}"
            progress("recording a game", done)
            if writer is None:
                height, width = picture.shape[:2]
                # H.264 needs even heights and widths.
                writer = imageio_ffmpeg.write_frames(
                    str(path),
                    (width, height),
                    fps=frames_per_second,
                    macro_block_size=2,
                    quality=7,
                    ffmpeg_log_level="quiet",
                )
                writer.send(None)
            writer.send(np.ascontiguousarray(picture))
    finally:
        if writer is not None:
            writer.close()
    return score_of(rewards)


def _median_game(config: Config, network: nn.Module, seed: int, progress: Progress) -> tuple[int, NDArray[np.int64]]:
    """Plays `GAMES` games; returns seed and actions, [steps], of the game with the median score."""
    envs = environments.make(config, GAMES, episode_frames=config.evaluation_frames, threads=cores())
    longest = max(1, config.evaluation_frames // envs.spec.frames_per_step)
    random = np.random.default_rng(seed)
    playing, scores, lengths = np.ones(GAMES, np.bool_), np.zeros(GAMES), np.zeros(GAMES, np.int64)
    actions: list[NDArray[np.int64]] = []
    try:
        # Environment i has the seed of the vector environment plus i.
        observation = envs.reset(seed)
        while playing.any() and len(actions) < longest:
            epsilon = np.full(GAMES, config.evaluation_epsilon)
            step = envs.step(choose(q_values(network, observation), epsilon, random))
            observation = step.observation
            actions.append(step.taken)
            scores += step.reward * playing
            lengths += playing
            playing &= ~(step.terminated | step.truncated)
            played = f"{GAMES - playing.sum()} of {GAMES} played, step {len(actions):,}"
            progress("choosing the game of median score", played)
    finally:
        envs.close()
    median = int(np.argsort(scores, kind="stable")[GAMES // 2])
    return seed + median, np.array(actions)[: lengths[median], median]


def _play_atari(
    config: Config, network: nn.Module, seed: int, progress: Progress
) -> Iterator[tuple[NDArray[np.uint8], float]]:
    """Repeats the game with the median score in colour: seed and actions determine it."""
    seed, actions = _median_game(config, network, seed, progress)
    emulator = environments.make_colour(config, episode_frames=config.evaluation_frames)
    emulator.reset(seed=seed)
    for action in actions:
        picture, reward = emulator.step(np.full(1, action))[:2]
        yield picture[0, 0].repeat(UPSCALE, 0).repeat(UPSCALE, 1), float(reward[0])


def _play_gymnasium(
    config: Config, network: nn.Module, seed: int, _: Progress
) -> Iterator[tuple[NDArray[np.uint8], float]]:
    random = np.random.default_rng(seed)
    try:
        environment = environments.make(config, 1, render=True)
        observation = environment.reset(seed)
        ended = False
        while not ended:
            q = q_values(network, observation)
            step = environment.step(choose(q, np.full(1, config.evaluation_epsilon), random))
            observation, ended = step.observation, bool(step.terminated[0] or step.truncated[0])
            picture: Any = environment.vector.render()
            # A vector environment renders each of its environments.
            picture = picture[0] if isinstance(picture, tuple | list) and len(picture) == 1 else picture
            if getattr(picture, "shape", ())[2:] != (3,):
                raise ValueError(
                    f"its render returns {type(picture).__name__}, and a video wants arrays [height, width, 3] of the "
                    "render mode rgb_array"
                )
            yield np.asarray(picture, np.uint8), float(step.reward[0])
        environment.close()
    except Exception as error:
        # A user's environment may raise any error; Gymnasium's base class raises one without a text.
        reason = str(error) or f"its render() raises {type(error).__name__}"
        raise UnavailableEnvironmentError(f"{config.environment_name} cannot be drawn: {reason}") from error
