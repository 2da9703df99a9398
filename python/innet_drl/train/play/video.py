"""A video of the trained agent; Atari games are in colour."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import nn

from innet_drl.errors import naming_extras
from innet_drl.train import environments
from innet_drl.train.errors import ConfigurationError, UnavailableEnvironmentError
from innet_drl.train.files import replacing
from innet_drl.train.networks import q_values
from innet_drl.train.observe.display import Progress, silent
from innet_drl.train.observe.metrics import score_of
from innet_drl.train.play.exploration import choose
from innet_drl.train.settings.config import Config

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
    """Plays the game of the seed, writes it as an mp4 (H.264), and returns the score so far.

    The video ends after `seconds` at the speed of a human player.
    """
    config = config.evaluated
    if path.suffix != ".mp4":
        raise ConfigurationError(f"--to {path}: videos are mp4 files, name it {path.with_suffix('.mp4').name}")
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"--seconds {seconds}: it must be a number above 0")
    with replacing(path) as file:
        return _record(config, network, file, seed, seconds, progress)


def _record(config: Config, network: nn.Module, path: Path, seed: int, seconds: float, progress: Progress) -> float:
    with naming_extras():
        import imageio_ffmpeg
    frames_per_second = FRAMES_PER_SECOND[config.is_atari]
    writer: Any = None
    rewards = 0.0
    try:
        game = islice(_play(config, network, seed), max(1, int(seconds * frames_per_second)))
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
                    output_params=["-f", "mp4"],
                )
                writer.send(None)
            writer.send(np.ascontiguousarray(picture))
    finally:
        if writer is not None:
            writer.close()
    return score_of(rewards)


def _play(config: Config, network: nn.Module, seed: int) -> Iterator[tuple[NDArray[np.uint8], float]]:
    """Yields picture and reward of each step of the game of the seed."""
    random = np.random.default_rng(seed)
    colour: Any = None
    with contextlib.ExitStack() as opened, _named(config):
        envs = environments.make(config, 1, episode_frames=config.evaluation_frames, render=True)
        opened.callback(envs.close)
        observation = envs.reset(seed)
        if config.is_atari:
            # With the same seed and actions it plays the same game.
            colour = environments.make_colour(config, episode_frames=config.evaluation_frames)
            opened.callback(colour.close)
            colour.reset(seed=seed)
        ended = False
        while not ended:
            step = envs.step(choose(q_values(network, observation), np.full(1, config.evaluation_epsilon), random))
            observation, ended = step.observation, bool(step.terminated[0] or step.truncated[0])
            if colour is None:
                yield _rendered(envs), float(step.reward[0])
            else:
                screen, reward = colour.step(step.taken)[:2]
                yield screen[0, 0].repeat(UPSCALE, 0).repeat(UPSCALE, 1), float(reward[0])


@contextlib.contextmanager
def _named(config: Config) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A user's environment may raise any error; Gymnasium's base class raises one without a text.
        reason = str(error) or f"its render() raises {type(error).__name__}"
        raise UnavailableEnvironmentError(f"{config.environment_name} cannot be drawn: {reason}") from error


def _rendered(envs: environments.Environments) -> NDArray[np.uint8]:
    picture: Any = envs.vector.render()
    # A vector environment renders each of its environments.
    picture = picture[0] if isinstance(picture, tuple | list) and len(picture) == 1 else picture
    if getattr(picture, "shape", ())[2:] != (3,):
        raise ValueError(
            f"its render returns {type(picture).__name__}, and a video wants arrays [height, width, 3] of the render "
            "mode rgb_array"
        )
    return np.asarray(picture, np.uint8)
