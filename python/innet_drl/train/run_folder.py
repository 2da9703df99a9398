"""The folder of a run: settings, metrics, checkpoints, videos.

runs/<name>/
    config.yaml             the settings, all of them
    metrics.jsonl           one `innet_drl.train.metrics.Metrics` per line
    events.out.tfevents.*   the same metrics for TensorBoard
    evaluation.json         the scores of the evaluation after training
    checkpoints/            <agent steps>.safetensors: model, target, optimizer; counters and random
                            states as JSON in the file's metadata
    replay.snapshot         the replay memory at the newest checkpoint, if the learner's process kept it
    videos/                 <agent steps>.mp4
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import innet_drl as innet
from innet_drl.train.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from innet_drl.train.config import Config
from innet_drl.train.errors import RunFolderError, writing

if TYPE_CHECKING:
    # The command line reads a run's settings before it imports torch.
    from torch import Tensor

    from innet_drl.train.memory import ReplayMemory

KEPT_CHECKPOINTS = 3


class RunFolder:
    """A run's folder. `new` and `open` check the path; `begin` makes the folder."""

    def __init__(self, path: Path, advice: str = "make it writable for this user") -> None:
        self.path = path
        self._advice = advice
        self.checkpoints = path / "checkpoints"
        self.videos = path / "videos"
        self.snapshot = path / "replay.snapshot"

    @property
    def name(self) -> str:
        """The run's name, which is also the name of its table and parameters in the replay memory."""
        return self.path.resolve().name

    @classmethod
    def new(cls, path: Path) -> RunFolder:
        """The folder of a new run. Nothing is made before `begin`, so that a start that fails leaves nothing.

        Raises:
            RunFolderError: The folder holds a run already.
        """
        if (path / "config.yaml").exists():
            raise RunFolderError(f"{path} holds a run already: go on with --resume {path}, or choose another --out")
        return cls(path, "choose another folder with --out")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run.

        Raises:
            RunFolderError: There is no run.
        """
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} is no run: it has no config.yaml")
        return cls(path)

    def begin(self, config: Config) -> None:
        """Makes the missing parts of the folder, and writes the settings.

        Raises:
            RunFolderError: It cannot be written.
        """
        with self.writing():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.videos.mkdir(exist_ok=True)
            partial = self.path / "config.partial"
            config.save(partial)
            partial.replace(self.path / "config.yaml")

    def config(self) -> Config:
        """The run's settings."""
        return Config.load(self.path / "config.yaml")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an `OSError` of a write into an error that says what to do.

        Raises:
            RunFolderError: In place of an `OSError`.
        """
        with writing(f"the run's folder {self.path}", self._advice, f" and go on with --resume {self.path}"):
            yield

    def save_checkpoint(self, agent_steps: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Writes a checkpoint atomically, then removes the oldest ones.

        Raises:
            RunFolderError: It cannot be written; earlier checkpoints stay whole.
        """
        path = self.checkpoints / f"{agent_steps:012d}.safetensors"
        with self.writing():
            save_checkpoint(path, tensors, state)
            for old in sorted(self.checkpoints.glob("*.safetensors"))[:-KEPT_CHECKPOINTS]:
                old.unlink(missing_ok=True)

    def save_memory(self, memory: ReplayMemory) -> None:
        """Writes a snapshot of the replay memory, in place of the previous checkpoint's.

        Raises:
            RunFolderError: It cannot be written; the previous snapshot stays whole.
        """
        with self.writing():
            memory.save(self.snapshot)

    def restore_memory(self, memory: ReplayMemory) -> None:
        """Restores the snapshot that `save_memory` wrote into an empty memory.

        Raises:
            RunFolderError: The snapshot is damaged, or of another table.
        """
        try:
            memory.restore(self.snapshot)
        except (innet.errors.CorruptError, innet.errors.TableDiffersError, innet.errors.StorageError) as error:
            raise RunFolderError(f"{error}: delete {self.snapshot} to go on with an empty memory") from error

    def save_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Writes the evaluation after training, in place of an earlier session's evaluation.

        Raises:
            RunFolderError: It cannot be written.
        """
        with self.writing():
            (self.path / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")

    def newest_checkpoint(self) -> Path | None:
        """Returns the path of the newest checkpoint; `None` if there is none."""
        return max(self.checkpoints.glob("*.safetensors"), default=None)

    def latest_checkpoint(self) -> Checkpoint:
        """Reads the newest checkpoint.

        Raises:
            RunFolderError: There is none, or it is damaged.
        """
        path = self.newest_checkpoint()
        if path is None:
            raise RunFolderError(f"{self.path} has no checkpoint yet: start the run again, with another --out")
        return load_checkpoint(path)
