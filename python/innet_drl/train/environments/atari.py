"""Atari games by the names of their ROMs, preprocessed by ale-py: small, gray, four frames a step."""

from __future__ import annotations

import re

import ale_py
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AutoresetMode

from innet_drl.errors import closest
from innet_drl.train.environments.spec import EnvironmentSpec
from innet_drl.train.environments.vector import Environments
from innet_drl.train.errors import UnavailableEnvironmentError
from innet_drl.train.settings.config import Config

ATARI_FRAME_SKIP = 4
"""Emulator frames of one agent step."""


def check_atari(config: Config) -> None:
    """Looks for an Atari game."""
    for name in ("environment_args", "environment_wrappers"):
        if getattr(config, name):
            raise UnavailableEnvironmentError(
                f"{name}: atari/<game> has settings of its own (stack, sticky_actions, episode_frames): use the "
                "game's Gymnasium id, such as ALE/Breakout-v5, which takes any"
            )
    rom_name(config.environment_name)


def make_atari(config: Config, count: int, episode_frames: int, threads: int) -> Environments:
    """Makes `count` environments of an Atari game."""
    check_atari(config)
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    # `episodic_life` would reset the game at each lost life, so that life loss is read from `lives` instead.
    vector = AtariVectorEnv(
        rom_name(config.environment_name),
        count,
        num_threads=min(threads, count),
        stack_num=config.stack,
        img_height=config.frame_size,
        img_width=config.frame_size,
        frameskip=ATARI_FRAME_SKIP,
        max_num_frames_per_episode=episode_frames,
        repeat_action_probability=config.sticky_actions,
        reward_clipping=False,
        autoreset_mode=AutoresetMode.NEXT_STEP,
        noop_max=config.no_ops,
        full_action_space=config.full_action_set,
    )
    actions = list(vector.ale.get_action_set())
    frame = config.frame_size, config.frame_size
    spec = EnvironmentSpec(len(actions), config.stack, frame, "uint8", ATARI_FRAME_SKIP)
    fire = actions.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in actions else None
    return Environments(vector, spec, fire=fire, name=config.environment_name)


def make_colour(config: Config, *, episode_frames: int) -> AtariVectorEnv:
    """Makes one Atari environment in colour, for videos: uint8 [1, 1, 210, 160, 3].

    With the same seed and actions it plays the same game as the environment of `make`.
    """
    return AtariVectorEnv(
        rom_name(config.environment_name),
        1,
        grayscale=False,
        stack_num=1,
        img_height=210,
        img_width=160,
        reward_clipping=False,
        repeat_action_probability=config.sticky_actions,
        max_num_frames_per_episode=episode_frames,
        noop_max=config.no_ops,
        full_action_space=config.full_action_set,
        num_threads=1,
    )


def rom_name(environment: str) -> str:
    """Returns the ROM's name of an environment `atari/<game>`."""
    game = environment.removeprefix("atari/")
    games = roms.get_all_rom_ids()
    if game not in games:
        hint = closest(_snake_case(game), games, "names are as in ale_py.roms.get_all_rom_ids()")
        raise UnavailableEnvironmentError(f"there is no Atari game {game!r}{hint}")
    try:
        roms.get_rom_path(game)
    except OSError as error:
        raise UnavailableEnvironmentError(
            f"the ROM of {game!r} cannot be used ({error}): reinstall ale-py, which brings the ROMs, or "
            "point ALE_ROMS_DIR to a folder that holds it"
        ) from error
    return game


def atari_hint(name: str) -> str:
    """Last part of a message about another name of an Atari game; otherwise empty."""
    game = _snake_case(name.removeprefix("ALE/").partition("-v")[0])
    return f"; did you mean atari/{game}?" if game in roms.get_all_rom_ids() else ""


def _snake_case(name: str) -> str:
    """`SpaceInvaders` and `Space Invaders` are the game `space_invaders`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|[ -]+", "_", name).lower()
