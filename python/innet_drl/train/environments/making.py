"""Vector environments of Atari games by the names of their ROMs, of a Gymnasium id, an import path, or a function.

ale-py preprocesses the frames of Atari games: small, gray, four frames a step.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
import re
import traceback
from collections.abc import Callable
from typing import Any

import ale_py
import gymnasium
from ale_py import roms
from ale_py.vector_env import AtariVectorEnv
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from innet_drl.errors import closest
from innet_drl.train.environments.spaces import EnvironmentSpec, actions, encoder, is_gymnasium, unusable
from innet_drl.train.environments.vector import Environments
from innet_drl.train.errors import ConfigurationError, UnavailableEnvironmentError
from innet_drl.train.settings.slices import EnvironmentSettings
from innet_drl.train.settings.values import import_module, load

ATARI_FRAME_SKIP = 4
"""Emulator frames of one agent step."""


def check_atari(config: EnvironmentSettings) -> None:
    """Looks for an Atari game."""
    for name in ("environment_args", "environment_wrappers"):
        if getattr(config, name):
            raise UnavailableEnvironmentError(
                f"{name}: atari/<game> has settings of its own (stack, sticky_actions, episode_frames): use the "
                "game's Gymnasium id, such as ALE/Breakout-v5, which takes any"
            )
    rom_name(config.environment_name)


def make_atari(config: EnvironmentSettings, count: int, episode_frames: int, threads: int) -> Environments:
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


def make_colour(config: EnvironmentSettings, *, episode_frames: int) -> AtariVectorEnv:
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


gymnasium.register_envs(ale_py)

ASYNC_SETTINGS: dict[str, Any] = {"context": "spawn"}
"""Processes of `--async-environments` are spawned: forks of this process would inherit locks in unknown states, and
forks of the run's fork server would block signals."""


def make(
    config: EnvironmentSettings,
    count: int,
    *,
    episode_frames: int | None = None,
    threads: int = 1,
    render: bool = False,
) -> Environments:
    """Makes `count` environments of the configured kind.

    Args:
        config: Settings of the environment.
        count: Number of environments.
        episode_frames: Emulator frames after which an Atari game is truncated; `None` uses the configured number.
        threads: Threads that step Atari environments.
        render: Make them in the render mode `rgb_array`, in this process. Not for `atari/<game>`.
    """
    if config.is_atari:
        return make_atari(config, count, episode_frames or config.episode_frames, threads)
    name = config.environment_name
    try:
        vector = _make_vector(config, count, render)
    except (ConfigurationError, UnavailableEnvironmentError):
        raise
    except gymnasium.error.Error as error:
        hint = atari_hint(name) or _other_names()
        raise UnavailableEnvironmentError(f"Gymnasium cannot make {name!r} ({error}){hint}") from error
    except Exception as error:
        hint = atari_hint(name)
        # Python raises it in the caller's frame where a call's arguments are wrong.
        caller = traceback.extract_tb(error.__traceback__)[-1].filename
        if isinstance(error, TypeError) and "argument" in str(error) and (caller == __file__ or is_gymnasium(caller)):
            hint = "; its arguments are environment_args"
        raise UnavailableEnvironmentError(
            f"{name!r} cannot be made: it raises {type(error).__name__}: {error}{hint}"
        ) from error
    numbered = actions(vector.single_action_space, name)
    encoded = encoder(vector.single_observation_space, name)
    first, whole = encoded.parts[0], encoded.parts[0].name == ""
    spec = EnvironmentSpec(
        numbered.count,
        config.stack,
        first.shape if whole else (),
        first.dtype if whole else "uint8",
        _frames_per_step(vector),
        first.scale if whole else 255.0,
        () if whole else encoded.parts,
        encoded.left_out,
    )
    return Environments(vector, spec, encoded, numbered, name)


def _other_names() -> str:
    """Last part of a message about an unknown Gymnasium id."""
    if multiprocessing.parent_process() is not None:
        return (
            "; actors import your program without the lines under `if __name__ == '__main__':`: register the id above "
            "them, or name the module that registers it, as in module:Name-v0"
        )
    return (
        "; Atari games are named atari/<game>, factories of your own module:factory, and an id that a module of your "
        "own registers module:Name-v0"
    )


def check(config: EnvironmentSettings) -> None:
    """Checks that the configured environment and its wrappers exist, without making existing ones."""
    if config.is_atari:
        check_atari(config)
        return
    _wrappers(config)
    # Making an unknown id raises its error.
    if _factory(config) is None and config.environment_name.rpartition(":")[2] not in gymnasium.registry:
        make(config, 1).close()


def _wrappers(config: EnvironmentSettings) -> list[Any]:
    return [load(wrapper, "environment_wrappers") for wrapper in config.environment_wrappers]


def _make_vector(config: EnvironmentSettings, count: int, render: bool) -> VectorEnv[Any, Any, Any]:
    wrappers = _wrappers(config)
    arguments = config.environment_args
    factory = _factory(config)
    is_async = config.async_environments and not render
    if factory is not None:
        return _from_factory(config, factory, count, wrappers, is_async, render)
    assert isinstance(config.environment, str)
    # Gymnasium's vector version of an Atari game differs from the game in observations and defaults.
    plain = wrappers or render or config.environment.startswith("ALE/")
    return gymnasium.make_vec(
        config.environment,
        count,
        vectorization_mode="async" if is_async else "sync" if plain else None,
        vector_kwargs=ASYNC_SETTINGS if is_async else None,
        wrappers=wrappers or None,
        **({**arguments, "render_mode": "rgb_array"} if render else arguments),
    )


def _factory(config: EnvironmentSettings) -> Callable[..., Any] | None:
    """The function or class of the setting; `None` for a Gymnasium id."""
    if not isinstance(config.environment, str):
        return config.environment
    module, separator, name = config.environment.partition(":")
    if not separator or not all(part.isidentifier() for part in name.split(".")):
        return None
    found = load(f"{module}:{name}", "environment") if _has(module, name) else None
    if found is None and name not in gymnasium.registry:
        # Raises the error of the import path.
        load(config.environment, "environment")
    return found


def _has(module: str, name: str) -> bool:
    try:
        return hasattr(import_module(module), name.partition(".")[0])
    except Exception:
        return False


def _from_factory(
    config: EnvironmentSettings,
    factory: Callable[..., Any],
    count: int,
    wrappers: list[Any],
    is_async: bool,
    render: bool,
) -> VectorEnv[Any, Any, Any]:
    arguments = dict(config.environment_args)
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    if render and ("render_mode" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())):
        arguments["render_mode"] = "rgb_array"
    if "num_envs" in parameters:
        vector = functools.reduce(lambda inner, wrap: wrap(inner), wrappers, factory(num_envs=count, **arguments))
        if not isinstance(vector, VectorEnv) or vector.num_envs != count:
            raise unusable(
                config.environment_name,
                f"it takes num_envs, and returned {_described(vector)} for num_envs={count}: return a "
                f"gymnasium.vector.VectorEnv of {count} environments, or leave num_envs out and return a gymnasium.Env",
            )
        return vector

    def make_one() -> gymnasium.Env[Any, Any]:
        made = factory(**arguments)
        if not isinstance(made, gymnasium.Env):
            raise unusable(
                config.environment_name,
                f"it returned {_described(made)}: return a gymnasium.Env, or take num_envs and return a "
                "gymnasium.vector.VectorEnv",
            )
        return functools.reduce(lambda inner, wrap: wrap(inner), wrappers, made)

    if is_async:
        return AsyncVectorEnv([make_one] * count, autoreset_mode=AutoresetMode.NEXT_STEP, **ASYNC_SETTINGS)
    return SyncVectorEnv([make_one] * count, autoreset_mode=AutoresetMode.NEXT_STEP)


def _described(made: object) -> str:
    return f"{type(made).__name__} of {made.num_envs}" if isinstance(made, VectorEnv) else type(made).__name__


def _frames_per_step(vector: VectorEnv[Any, Any, Any]) -> int:
    """Emulator frames of a step of a Gymnasium Atari game; 1 for other environments, and if it is random."""
    spec = vector.spec
    skip = spec.kwargs.get("frameskip", 1) if spec is not None and spec.namespace == "ALE" else 1
    return skip if isinstance(skip, int) else 1
