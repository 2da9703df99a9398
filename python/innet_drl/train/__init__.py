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
| `config`, `settings_file`, `presets`, `flags` | settings, their types and files, presets, flags |
| `environments` | anything that Gymnasium makes or a factory returns |
| `networks`, `losses`, `importing` | networks, losses, import paths of user code |
| `exploration`, `actor` | epsilon-greedy exploration; playing |
| `memory` | the interface of the replay memory: embedded, on a server, or another package's |
| `published_run` | a run published at its server, for processes that join |
| `learner`, `numerics`, `targets`, `data_parallel` | updates; measured arithmetic; targets ahead; several learners |
| `session`, `trainer`, `reporting` | one session of a run: shared state; updates; lines of metrics |
| `serial` | the loop in one process |
| `callbacks`, `tracking` | callbacks; Weights & Biases |
| `agent`, `evaluation`, `evaluation_schedule`, `video` | a trained agent, its games, and when they are played |
| `following` | evaluations of each new checkpoint in a separate process |
| `evaluation_report` | protocols of evaluations, interquartile means and intervals |
| `run_folder`, `checkpoints`, `files` | files of a run |
| `metrics`, `metrics_files`, `display`, `page` | metrics, their files, lines of a log, and the page in the terminal |
| `stopwatch`, `times` | seconds of each process by activity, and laps for a trace |
| `preload`, `watchdog`, `short_help` | demonstrations; environments that hang; the first page of help |
| `signals` | signals that end a run |
| `cost`, `energy` | processor seconds and joules of a run |
| `errors`, `machine` | errors of training; cores and open files |

`innet_drl.launch` runs actors, learners and evaluations as processes.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from innet_drl.extras import naming_extras

if TYPE_CHECKING:
    from innet_drl.train.agent import Agent, load
    from innet_drl.train.callbacks import Callback, Result, StopTraining
    from innet_drl.train.config import Config
    from innet_drl.train.evaluation import Evaluation
    from innet_drl.train.importing import Importable
    from innet_drl.train.metrics import Metrics
    from innet_drl.train.presets import PRESETS, preset
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
    "PRESETS": "presets",
    "Agent": "agent",
    "Callback": "callbacks",
    "Config": "config",
    "Evaluation": "evaluation",
    "Metrics": "metrics",
    "Result": "callbacks",
    "StopTraining": "callbacks",
    "WandbCallback": "tracking",
    "load": "agent",
    "preset": "presets",
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
        from innet_drl.launch import local
        from innet_drl.train.config import Config
        from innet_drl.train.errors import ConfigurationError, TrainingError, shortened
        from innet_drl.train.run_folder import RunFolder
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
        return local.train(config, out, resume=resume, unused=folder is None, launcher=launcher, callbacks=callbacks)
    except TrainingError as error:
        raise shortened(error) from error.__cause__
