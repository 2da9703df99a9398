"""The command line: `innet-drl train | evaluate | record`.

`innet-drl train --preset cartpole --learning-rate 1e-3` starts from a preset and changes one field; every
field of `innet_drl.config.Config` has a flag.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

import innet_drl as innet
from innet_drl.config import PRESETS, Config
from innet_drl.faults import ConfigurationError, TrainingError

USAGE = """\
usage: innet-drl COMMAND [flags]

commands:
  train      train an agent; the run is left in runs/<name>/
  evaluate   play games with a run's newest checkpoint and print the scores as JSON
  record     record a video of a game with a run's newest checkpoint

innet-drl COMMAND --help lists the flags.
"""

PresetName = Literal["breakout", "breakout-paper", "cartpole"]


@dataclass(frozen=True)
class TrainFlags:
    """Train an agent with prioritized replay: actors, memory and learner apart, on one machine by default."""

    config: Annotated[Config, tyro.conf.arg(name="")]
    preset: PresetName = "breakout"
    """Settings to start from; every flag below changes one of them."""
    out: Path | None = None
    """The run's folder; `runs/<preset>-<date>-<time>` where it is not given."""
    resume: Path | None = None
    """Folder of a run to go on with: its settings, changed by the flags given, and its newest checkpoint."""


@dataclass(frozen=True)
class EvaluateFlags:
    """Play games with a run's newest checkpoint and print the scores as JSON."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    games: int | None = None
    """Games; the run's `evaluation_games` where it is not given."""
    epsilon: float | None = None
    """Random actions; the run's `evaluation_epsilon` where it is not given."""
    frames: int | None = None
    """Emulator frames of a game; the run's `evaluation_frames` where it is not given."""
    seed: int = 0
    """Seeds the games."""


@dataclass(frozen=True)
class RecordFlags:
    """Record a video of a game with a run's newest checkpoint."""

    run: tyro.conf.Positional[Path]
    """The run's folder."""
    to: Path | None = None
    """The mp4 to write; one in the run's `videos/` where it is not given."""
    seed: int = 0
    """Seeds the game."""
    seconds: float = 60.0
    """Length of the video."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 after an error, 2 for wrong flags."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    command = _COMMANDS.get(given[0]) if given else None
    if command is None:
        wants_help = bool(given) and given[0] in ("-h", "--help")
        print(USAGE, file=sys.stdout if wants_help else sys.stderr, end="")
        return 0 if wants_help else 2
    return run_command(command, given[1:])


def run_command(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Runs one command; what a user can do something about is one line, without a traceback."""
    # libgomp reads this when torch is loaded, which nothing above does: threads that wait for work must leave
    # the core to the actors.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        command(arguments)
    except (TrainingError, innet.ReplayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def train(arguments: Sequence[str]) -> None:
    """`innet-drl train`."""
    from innet_drl import launch

    flags = parse_train(arguments)

    if flags.resume is not None:
        launch.train(flags.config, flags.resume, resume=True)
        return
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    launch.train(flags.config, flags.out or Path("runs") / f"{flags.preset}-{moment}")


def parse_train(arguments: Sequence[str]) -> TrainFlags:
    """The flags of `innet-drl train`, on top of the preset or of the resumed run's settings.

    Raises:
        ConfigurationError: Flags that contradict each other.
        RunFolderError: There is no run to resume.
        SystemExit: Flags that do not exist, or `--help`.
    """
    from innet_drl.folder import RunFolder

    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--preset", default="breakout", choices=sorted(PRESETS))
    first.add_argument("--resume", type=Path)
    known, _ = first.parse_known_args(arguments)
    config = PRESETS[known.preset] if known.resume is None else RunFolder.open(known.resume).config()
    flags = tyro.cli(
        TrainFlags,
        prog="innet-drl train",
        args=list(arguments),
        default=TrainFlags(config=config, preset=known.preset),
    )
    if flags.resume is not None and flags.out is not None:
        raise ConfigurationError("--resume goes on in the run's own folder: leave --out away")
    return flags


def evaluate(arguments: Sequence[str]) -> None:
    """`innet-drl evaluate`."""
    flags = tyro.cli(EvaluateFlags, prog="innet-drl evaluate", args=list(arguments))
    from innet_drl import agent, evaluator

    config, network, checkpoint = agent.load(flags.run)
    config = dataclasses.replace(
        config,
        evaluation_games=flags.games or config.evaluation_games,
        evaluation_epsilon=config.evaluation_epsilon if flags.epsilon is None else flags.epsilon,
        evaluation_frames=flags.frames or config.evaluation_frames,
    )
    evaluation = evaluator.evaluate(config, network, seed=flags.seed)
    assert evaluation is not None
    print(json.dumps({"checkpoint": str(checkpoint), "mean": evaluation.mean, **dataclasses.asdict(evaluation)}))


def record(arguments: Sequence[str]) -> None:
    """`innet-drl record`."""
    flags = tyro.cli(RecordFlags, prog="innet-drl record", args=list(arguments))
    from innet_drl import agent, video
    from innet_drl.folder import RunFolder

    config, network, checkpoint = agent.load(flags.run)
    folder = RunFolder.open(flags.run)
    path = flags.to or folder.videos / f"{checkpoint.stem}-seed{flags.seed}.mp4"
    with folder.writing():
        score = video.record(config, network, path, seed=flags.seed, seconds=flags.seconds)
    print(f"score {score:g}: {path}")


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "evaluate": evaluate,
    "record": record,
}
