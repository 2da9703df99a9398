"""The command line: `innet-drl train | learner | actor | evaluate | record | report | analyze`.

`innet-drl train --preset cartpole --learning-rate 1e-3` starts from a preset and changes one field; each package has a
file `flags`. Other packages are imported when a command runs: a missing extra `train` has a clear error, and actors,
which import the main module again, start fast.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import innet_drl as innet

USAGE = """\
usage: innet-drl COMMAND [flags]

commands:
  train      train an agent; writes runs/<name>/
  learner    the learner of a run whose actors are on other hosts
  actor      one of these actors
  evaluate   play games with the agents of runs and print a report as JSON
  record     record a video of a game of the agent of a run
  report     write one HTML file with curves, results, settings and videos of runs
  analyze    analyze breakdown shows the time of actors and learners, analyze ratio measures how many actors, threads
             and environments this machine needs, analyze what-if predicts other machines

innet-drl COMMAND --help lists the flags; innet-drl --version prints the release.
The commands need the extra train: pip install 'innet-drl[train]'.
"""

ANALYZE_USAGE = """\
usage: innet-drl analyze {breakdown,ratio,what-if} [flags]

innet-drl analyze breakdown --help, innet-drl analyze ratio --help and innet-drl analyze what-if --help list the flags.
"""

BROKEN_PIPE = 141
"""Exit status after a broken pipe: 128 + SIGPIPE."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 0, 1 after an error, 2 for wrong flags.

    Ctrl-C, and SIGTERM or SIGHUP to a run, raise the signal again once everything is written. With `arguments` the
    caller gets the status that a shell shows for it: 130, 143 or 129.
    """
    try:
        try:
            return _main(list(sys.argv[1:] if arguments is None else arguments))
        finally:
            print(end="", flush=True)
    except BrokenPipeError:
        if _stdout_is_read():
            raise
        # Otherwise the interpreter would flush the buffered rest at exit, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt as error:
        from innet_drl.signals import end_by, status_of

        return end_by(error) if arguments is None else status_of(error)


def _stdout_is_read() -> bool:
    """Whether the read end of standard output is open; `head` closes it early."""
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
        from innet_drl.errors import closest

        hint = closest(first, _COMMANDS, f"the commands are {', '.join(_COMMANDS)}")
        print(f"error: there is no command {first!r}{hint}" if first else USAGE.rstrip(), file=sys.stderr)
        return 2
    return run_command(command, given[1:])


def run_command(command: Callable[[Sequence[str]], None], arguments: Sequence[str]) -> int:
    """Runs one command; prints errors that the user can correct in one line, below a traceback of the user's code."""
    # libgomp reads this when torch is loaded. Idle OpenMP threads must not spin: actors need the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # As in `shutil.get_terminal_size`, 0 is an unknown size; rich would print nothing.
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name) == "0":
            del os.environ[name]
    # The current directory has modules of the user's environments; it is last, so that they shadow no package.
    with contextlib.suppress(FileNotFoundError):
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())
    from innet_drl.errors import naming_extras
    from innet_drl.train.errors import TrainingError, trace_of

    try:
        with naming_extras():
            command(arguments)
    except (TrainingError, innet.ReplayError) as error:
        trace = trace_of(error) if isinstance(error, TrainingError) else ""
        print(f"{trace}error: {error}", file=sys.stderr)
        return 1
    return 0


def train(arguments: Sequence[str]) -> None:
    """`innet-drl train`."""
    from innet_drl.train.flags import parse_train

    chosen = parse_train(arguments)
    flags = chosen.flags
    callbacks = _callbacks(track=flags.track)
    from innet_drl.launch import start
    from innet_drl.train.observe.display import Page, logs_on_console
    from innet_drl.train.run_folder import RunFolder

    out = flags.resume or flags.out
    with logs_on_console():
        start.train(
            chosen.config,
            out or RunFolder.default_path(chosen.name),
            resume=flags.resume is not None,
            unused=out is None,
            launcher=flags.launcher,
            callbacks=callbacks,
            display=Page,
            signals=True,
        )


def learner(arguments: Sequence[str]) -> None:
    """`innet-drl learner`."""
    from innet_drl.train.flags import parse_learner

    chosen = parse_learner(arguments)
    callbacks = _callbacks(track=chosen.flags.track)
    from innet_drl.launch import start
    from innet_drl.train.observe.display import Page, logs_on_console

    with logs_on_console():
        start.train(chosen.config, chosen.flags.out, launcher=None, callbacks=callbacks, display=Page, signals=True)


def actor(arguments: Sequence[str]) -> None:
    """`innet-drl actor`."""
    from innet_drl.train.flags import ActorFlags, parse

    flags = parse(ActorFlags, "actor", arguments)
    from innet_drl.launch.joining import Joining, run
    from innet_drl.train.memory import server_token_of_actors
    from innet_drl.train.observe.display import logs_on_console

    own = ("environment", "environment_threads", "actor_threads")
    changes = {name: getattr(flags, name) for name in own if getattr(flags, name) is not None}
    with logs_on_console():
        token = server_token_of_actors()
        run(Joining(flags.replay, flags.index, flags.run, flags.replay_ca, changes, token, flags.namespace))


def _callbacks(*, track: bool) -> list[Any]:
    if not track:
        return []
    from innet_drl.train import WandbCallback

    return [WandbCallback()]


def evaluate(arguments: Sequence[str]) -> None:
    """`innet-drl evaluate`."""
    import json

    from innet_drl.train.flags import EvaluateFlags, parse

    flags = parse(EvaluateFlags, "evaluate", arguments)
    from innet_drl.train.observe.display import logs_on_console, page_of_command

    def show(report: Any) -> None:
        print(report, file=sys.stderr, flush=True)
        print(json.dumps(report.as_dict()), flush=True)

    if flags.follow:
        import rich.console

        with logs_on_console(rich.console.Console(stderr=True)):
            from innet_drl.train.runs.following import follow

            for report in follow(flags.runs, namespace=flags.namespace, **_conditions(flags)):
                show(report)
        return
    if flags.namespace is not None:
        from innet_drl.train.errors import ConfigurationError

        raise ConfigurationError("--namespace: it belongs to --follow; otherwise the folders name the runs")
    with page_of_command(f"evaluation of {' '.join(map(str, flags.runs))}") as page:
        from innet_drl.train.play.evaluation_report import evaluate_runs

        report = evaluate_runs(flags.runs, **_conditions(flags), progress=page.progress)
    show(report)


def _conditions(flags: Any) -> dict[str, Any]:
    from innet_drl.train.play.evaluation_report import CONDITIONS

    given = {name: getattr(flags, name.removeprefix("evaluation_")) for name in CONDITIONS}
    changes = {name: value for name, value in given.items() if value is not None}
    return {"best": flags.best, "protocol": flags.protocol, "seeds": flags.seeds, "changes": changes}


def record(arguments: Sequence[str]) -> None:
    """`innet-drl record`."""
    import dataclasses

    from innet_drl.train.flags import RecordFlags, parse

    flags = parse(RecordFlags, "record", arguments)
    from innet_drl.train.errors import writing
    from innet_drl.train.observe.display import page_of_command, score
    from innet_drl.train.run_folder import RunFolder

    with page_of_command(f"video of {flags.run}") as page:
        from innet_drl.train.play import video
        from innet_drl.train.play.agent import load

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


def report(arguments: Sequence[str]) -> None:
    """`innet-drl report`."""
    from innet_drl.train.flags import ReportFlags, parse

    flags = parse(ReportFlags, "report", arguments)
    from innet_drl.train.observe.display import page_of_command

    with page_of_command(f"report of {' '.join(map(str, flags.runs))}") as page:
        from innet_drl.analysis.report import write_report

        written = write_report(flags.runs, flags.out, progress=page.progress)
    for note in written.notes:
        print(note, file=sys.stderr)
    runs = "1 run" if len(written.runs) == 1 else f"{len(written.runs)} runs"
    print(f"report of {runs}, {written.bytes / 2**20:.1f} MiB: {written.path}")


def analyze(arguments: Sequence[str]) -> None:
    """`innet-drl analyze`."""
    from innet_drl.train.errors import ConfigurationError

    what = arguments[0] if arguments else None
    if what in ("-h", "--help"):
        print(ANALYZE_USAGE, end="")
        return
    analyses = {
        "breakdown": ("BreakdownFlags", "breakdown"),
        "ratio": ("RatioFlags", "sweep.ratio"),
        "what-if": ("WhatIfFlags", "sweep.what_if"),
    }
    if what not in analyses:
        raise ConfigurationError("innet-drl analyze has breakdown, ratio and what-if: innet-drl analyze ratio --help")
    from innet_drl.analysis import flags
    from innet_drl.train.flags import parse

    name, module = analyses[what]
    parsed = parse(getattr(flags, name), f"analyze {what}", arguments[1:])
    importlib.import_module(f"innet_drl.analysis.{module}").run(parsed)


_COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "train": train,
    "learner": learner,
    "actor": actor,
    "evaluate": evaluate,
    "record": record,
    "report": report,
    "analyze": analyze,
}

if __name__ == "__main__":
    sys.exit(main())
