"""The folder a run leaves: settings, metrics, checkpoints, videos.

runs/<name>/
    config.yaml             the settings, all of them
    metrics.jsonl           one `innet_drl.train.metrics.Metrics` a line
    events.out.tfevents.*   the same for TensorBoard
    evaluation.json         the scores of the evaluation after training
    checkpoints/            <agent steps>.safetensors: model, target, optimizer; counters and random
                            states as JSON in the file's metadata
    replay.snapshot         the replay memory at the newest checkpoint, where it was in the learner
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
    # The command line reads settings here, before it imports torch.
    from torch import Tensor

    from innet_drl.train.trainer import LearnerMemory

KEPT_CHECKPOINTS = 3


class RunFolder:
    """A run's folder: `new` and `open` name one, and `begin` makes it the folder of a run."""

    def __init__(self, path: Path, advice: str = "make it writable for this user") -> None:
        self.path = path
        self._advice = advice
        self.checkpoints = path / "checkpoints"
        self.videos = path / "videos"
        self.replay = path / "replay.snapshot"

    @property
    def name(self) -> str:
        """The run's name: also that of its table and its parameters in the replay memory."""
        return self.path.resolve().name

    @classmethod
    def new(cls, path: Path) -> RunFolder:
        """The folder of a run to come; nothing is made yet, so that a start that fails leaves nothing.

        Raises:
            RunFolderError: There is a run in it already.
        """
        if (path / "config.yaml").exists():
            raise RunFolderError(f"{path} holds a run already: go on with --resume {path}, or choose another --out")
        return cls(path, "choose another folder with --out")

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that was made before.

        Raises:
            RunFolderError: There is no run.
        """
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} is no run: it has no config.yaml")
        return cls(path)

    def begin(self, config: Config) -> None:
        """Makes what is missing of the folder, and keeps these settings.

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
        """Turns what the operating system says about a write into an error that says what to do.

        Raises:
            RunFolderError: In place of an `OSError`.
        """
        with writing(f"the run's folder {self.path}", self._advice, f" and go on with --resume {self.path}"):
            yield

    def save_checkpoint(self, agent_steps: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Writes a checkpoint under another name and renames it, then removes the oldest ones.

        Raises:
            RunFolderError: It cannot be written; the checkpoints there are stay whole.
        """
        path = self.checkpoints / f"{agent_steps:012d}.safetensors"
        with self.writing():
            save_checkpoint(path, tensors, state)
            for old in self._checkpoint_paths()[:-KEPT_CHECKPOINTS]:
                old.unlink(missing_ok=True)
        return path

    def save_replay(self, replay: LearnerMemory) -> None:
        """Writes the replay memory, in place of the one of the checkpoint before.

        Raises:
            RunFolderError: It cannot be written; the one that was there stays whole.
        """
        with self.writing():
            replay.save(self.replay)

    def restore_replay(self, replay: innet.Replay) -> None:
        """Puts the memory that `save_replay` wrote into an empty one.

        Raises:
            RunFolderError: It is damaged, or of another table.
        """
        try:
            replay.restore(self.replay)
        except (innet.errors.CorruptError, innet.errors.TableDiffersError, innet.errors.StorageError) as error:
            raise RunFolderError(f"{error}: delete {self.replay} to go on with an empty memory") from error

    def save_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Writes the evaluation after training, in place of an earlier session's.

        Raises:
            RunFolderError: It cannot be written.
        """
        with self.writing():
            (self.path / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")

    def newest_checkpoint(self) -> Path | None:
        """The path of the newest checkpoint; `None` where there is none."""
        return max(self.checkpoints.glob("*.safetensors"), default=None)

    def latest_checkpoint(self) -> Checkpoint:
        """The newest checkpoint.

        Raises:
            RunFolderError: There is none, or it is damaged.
        """
        paths = self._checkpoint_paths()
        if not paths:
            raise RunFolderError(f"{self.path} has no checkpoint yet: start the run again, with another --out")
        return load_checkpoint(paths[-1])

    def _checkpoint_paths(self) -> list[Path]:
        return sorted(self.checkpoints.glob("*.safetensors"))
