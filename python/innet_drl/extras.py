"""Optional dependencies: the error of a missing one names the extra of the package that installs it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from innet_drl.errors import MissingExtraError

_MODULES = {
    "train": (
        "ale_py",
        "cloudpickle",
        "gymnasium",
        "imageio_ffmpeg",
        "jinja2",
        "loguru",
        "psutil",
        "pydantic",
        "rich",
        "safetensors",
        "scipy",
        "tensorboard",
        "torch",
        "tyro",
        "yaml",
    ),
    "data": ("h5py", "minari", "PIL", "pyarrow"),
    "sb3": ("stable_baselines3",),
    "torchrl": ("tensordict", "torchrl"),
    "tianshou": ("tianshou",),
    "redis": ("lz4", "redis"),
    "wandb": ("wandb",),
    "bench": ("matplotlib",),
    "nvml": ("pynvml",),
    "ray": ("ray",),
}
EXTRAS = {module: extra for extra, modules in _MODULES.items() for module in modules}
"""Extra of the package that installs a module."""


@contextlib.contextmanager
def naming_extras() -> Iterator[None]:
    """Turns the error of a missing optional dependency into one that names the extra.

    Raises:
        MissingExtraError: Instead of a `ModuleNotFoundError`.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        extra = None if error.name is None else EXTRAS.get(error.name.partition(".")[0])
        if extra is None:
            raise
        message = f"{error.name} is not installed: pip install 'innet-drl[{extra}]'"
        raise MissingExtraError(message, name=error.name) from error
