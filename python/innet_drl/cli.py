"""The command line: `innet-drl train | evaluate | record | analyze | bench`.

`innet-drl train --preset cartpole --learning-rate 1e-3` starts from a preset and changes one field; the flags are in
`innet_drl.train.flags`, `innet_drl.analyze.flags` and `innet_drl.bench.flags`. The other packages are imported when a
command runs: if the extra `train` is missing, the error says so, and each actor, which imports the main module again,
starts fast.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence

import innet_drl as innet

USAGE = """\
usage: innet-drl COMMAND [flags]

commands:
  train      train an agent; writes runs/<name>/
  evaluate   play games with the agents of runs and print a report as JSON
  record     record a video of a game of the agent of a run
  analyze    analyze ratio measures how many actors, threads and environments this machine needs, analyze what-if
             predicts other machines
  bench      bench paper repeats the evaluation of in-network experience sampling, bench gradients measures
             sums of gradients

innet-drl COMMAND --help lists the flags; innet-drl --version prints the release.
The commands need the extra train: pip install 'innet-drl[train]'.
"""

BENCH_USAGE = """\
usage: innet-drl bench {paper,gradients} [flags]

innet-drl bench paper --help and innet-drl bench gradients --help list the flags.
"""

ANALYZE_USAGE = """\
usage: innet-drl analyze {ratio,what-if} [flags]

innet-drl analyze ratio --help and innet-drl analyze what-if --help list the flags.
"""

BROKEN_PIPE = 141
"""Exit status of a command whose output has no reader any more: that of a process that SIGPIPE ends."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 after an error, 2 for wrong flags."""
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        if _stdout_is_read():
            raise
        # The interpreter would write the rest at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE


def _stdout_is_read() -> bool:
    """Whether the reader of the output, such as `head`, has not ended."""
    import select

    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return not poll.poll(0)


def _main(given: list[str]) -> int:
    first = given[0] if given else ""
    if given and given[-1] in ("-V", "--version"):
        print(f"innet-drl {innet.__version__}")
        return 0
    if first in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    command = _COMMANDS.get(first)
    if command is None:
        import difflib

        close = difflib.get_close_matches(first, _COMMANDS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"the commands are {', '.join(_COMMANDS)}"
        print(f"error: there is no command {first!r}: {hint}" if first else USAGE.rstrip(), file=sys.stderr)
        return 2
    return run_command(command, given[1:])


def run_command(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Runs one command; prints errors that the user can correct as one line, without a traceback."""
    # libgomp reads this when torch is loaded, which is later: threads that wait for work must leave the core to the
    # actors.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Environments of the user's own are modules of the current directory; last, so that they hide no package.
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    from innet_drl.extras import naming_extras
    from innet_drl.train.errors import TrainingError

    try:
        with naming_extras():
            command(arguments)
    except (TrainingError, innet.ReplayError) as error:
        print(f"error: {error.with_flags if isinstance(error, TrainingError) else error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def train(arguments: Sequence[str]) -> None:
    """`innet-drl train`."""
    from innet_drl.train.flags import parse_train

    flags = parse_train(arguments)
    callbacks = []
    if flags.track:
        from innet_drl.train import WandbCallback

        callbacks.append(WandbCallback())
    from innet_drl.launch import local
    from innet_drl.train.page import Page, logs_on_console
    from innet_drl.train.run_folder import RunFolder

    out = flags.resume or flags.out
    with logs_on_console():
        local.train(
            flags.config,
            out or RunFolder.default_path(flags.name),
            resume=flags.resume is not None,
            unused=out is None,
            callbacks=callbacks,
            display=Page,
            signals=True,
        )


def evaluate(arguments: Sequence[str]) -> None:
    """`innet-drl evaluate`."""
    import json

    from innet_drl.train.flags import EvaluateFlags, parse

    flags = parse(EvaluateFlags, "evaluate", arguments)
    from innet_drl.train.page import page_of_command

    with page_of_command(f"evaluation of {' '.join(map(str, flags.runs))}") as page:
        from innet_drl.train.evaluation_report import CONDITIONS, evaluate_runs

        given = {name: getattr(flags, name.removeprefix("evaluation_")) for name in CONDITIONS}
        report = evaluate_runs(
            flags.runs,
            best=flags.best,
            protocol=flags.protocol,
            seeds=flags.seeds,
            changes={name: value for name, value in given.items() if value is not None},
            progress=page.progress,
        )
    print(report, file=sys.stderr)
    print(json.dumps(report.as_dict()))


def record(arguments: Sequence[str]) -> None:
    """`innet-drl record`."""
    import dataclasses

    from innet_drl.train.flags import RecordFlags, parse

    flags = parse(RecordFlags, "record", arguments)
    from innet_drl.train.display import score
    from innet_drl.train.errors import writing
    from innet_drl.train.page import page_of_command
    from innet_drl.train.run_folder import RunFolder

    with page_of_command(f"video of {flags.run}") as page:
        from innet_drl.train import video
        from innet_drl.train.agent import load

        agent = load(flags.run, best=flags.best)
        config = dataclasses.replace(agent.config, seed=flags.seed)
        with contextlib.ExitStack() as stack:
            path = flags.to
            if path is None:
                videos = stack.enter_context(RunFolder.open(flags.run).recording())
                path = videos / f"{agent.checkpoint.stem}-seed{flags.seed}.mp4"
            stack.enter_context(writing(str(path), "choose another file with --to"))
            rewards = video.record(
                config, agent.network, path, seed=config.seed, seconds=flags.seconds, progress=page.progress
            )
    print(f"score {score(rewards)}: {path}")


def analyze(arguments: Sequence[str]) -> None:
    """`innet-drl analyze`."""
    from innet_drl.train.errors import ConfigurationError

    what = arguments[0] if arguments else None
    if what in ("-h", "--help"):
        print(ANALYZE_USAGE, end="")
        return
    if what not in ("ratio", "what-if"):
        raise ConfigurationError("innet-drl analyze has ratio and what-if: innet-drl analyze ratio --help")
    from innet_drl.analyze.flags import RatioFlags, WhatIfFlags
    from innet_drl.train.flags import parse

    flags = parse(RatioFlags if what == "ratio" else WhatIfFlags, f"analyze {what}", arguments[1:])
    importlib.import_module(f"innet_drl.analyze.{what.replace('-', '_')}").run(flags)


def bench(arguments: Sequence[str]) -> None:
    """`innet-drl bench`."""
    from innet_drl.train.errors import ConfigurationError

    what = arguments[0] if arguments else None
    if what in ("-h", "--help"):
        print(BENCH_USAGE, end="")
        return
    if what not in ("paper", "gradients"):
        raise ConfigurationError("innet-drl bench measures paper or gradients: innet-drl bench paper --help")
    from innet_drl.bench.flags import GradientsFlags, PaperFlags
    from innet_drl.launch.processes import start_fork_server
    from innet_drl.train.flags import parse

    flags = parse(PaperFlags if what == "paper" else GradientsFlags, f"bench {what}", arguments[1:])
    # The fork server imports torch at the same time as this process, in the next line.
    start_fork_server()
    importlib.import_module(f"innet_drl.bench.{what}").run(flags)


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "evaluate": evaluate,
    "record": record,
    "analyze": analyze,
    "bench": bench,
}

if __name__ == "__main__":
    sys.exit(main())
