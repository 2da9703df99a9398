"""The folder of a run: settings, metrics, checkpoints, videos.

runs/<name>/
    config.yaml             the settings, all of them
    metrics.jsonl           a line of metrics (`innet_drl.train.observe.metrics`) each few seconds
    events.out.tfevents.*   the same metrics for TensorBoard
    sessions.jsonl          begin and end of each session: time, agent steps, machine, versions, how it ended
    times.json              seconds of each process by activity (`innet_drl.train.observe.stopwatch`)
    evaluation.json         the scores of the evaluation after training
    best.safetensors        the agent with the best evaluation
    checkpoints/            <agent steps>.safetensors: model, target, optimizer; counters as JSON in
                            the file's metadata
    replay.snapshot         the replay memory at the newest checkpoint, if the learner's process kept it; the checkpoint
                            has its checksum. It is replay.snapshot.next until the checkpoint is written
    videos/                 <agent steps>.mp4
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import itertools
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import innet_drl as innet
from innet_drl.train.errors import RunFolderError, resuming, writing
from innet_drl.train.files import put_in_place, replacing
from innet_drl.train.learn.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from innet_drl.train.settings.config import Config

if TYPE_CHECKING:
    # The command line reads a run's settings before it imports torch.
    from torch import Tensor

    from innet_drl.train.memory import ReplayMemory

logger = logging.getLogger(__name__)

FINISHED = "finished"
"""How a session ended that reached the end of training, in `sessions.jsonl`."""
KEPT_CHECKPOINTS = 3


class RunFolder:
    """A run's folder. `new` and `open` check the path, `hold` makes and locks the folder, `begin` writes into it.

    Failed reads and writes raise a `RunFolderError`, and leave earlier files intact.
    """

    def __init__(self, path: Path, *, is_new: bool = False) -> None:
        self.path = path
        self._advice = "choose another folder" if is_new else "make it writable for this user"
        self.is_new = is_new
        """Whether the folder belongs to a new run."""
        self._made: list[Path] = []
        self._continues = False
        self.checkpoints = path / "checkpoints"
        self.videos = path / "videos"
        self.snapshot = path / "replay.snapshot"
        self._next_snapshot = path / "replay.snapshot.next"
        self.partial_snapshot = path / "replay.snapshot.next.partial"
        """Temporary file of `save_memory`."""
        self.best = path / "best.safetensors"

    @property
    def name(self) -> str:
        """The run's name, which is also the name of its table and parameters in the replay memory."""
        return self.path.resolve().name

    @classmethod
    def new(cls, path: Path) -> RunFolder:
        """The folder of a new run."""
        folder = cls(path, is_new=True)
        folder._check_free()
        return folder

    @classmethod
    def unused(cls, path: Path) -> RunFolder:
        """Creates a new folder of this name or, if it exists, `<name>-2`, `<name>-3`, ..."""
        names = itertools.chain((path.name,), (f"{path.name}-{number}" for number in itertools.count(2)))
        for name in names:
            folder = cls(path.with_name(name), is_new=True)
            with folder.writing():
                if folder._make():
                    return folder
        raise AssertionError("the names have no end")

    @classmethod
    def default_path(cls, name: str) -> Path:
        """The path `runs/<name>-<date>-<time>` of a new run; the name may be an environment's."""
        short = re.sub(r"[^\w.-]+", "-", name.removeprefix("atari/"))
        return Path("runs") / f"{short}-{datetime.datetime.now():%Y%m%d-%H%M%S}"

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of an existing run."""
        if not (path / "config.yaml").is_file():
            raise RunFolderError(f"{path} is no run: it has no config.yaml")
        return cls(path)

    @classmethod
    def new_or_existing(cls, path: Path) -> RunFolder:
        """The folder of an existing run, or of a new one."""
        return cls(path) if (path / "config.yaml").is_file() else cls.new(path)

    def _check_free(self) -> None:
        if (self.path / "config.yaml").exists():
            raise RunFolderError(
                f"{self.path} holds a run already: continue it with {resuming(self.path)}, or choose another folder"
            )

    def _make(self) -> bool:
        """Makes the folder with its parents; `False` if it exists."""
        missing = list(itertools.takewhile(lambda path: not path.exists(), (self.path, *self.path.parents)))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.path.mkdir()
        except FileExistsError:
            return False
        self._made = missing
        return True

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Locks the folder against other training processes, and creates it if it is missing.

        The lock is on the directory itself and ends with the process. A new folder is removed if its run did not begin.
        """
        directory = self._locked_directory()
        try:
            if self.is_new:
                self._check_free()
            yield
        finally:
            # Safe under the lock: no other process has begun a run in the folder.
            if not (self.path / "config.yaml").exists():
                for made in self._made:
                    with contextlib.suppress(OSError):
                        made.rmdir()
            os.close(directory)

    def _locked_directory(self) -> int:
        """Returns the folder's open and locked directory."""
        while True:
            with self.writing():
                if not self.path.exists():
                    self._make()
                directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                os.close(directory)
                raise RunFolderError(
                    f"another process trains in {self.path}: wait until it has ended, or start a run of its own with "
                    "another folder"
                ) from error
            except OSError as error:
                logger.warning("%s cannot be locked (%s): do not train in it from two processes", self.path, error)
                return directory
            # The previous owner of the lock may have removed the opened directory.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(directory), os.stat(self.path)):
                    return directory
            os.close(directory)

    def begin_session(self, agent_steps: int, machine: dict[str, Any]) -> None:
        """Adds a session's beginning to `sessions.jsonl`."""
        with self.writing():
            self._append_session({"began": _now(), "agent_steps": agent_steps, **machine})

    def end_session(self, agent_steps: int, how: str) -> None:
        """Adds a session's end to `sessions.jsonl`; ignores a full disk."""
        with contextlib.suppress(OSError):
            self._append_session({"ended": _now(), "agent_steps": agent_steps, "how": how})

    def _append_session(self, line: dict[str, Any]) -> None:
        with (self.path / "sessions.jsonl").open("a+b") as file:
            # Starts a new line after one that a full disk cut short.
            file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
            ended = file.read() in (b"", b"\n")
            file.write((b"" if ended else b"\n") + json.dumps(line).encode() + b"\n")

    @property
    def is_held(self) -> bool:
        """Whether a process of this machine trains in the folder now; tests the lock."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            # The file system has no locks.
            return False
        finally:
            os.close(directory)
        return False

    def discard(self) -> None:
        """Removes the files of a new run that learned nothing and has no checkpoint; `hold` then removes the folder."""
        if self.is_new and self.newest_checkpoint() is None:
            names = ("config.yaml", "metrics.jsonl", "sessions.jsonl", "times.json", "wandb.json")
            for file in (*(self.path / name for name in names), *self.path.glob("events.out.*")):
                file.unlink(missing_ok=True)
            shutil.rmtree(self.path / "wandb", ignore_errors=True)
            with contextlib.suppress(OSError):
                self.checkpoints.rmdir()

    def begin(self, config: Config) -> None:
        """Makes the parts of the folder, and writes the settings."""
        with self.writing():
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            with replacing(self.path / "config.yaml") as file:
                config.save(file)

    @contextlib.contextmanager
    def recording(self) -> Iterator[Path]:
        """Makes the folder of videos, and removes it if no video was recorded."""
        with self.writing():
            self.videos.mkdir(exist_ok=True)
            try:
                yield self.videos
            finally:
                with contextlib.suppress(OSError):
                    self.videos.rmdir()

    def config(self) -> Config:
        """The run's settings."""
        return Config.load(self.path / "config.yaml")

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns an `OSError` of a write into an error that says what to do."""
        is_new = self.newest_checkpoint() is None
        afterwards = " and start again" if is_new else f" and continue with {resuming(self.path)}"
        with writing(f"the run's folder {self.path}", self._advice, "" if self._continues else afterwards):
            yield

    @contextlib.contextmanager
    def continuing(self) -> Iterator[None]:
        """Errors of writes in the context do not advise to start or resume a run, as training continues."""
        self._continues = True
        try:
            yield
        finally:
            self._continues = False

    def save_checkpoint(self, agent_steps: int, tensors: dict[str, Tensor], state: dict[str, Any]) -> Path:
        """Writes a checkpoint atomically, then removes the oldest ones; returns its path."""
        path = self.checkpoints / f"{agent_steps:012d}.safetensors"
        with self.writing():
            save_checkpoint(path, tensors, state)
            for old in sorted(self.checkpoints.glob("*.safetensors"))[:-KEPT_CHECKPOINTS]:
                old.unlink(missing_ok=True)
        return path

    def save_memory(self, memory: ReplayMemory) -> str:
        """Writes a snapshot of the replay memory for the next checkpoint, and returns the checksum of the file."""
        with self.writing():
            memory.save(self._next_snapshot)
            checksum = _checksum_of(self._next_snapshot)
            assert checksum is not None
            return checksum

    def adopt_memory(self) -> None:
        """Replaces the previous snapshot by the new one of `save_memory`, after its checkpoint was written."""
        with self.writing():
            put_in_place(self._next_snapshot, self.snapshot)

    def match_memory(self, checkpoint: Checkpoint) -> None:
        """Finds the snapshot of a checkpoint; warns if the snapshot is of another time."""
        expected = checkpoint.state["snapshot"]
        with self.writing():
            if expected is not None and _checksum_of(self._next_snapshot) == expected:
                # The run ended between writing its checkpoint and renaming the snapshot.
                self.adopt_memory()
        if self.snapshot.exists() and _checksum_of(self.snapshot) != expected:
            logger.warning(
                "%s is not the replay memory of the checkpoint %s, but of another time of the run: training "
                "continues with both; delete it to start with an empty memory",
                self.snapshot,
                checkpoint.path,
            )

    def remove_memory(self) -> None:
        """Removes the snapshot of an earlier session, which would not match later checkpoints."""
        with self.writing():
            for snapshot in (self.snapshot, self._next_snapshot):
                snapshot.unlink(missing_ok=True)

    def restore_memory(self, memory: ReplayMemory) -> None:
        """Restores the snapshot that `save_memory` wrote into an empty memory."""
        try:
            memory.restore(self.snapshot)
        except (innet.errors.CorruptError, innet.errors.TableDiffersError, innet.errors.StorageError) as error:
            raise RunFolderError(f"{error}: delete {self.snapshot} to continue with an empty memory") from error

    def save_evaluation(self, evaluation: dict[str, Any]) -> None:
        """Writes the evaluation after training, which replaces an earlier session's evaluation."""
        with self.writing(), replacing(self.path / "evaluation.json") as file:
            file.write_text(json.dumps(evaluation, indent=2) + "\n")

    def save_best(self, tensors: dict[str, Tensor], state: dict[str, Any]) -> None:
        """Writes the agent with the best evaluation, which replaces the previous one."""
        with self.writing():
            save_checkpoint(self.best, tensors, state)

    def best_agent(self) -> Checkpoint:
        """Reads the agent with the best evaluation."""
        if not self.best.is_file():
            raise RunFolderError(f"{self.path} has no evaluated agent: no evaluation has ended")
        return load_checkpoint(self.best)

    def newest_checkpoint(self) -> Path | None:
        """Returns the path of the newest checkpoint; `None` if there is none."""
        return max(self.checkpoints.glob("*.safetensors"), default=None)

    def checkpoint_to_resume(self) -> Path:
        """Returns the path of the newest checkpoint."""
        path = self.newest_checkpoint()
        if path is None:
            raise RunFolderError(f"{self.path} has no checkpoint yet: start the run again, with another folder")
        return path

    def latest_checkpoint(self) -> Checkpoint:
        """Reads the newest checkpoint."""
        return load_checkpoint(self.checkpoint_to_resume())


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _checksum_of(snapshot: Path) -> str | None:
    """Returns the checksum of a snapshot, which is at its end; `None` without a file."""
    try:
        with snapshot.open("rb") as file:
            file.seek(-4, os.SEEK_END)
            return file.read().hex()
    except FileNotFoundError:
        return None
