"""Training with prioritized replay (Ape-X DQN), from Python. Needs the extra `train`.

    import innet_drl.train as train

    result = train.run(train.preset("cartpole", seed=1))
    agent = train.load(result.folder)
    action = agent.act(observation)

| name | subject |
| --- | --- |
| `preset`, `PRESETS`, `Config` | settings |
| `run`, `Result` | a training run |
| `Callback`, `StopTraining`, `Metrics`, `Evaluation` | reports during a run, and ending it |
| `WandbCallback` | a run in Weights & Biases |
| `load`, `Agent` | a trained agent |

A run changes neither signal handlers nor loggers, and restores torch's number of threads and random state. It logs to
`innet_drl` by `logging`.

| files | subject |
| --- | --- |
| `environments`, `networks`, `losses`, `memory`, `callbacks` | what a user may bring |
| `settings/` | settings, their files and presets |
| `learn/` | updates and their arithmetic |
| `play/` | the actor; the trained agent, its evaluations and videos |
| `observe/` | metrics, where they are written and shown; seconds, cost and energy |
| `runs/` | a run from its start to its result |
| `run_folder`, `files`, `published_run` | files of a run; a run in its memory |
| `flags`, `errors`, `tracking` | the command line; errors of training; Weights & Biases |

`innet_drl.launch` runs actors, learners and evaluations as processes.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innet_drl.errors import naming_extras

if TYPE_CHECKING:
    from innet_drl.train.callbacks import Callback, Result, StopTraining
    from innet_drl.train.observe.metrics import Metrics
    from innet_drl.train.play.agent import Agent, load
    from innet_drl.train.play.evaluation import Evaluation
    from innet_drl.train.settings.config import PRESETS, Config, preset
    from innet_drl.train.settings.values import Importable
    from innet_drl.train.tracking import WandbCallback

__all__ = [
    "PRESETS",
    "Agent",
    "Callback",
    "Config",
    "Evaluation",
    "Metrics",
    "Result",
    "StopTraining",
    "WandbCallback",
    "load",
    "preset",
    "run",
]

_MODULES = {
    "PRESETS": "settings.config",
    "Agent": "play.agent",
    "Callback": "callbacks",
    "Config": "settings.config",
    "Evaluation": "play.evaluation",
    "Metrics": "observe.metrics",
    "Result": "callbacks",
    "StopTraining": "callbacks",
    "WandbCallback": "tracking",
    "load": "play.agent",
    "preset": "settings.config",
}


def __getattr__(name: str) -> Any:
    # Lazy imports: the command line parses its flags before it imports torch.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with naming_extras():
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def run(
    config: Config,
    *,
    callbacks: Sequence[Callback] = (),
    folder: str | PathLike[str] | None = None,
    preload: str | Path | None = None,
    resume: bool = False,
    launcher: Importable = "local",
) -> Result:
    """Trains, evaluates the agent, records a video of it, and writes everything to the run's folder.

    Any thread may call it. A script needs the guard `if __name__ == "__main__":`, because actor processes import the
    script. It prints nothing; after `logging.basicConfig(level=logging.INFO)` the log has progress every 10 s.

    Args:
        config: The run's settings.
        callbacks: Called during training; they may end it.
        folder: The run's folder; `runs/<environment>-<date>-<time>` by default.
        preload: Data set of demonstrations that the run starts from, in place of the setting `preload`.
        resume: Continue the run of the folder from its newest checkpoint, with these settings.
        launcher: Place where actors and evaluations are processes: `"local"` is this machine, `"ray"` the Ray cluster
            of RAY_ADDRESS, or a local one (`docs/how-to/ray.md`); or your own subclass of
            `innet_drl.launch.launcher.Launcher`, or its import path.

    Raises:
        TrainingError: A problem that the caller can solve.
        innet_drl.ReplayError: The replay memory cannot be made or reached, or failed; or an extra is not installed.
        KeyboardInterrupt: Ctrl-C. A run that has learned has written a checkpoint, and `resume` continues it.
    """
    with naming_extras():
        from innet_drl.launch import start
        from innet_drl.train.errors import ConfigurationError, TrainingError, shortened
        from innet_drl.train.run_folder import RunFolder
        from innet_drl.train.settings.config import Config
    if not isinstance(config, Config):
        raise ConfigurationError(
            f"config: it must be a train.Config, and is {config!r}: train.run(train.preset('cartpole')), or "
            "train.run(train.Config(environment='CartPole-v1'))"
        )
    if preload is not None:
        config = dataclasses.replace(config, preload=preload)
    if resume and folder is None:
        raise ConfigurationError("resume=True continues the run of a folder: name it, folder=...")
    out = RunFolder.default_path(config.environment_name) if folder is None else Path(folder)
    try:
        return start.train(config, out, resume=resume, unused=folder is None, launcher=launcher, callbacks=callbacks)
    except TrainingError as error:
        raise shortened(error) from error.__cause__
