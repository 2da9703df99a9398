"""`innet-drl analyze ratio`: measures points several times, one list after the other, and reports results.

Actors are swept with all threads, threads with the best number of actors, and environments with this number and all
threads. The model then proposes the best other combinations of the lists, which are measured, too. Medians decide.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import innet_drl as innet
from innet_drl.analysis.flags import RatioFlags
from innet_drl.analysis.pictures import check_outputs
from innet_drl.analysis.repeats import shuffled
from innet_drl.analysis.sweep import output
from innet_drl.analysis.sweep.knee import curve_of, knee, quality, recommended
from innet_drl.analysis.sweep.model import MOST_ACTORS_PER_THREAD, SMALLEST_FIT, Setting, fit, left_out_errors, usable
from innet_drl.analysis.sweep.point import SWEPT, Key, Point, combined, measure, settings_of
from innet_drl.analysis.sweep.sweep_file import Sweep, this_machine
from innet_drl.signals import Interrupted, handle, leave_terminal
from innet_drl.train import environments, preset
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.flags import keyword_arguments
from innet_drl.train.observe.display import page_of_command
from innet_drl.train.settings.config import Config, read_settings
from innet_drl.train.settings.machine import commit

PROPOSALS = 2
"""Points that the model proposes and the sweep measures."""
CPUS = Path("/sys/devices/system/cpu")

Measure = Callable[[str, Sequence[Key]], list[Point]]
"""Measures what is missing of the points of a list with this name, and returns their medians."""


class Lists(NamedTuple):
    """The swept numbers."""

    actors: list[int]
    threads: list[int]
    environments: list[int]


def run(flags: RatioFlags) -> None:
    """Measures what is missing in the file; prints, writes and draws the results, also when it is ended early.

    Raises:
        ConfigurationError: An unusable flag, or a file of another machine, other settings or conditions.
        ProcessError: A run failed.
        Interrupted: Ctrl-C or another signal.
    """
    config = settings(flags)
    available = hardware_threads()
    lists = lists_of(flags, config, len(available))
    plot = flags.plot or flags.json.with_suffix(".svg")
    check_outputs(flags.json, flags.csv, plot, needs_plot=flags.plot is not None)
    conditions = {name: getattr(flags, name) for name in ("seconds", "warm_up")}
    conditions |= {"commit": commit(), "innet_drl": innet.__version__}
    sweep = Sweep(this_machine(config.device), flags.preset, config, conditions=conditions).continued(flags.json)
    print(output.machine(sweep.machine))
    sweep.save(flags.json)

    def measured(swept: str, keys: Sequence[Key]) -> list[Point]:
        missing = [
            key
            for repeat, key in shuffled(keys, flags.repeats, flags.seed)
            if len(sweep.repeats.get(key, ())) <= repeat
        ]
        for number, key in enumerate(missing, 1):
            say = functools.partial(progress, f"{swept}, measurement {number} of {len(missing)}: {output.name(key)}")
            chosen = settings_of(config, key[0], key[2], flags.seconds)
            point, sweep.missing = measure(chosen, available[: key[1]], flags.warm_up, flags.seconds, say)
            sweep.measured.append(point)
            sweep.save(flags.json)
            page.print(f"{output.name(key)}: {point.frames_per_s:,.0f} frames/s, {point.updates_per_s:,.1f} updates/s")
        return [combined(sweep.repeats[key]) for key in keys]

    def progress(what: str, done: str) -> None:
        # Only here: a process that is interrupted while it starts prints a traceback.
        for number in came:
            leave_terminal(number)
            raise Interrupted(number)
        page.progress(what, done)

    came: list[int] = []
    before = handle(lambda number, frame: came.append(number))
    try:
        with page_of_command(f"sweep of {config.environment_name}") as page:
            if flags.grid:
                measured("grid", list(itertools.product(*lists)))
            else:
                propose(lists, sweep, _axes(lists, config, measured), measured)
    finally:
        if sweep.measured:
            sweep.results = results(sweep)
            sweep.save(flags.json)
            output.report(sweep, flags.csv, plot)
        print(f"{len(sweep.measured)} measurements are in {flags.json}; the same command adds missing ones")
        for number, handler in before.items():
            signal.signal(number, handler)


def settings(flags: RatioFlags) -> Config:
    """Returns the settings of the runs.

    Raises:
        ConfigurationError: There is no such preset or setting, or the run cannot be swept.
    """
    changes: dict[str, Any] = {} if flags.config_file is None else read_settings(flags.config_file)
    config = preset(flags.preset, **{**changes, **keyword_arguments("--settings", flags.settings)})
    if config.serial:
        raise ConfigurationError("--settings serial=true: a serial run is one process: sweep a run with actors")
    if config.replay != "embedded":
        raise ConfigurationError(
            f"--settings replay={config.replay}: the server's processor time would be missing: sweep with the "
            "replay memory in the learner"
        )
    environments.check(config)
    return config


def lists_of(flags: RatioFlags, config: Config, available: int) -> Lists:
    """Returns what is swept: the flags' lists, or the default ones for a number of hardware threads.

    Raises:
        ConfigurationError: A list has more than this machine can run.
    """
    threads = sorted(set(flags.threads)) or _halves(available)
    if max(threads) > available:
        raise ConfigurationError(
            f"--threads {max(threads)}: this process may use {available} hardware threads: leave larger numbers "
            "away; innet-drl analyze what-if predicts larger machines"
        )
    actors = sorted(set(flags.actors)) or _steps(2 * max(threads))
    most = MOST_ACTORS_PER_THREAD * max(threads)
    if max(actors) > most:
        raise ConfigurationError(
            f"--actors {max(actors)}: at most {most}, {MOST_ACTORS_PER_THREAD} for each of {max(threads)} hardware "
            "threads: each actor is a process that computes, so that more of them only wait for a core and take "
            "memory; give each more --environments"
        )
    own = config.environments
    by_default = sorted({max(1, own // 4), max(1, own // 2), own, 2 * own})
    chosen = sorted(set(flags.environments)) or by_default
    return Lists(actors, threads, chosen)


def _axes(lists: Lists, config: Config, measured: Measure) -> list[Point]:
    """Measures one list after the other."""
    all_threads = lists.threads[-1]
    environments = config.environments if config.environments in lists.environments else lists.environments[0]
    points = measured("actors", [(actors, all_threads, environments) for actors in lists.actors])
    actors = recommended(points).actors
    points += measured("threads", [(actors, threads, environments) for threads in lists.threads])
    return points + measured("environments", [(actors, all_threads, number) for number in lists.environments])


def propose(lists: Lists, sweep: Sweep, swept: Sequence[Point], measured: Measure) -> None:
    """Measures the combinations that the model, fitted to all points, predicts as best."""
    keys = {point.key for point in swept}
    proposed = [key for key in itertools.product(*lists) if key in sweep.repeats and key not in keys]
    # An earlier run of the command may have been interrupted.
    measured("proposals", proposed)
    for _ in range(PROPOSALS - len(proposed)):
        left = [key for key in itertools.product(*lists) if key not in sweep.repeats]
        if not left or len(usable(sweep.points)) < SMALLEST_FIT:
            break
        model = fit(sweep.points, sweep.config, sweep.gpus)
        rates = {key: model.predict(Setting(*key, gpus=sweep.gpus)).frames_per_s for key in left}
        measured("proposal", [max(left, key=lambda key: rates[key])])


def results(sweep: Sweep) -> dict[str, Any]:
    """Returns the results of the points, for the file."""
    points, best = sweep.points, recommended(sweep.points)
    found = {}
    for name in ("actors", "threads"):
        curve = curve_of(points, name)
        found[name] = knee([getattr(point, name) for point in curve], [point.frames_per_s for point in curve])
    errors = left_out_errors(points, sweep.config, sweep.gpus)
    multiprocessors = sweep.machine.multiprocessors
    threads = best.threads if found["threads"] is None else found["threads"]
    chosen = {name: getattr(best, name) for name in SWEPT}
    return {
        "knee": found,
        "threads_per_sm": round(threads / multiprocessors, 4) if multiprocessors else None,
        "recommended": {**chosen, "share_of_best": round(quality(best, points), 4)},
        "model": errors and {"services": dataclasses.asdict(fit(points, sweep.config, sweep.gpus).services), **errors},
    }


def _halves(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({most, *itertools.takewhile(lambda n: n < most, (1 << power for power in range(16)))})


def _steps(most: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, ... up to `most`."""
    between = itertools.chain.from_iterable((1 << power, 3 << power >> 1) for power in range(1, 16))
    return sorted({1, *itertools.takewhile(lambda n: n <= most, between)})


def hardware_threads() -> list[int]:
    """Returns the hardware threads of this process core by core, so that the first n resemble a smaller machine."""
    return sorted(os.sched_getaffinity(0), key=lambda thread: (_siblings(thread), thread))


def _siblings(thread: int) -> int:
    """The lowest thread number of the core; the thread itself if the kernel lists no siblings."""
    try:
        listed = (CPUS / f"cpu{thread}/topology/thread_siblings_list").read_text()
    except OSError:
        return thread
    return int(listed.replace("-", ",").split(",")[0])
