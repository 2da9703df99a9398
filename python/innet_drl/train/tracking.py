"""Runs in Weights & Biases, as a callback."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from innet_drl.errors import naming_extras
from innet_drl.train.callbacks import Callback, Result
from innet_drl.train.errors import writing
from innet_drl.train.observe.metrics import Metrics, tags
from innet_drl.train.settings.config import Config

logger = logging.getLogger(__name__)


class WandbCallback(Callback):
    """Sends settings and metrics to Weights & Biases, as `--track` does.

    Metrics have the tags of TensorBoard, over `agent_steps`. The run's folder has the id of the W&B run, which a
    resumed run continues, in `wandb.json`, and W&B's files in `wandb/`. W&B neither prints nor captures output.

    Args:
        settings: Arguments of `wandb.init`, such as `project` and `entity`; they may also be environment variables
            (WANDB_PROJECT).

    Raises:
        MissingExtraError: wandb is not installed.
    """

    def __init__(self, **settings: Any) -> None:
        with naming_extras():
            import wandb
        self._wandb = wandb
        self._settings = settings
        self._run: Any = None

    def on_start(self, config: Config, folder: Path) -> None:
        """Begins a W&B run, or continues the folder's."""
        file = folder / "wandb.json"
        # W&B warns about `resume` in a new offline run.
        known = {**json.loads(file.read_text()), "resume": "allow"} if file.is_file() else {}
        self._run = self._wandb.init(
            **{
                **known,
                "name": folder.resolve().name,
                "config": config.as_dict(),
                "dir": folder,
                "settings": self._wandb.Settings(silent=True, console="off"),
                **self._settings,
            }
        )
        with writing(str(file), "make the run's folder writable for this user"):
            file.write_text(json.dumps({"id": self._run.id}) + "\n")
        where = f"offline in {self._run.dir}" if self._run.offline else self._run.url
        logger.info("tracked by Weights & Biases: %s", where)
        # A resumed run repeats steps since its last checkpoint, whereas W&B's own steps must grow.
        self._run.define_metric("agent_steps")
        self._run.define_metric("*", step_metric="agent_steps")

    def on_metrics(self, metrics: Metrics) -> None:
        """Sends a line of metrics."""
        self._run.log({"agent_steps": metrics["agent_steps"], **tags(metrics)})

    def on_end(self, result: Result) -> None:
        """Ends the W&B run, whose summary has the last values."""
        self._run.finish()

    def on_error(self, error: BaseException) -> None:
        """Ends the W&B run as failed."""
        if self._run is not None:
            self._run.finish(exit_code=1)
