"""Sessions of training: checks the settings, creates or reopens the run's folder, and trains.

torch is imported after the checks of folder, environment and addresses, so that mistakes are reported at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cloudpickle

import innet_drl as innet
from innet_drl.errors import naming_extras
from innet_drl.launch.launcher import Launcher, LocalLauncher, forbid_as_daemon, forbid_in_children, start_fork_server
from innet_drl.signals import Interrupted
from innet_drl.train import environments
from innet_drl.train.callbacks import Callback, Result, check_callbacks
from innet_drl.train.errors import ConfigurationError, resuming
from innet_drl.train.memory import actor_token, aggregator_token, memory_class, memory_token
from innet_drl.train.observe.display import Display
from innet_drl.train.play.exploration import unfinished_schedules
from innet_drl.train.published_run import check_address
from innet_drl.train.run_folder import RunFolder
from innet_drl.train.settings.config import Config
from innet_drl.train.settings.values import Importable, is_path, load, path_of

logger = logging.getLogger(__name__)

Launchers = Callable[[], Launcher]
"""Makes launchers of one run."""
LauncherContext = Callable[[Config, str, Callable[[str], None]], contextlib.AbstractContextManager[Launchers | None]]
"""Context with the launchers of a run, from its settings, its name, and a function that shows the current phase."""


def train(
    config: Config,
    out: Path,
    *,
    resume: bool = False,
    unused: bool = False,
    launcher: Importable | None = "local",
    callbacks: Sequence[Callback] = (),
    display: Callable[[str], Display] = Display,
    signals: bool = False,
) -> Result:
    """Trains, evaluates, records a video, and writes everything to the run's folder.

    Args:
        config: The settings; a resumed run takes its own, with any changes.
        out: The run's folder: a new one, or with `resume` an existing one.
        resume: Continue from the folder's newest checkpoint.
        unused: If the folder `out` exists, make `<out>-2`, `<out>-3`, ...
        launcher: Place where processes are started: `local`, `ray`, or a launcher's class or its import path. With
            `None` actors join from any host (`innet_drl.launch.joining`), and a run in the folder is continued from its
            newest checkpoint, if there is one.
        callbacks: Called during training; they may end it.
        display: Makes the display of the metrics, from a title.
        signals: End training with a checkpoint at SIGINT, SIGTERM and SIGHUP, if this is the main thread; then raise
            `Interrupted`.
    """
    forbid_in_children()
    forbid_as_daemon(config)
    check_callbacks(callbacks)
    place = _launchers(launcher, config)
    if launcher is None:
        folder = RunFolder.new_or_existing(out)
        resume = folder.newest_checkpoint() is not None
    else:
        folder = RunFolder.open(out) if resume else RunFolder.unused(out) if unused else RunFolder.new(out)
    with folder.hold(), display(f"{config.environment_name} in {folder.path}") as shown:
        _check(config, folder, shown, resume=resume)
        if launcher is None and not folder.is_new:
            logger.info("continuing the run of %s", folder.path)
        if launcher is not None and not config.serial:
            # The fork server imports torch in parallel with this process.
            start_fork_server()
        with place(config, folder.name, shown.say) as launchers:
            return _train(config, folder, callbacks, shown, launchers, resume=resume, signals=signals)


def _launchers(launcher: Importable | None, config: Config) -> LauncherContext:
    """Returns the context of launchers for a value of `--launcher`, after checks of the settings."""
    if launcher is None:
        check_address(config.replay)
        return lambda *_: contextlib.nullcontext()
    if launcher == "local":
        return lambda *_: contextlib.nullcontext(LocalLauncher)

    def unusable(reason: str) -> ConfigurationError:
        return ConfigurationError(f"launcher {path_of(launcher)}: {reason}")

    if config.serial:
        raise unusable("omit it in a serial run, which is one process")
    if launcher == "ray":
        with naming_extras():
            from innet_drl.launch import ray
        ray.check(config)
        return ray.cluster
    if isinstance(launcher, str) and not is_path(launcher):
        raise unusable("it must be local, ray, or your own launcher as module:name")
    own = load(launcher, "launcher")
    if not (isinstance(own, type) and issubclass(own, Launcher)):
        raise unusable("it must be a subclass of innet_drl.launch.launcher.Launcher")
    if lacking := sorted(own.__abstractmethods__):
        raise unusable(f"it lacks {', '.join(lacking)} of innet_drl.launch.launcher.Launcher")
    return lambda *_: contextlib.nullcontext(own)


def _check(config: Config, folder: RunFolder, display: Display, *, resume: bool) -> None:
    """Refuses settings that would fail, before the import of torch, which takes seconds."""
    if resume:
        folder.checkpoint_to_resume()
    if config.replay_ca is not None and not config.replay_ca.is_file():
        raise ConfigurationError(f"replay_ca {config.replay_ca}: there is no such file")
    environments.check(config)
    if config.video:
        # A video is recorded after the training: its encoder is looked for before.
        with naming_extras():
            import imageio_ffmpeg  # noqa: F401
    if config.evaluated is not config:
        try:
            environments.check(config.evaluated)
        except ConfigurationError as error:
            raise ConfigurationError(f"evaluation_environment: {error}") from error
    if not config.serial:
        _check_pickles(config)
    for unfinished in unfinished_schedules(config):
        logger.warning("%s", unfinished)
    if config.replay != "embedded":
        display.say(f"connecting to the replay memory at {config.replay}")
        for token in dict.fromkeys([memory_token(config), actor_token(config)]):
            memory_class(config.replay).check(config, token)
    if config.learners > 1 and config.gradients != "embedded":
        display.say(f"connecting to the aggregator at {config.gradients}")
        with innet.connect(config.gradients, token=aggregator_token(config), tls_ca=config.replay_ca) as server:
            if "gradients" not in server.stats():
                raise ConfigurationError(
                    f"the server at {config.gradients} sums no gradients: start it as innet-replay serve --gradients "
                    "IP:PORT, or omit gradients"
                )


def _train(
    config: Config,
    folder: RunFolder,
    callbacks: Sequence[Callback],
    display: Display,
    launchers: Launchers | None,
    *,
    resume: bool,
    signals: bool,
) -> Result:
    with naming_extras():
        from innet_drl.launch import parallel
        from innet_drl.train.runs import serial
        from innet_drl.train.runs.trainer import Trainer

    resumed = folder.latest_checkpoint() if resume else None
    # `innet-drl learner` (without launchers) only plays the missing evaluation of a run with all of its steps.
    if (
        launchers is not None
        and resumed is not None
        and config.steps is not None
        and config.steps <= resumed.state["meter"]["agent_steps"]
    ):
        raise ConfigurationError(
            f"{folder.path} has taken its {config.steps:,} steps: continue with a larger number of them, "
            f"{resuming(folder.path, further=True)}"
        )
    trainer = None
    try:
        with _torch_as_before(), Trainer(config, folder, display, resumed, callbacks, signals=signals) as trainer:
            if config.serial:
                serial.train(trainer)
            else:
                parallel.train(trainer, launchers)
            result = trainer.finish()
    except BaseException:
        if trainer is not None and trainer.learner.updates == 0:
            folder.discard()
        raise
    if trainer.session.ended_by is not None:
        raise Interrupted(trainer.session.ended_by)
    return result


@contextlib.contextmanager
def _torch_as_before() -> Iterator[None]:
    """Restores the caller's number of torch threads and random state, which a run changes."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def _check_pickles(config: Config) -> None:
    """Checks that settings can be pickled for other processes."""
    for field in dataclasses.fields(config):
        try:
            cloudpickle.dumps(getattr(config, field.name))
        except Exception as error:
            raise ConfigurationError(
                f"{field.name}: it cannot be pickled for the processes of the actors ({error}): create its contents "
                "inside of the function, name it as module:name, or train in one process (serial=True)"
            ) from error
