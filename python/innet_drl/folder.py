"""The folder a run leaves: settings, metrics, checkpoints, videos.

runs/<name>/
    config.yaml             the settings, all of them
    metrics.jsonl           one `innet_drl.metrics.Metrics` a line
    events.out.tfevents.*   the same for TensorBoard
    checkpoints/            <agent steps>.safetensors: model, target, optimizer; counters and random
                            states as JSON in the file's metadata
    videos/                 <agent steps>.mp4
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from innet_drl.config import Config
from innet_drl.faults import RunFolderError

KEPT_CHECKPOINTS = 3


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    path: Path
    tensors: dict[str, Tensor]
    state: dict[str, Any]
    """Counters and random states, as plain JSON values."""


class RunFolder:
    """A run's folder that exists; `create` and `open` make one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.videos = path / "videos"

    @property
    def name(self) -> str:
        """The run's name: also that of its table and its parameters in the replay memory."""
        return self.path.resolve().name

    @classmethod
    def create(cls, path: Path, config: Config) -> RunFolder:
        """Makes the folder of a new run.

        Raises:
            RunFolderError: There is a run in it already, or it cannot be written.
        """
        if (path / "config.yaml").exists():
            raise RunFolderError(f"{path} holds a run already: go on with --resume {path}, or choose another --out")
        folder = cls(path)
        with folder.writing():
            folder.checkpoints.mkdir(parents=True, exist_ok=True)
            folder.videos.mkdir(exist_ok=True)
            config.save(path / "config.yaml")
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was made before.

        Raises:
            RunFolderError: There is no run.
        """
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} is no run: it has no config.yaml")
        return cls(path)

    def config(self) -> Config:
        """The run's settings."""
        return Config.load(self.path / "config.yaml")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns what the operating system says about a write into an error that says what to do.

        Raises:
            RunFolderError: In place of an `OSError`.
        """
        try:
            yield
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                advice = f"the disk is full: free some space and go on with --resume {self.path}"
            elif error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                advice = "it may not be written: choose another folder with --out"
            else:
                advice = f"{error.strerror or error}"
            raise RunFolderError(f"the run's folder {self.path}: {advice}") from error

    def save_checkpoint(self, agent_steps: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Writes a checkpoint under another name and renames it, then removes the oldest ones.

        Raises:
            RunFolderError: It cannot be written; the checkpoints there are stay whole.
        """
        path = self.checkpoints / f"{agent_steps:012d}.safetensors"
        partial = path.with_suffix(".partial")
        content = safetensors.torch.save(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            {"state": json.dumps(state)},
        )
        with self.writing():
            try:
                with partial.open("wb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)
            for old in self._checkpoint_paths()[:-KEPT_CHECKPOINTS]:
                old.unlink(missing_ok=True)
        return path

    def latest_checkpoint(self) -> Checkpoint:
        """The newest checkpoint.

        Raises:
            RunFolderError: There is none, or it is damaged.
        """
        paths = self._checkpoint_paths()
        if not paths:
            raise RunFolderError(f"{self.path} has no checkpoint yet: start the run again, with another --out")
        try:
            with safetensors.safe_open(paths[-1], framework="pt") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
                state = json.loads(file.metadata()["state"])
        except (safetensors.SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise RunFolderError(
                f"the checkpoint {paths[-1]} cannot be read ({error}): remove it to use the one before"
            ) from error
        return Checkpoint(paths[-1], tensors, state)

    def _checkpoint_paths(self) -> list[Path]:
        return sorted(self.checkpoints.glob("*.safetensors"))
