"""`innet-drl analyze ratio`: measures points one after the other, and reports results.

Actors are swept with all threads, threads with the best number of actors, and environments with this number and all
threads. The model then proposes the best other combinations of the lists, which are measured, too.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from innet_drl.analysis.flags import RatioFlags
from innet_drl.analysis.pictures import can_draw
from innet_drl.analysis.sweep import output
from innet_drl.analysis.sweep.knee import NUMBERS, curve_of, knee, quality, recommended
from innet_drl.analysis.sweep.model import MOST_ACTORS_PER_THREAD, SMALLEST_FIT, Setting, fit, left_out_errors, usable
from innet_drl.analysis.sweep.point import Point, measure, settings_of
from innet_drl.analysis.sweep.sweep_file import Sweep, this_machine
from innet_drl.train import environments, preset
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.flags import keyword_arguments
from innet_drl.train.observe.display import page_of_command
from innet_drl.train.settings.config import Config, read_settings

PROPOSALS = 2
"""Points that the model proposes and the sweep measures."""
NOISY = 0.05
"""Share of the hardware threads that other programs may use without a warning."""
CPUS = Path("/sys/devices/system/cpu")

Key = tuple[int, int, int]
"""Actors, threads, environments."""


@dataclasses.dataclass(frozen=True)
class Lists:
    """The swept numbers."""

    actors: list[int]
    threads: list[int]
    environments: list[int]

    def most_points(self, *, grid: bool) -> int:
        """Points of a sweep, at most."""
        swept = len(self.actors) + len(self.threads) + len(self.environments) - 2 + PROPOSALS
        return len(self.grid) if grid else min(swept, len(self.grid))

    @property
    def grid(self) -> list[Key]:
        """Every combination."""
        return list(itertools.product(self.actors, self.threads, self.environments))


def run(flags: RatioFlags) -> None:
    """Measures the points that are missing in the file, and prints, writes and draws the results.

    Raises:
        ConfigurationError: An unusable flag, or a file of another machine.
        ProcessError: A run failed.
        KeyboardInterrupt: Ctrl-C; the file has the points measured so far.
    """
    config = settings(flags)
    available = hardware_threads()
    lists = lists_of(flags, config, len(available))
    sweep = Sweep(this_machine(config.device), flags.preset, config).continued(flags.json)
    print(output.machine(sweep.machine))
    sweep.save(flags.json)

    # The file may also have points of other lists.
    planned = len({point.key for point in sweep.points} - set(lists.grid)) + lists.most_points(grid=flags.grid)

    def measured(key: Key) -> Point:
        found = sweep.point(key)
        if found is None:
            found, missing = measure(
                settings_of(config, key[0], key[2], flags.seconds),
                available[: key[1]],
                flags.warm_up,
                flags.seconds,
                lambda done: page.progress(
                    f"point {len(sweep.points) + 1} of up to {planned}, {output.name(key)}", done
                ),
            )
            sweep.points.append(found)
            sweep.missing = missing
            sweep.save(flags.json)
            page.print(output.line(found))
        return found

    try:
        with page_of_command(f"sweep of {config.environment_name}") as page:
            if flags.grid:
                for key in lists.grid:
                    measured(key)
            else:
                _axes(lists, config, measured)
                propose(lists, sweep, measured)
    except KeyboardInterrupt:
        print(f"interrupted: {flags.json} keeps {len(sweep.points)} points; the same command continues with the rest")
        raise
    sweep.results = results(sweep)
    sweep.save(flags.json)
    print(output.points(sweep.points))
    print(output.summary(sweep))
    plot = flags.plot or flags.json.with_suffix(".svg")
    if can_draw():
        output.draw(sweep, plot)
        print(f"results: {flags.json}, {plot}")
    else:
        print(f"results: {flags.json}; no picture: matplotlib is not installed (pip install 'innet-drl[bench]')")
    noisy = [point for point in sweep.points if point.others > NOISY]
    if noisy:
        most = max(point.others for point in noisy)
        print(
            f"not a quiet machine: other programs used up to {most:.0%} of the hardware threads at {len(noisy)} "
            "points: end them, delete the file and measure again"
        )


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


def _axes(lists: Lists, config: Config, measured: Callable[[Key], Point]) -> None:
    """Measures one list after the other."""
    all_threads = lists.threads[-1]
    environments = config.environments if config.environments in lists.environments else lists.environments[0]
    actors = recommended([measured((actors, all_threads, environments)) for actors in lists.actors]).actors
    for threads in lists.threads:
        measured((actors, threads, environments))
    for number in lists.environments:
        measured((actors, all_threads, number))


def propose(lists: Lists, sweep: Sweep, measured: Callable[[Key], Point]) -> None:
    """Measures the combinations that the model, fitted to all points, predicts as best."""
    for _ in range(PROPOSALS):
        left = [key for key in lists.grid if sweep.point(key) is None]
        if not left or len(usable(sweep.points)) < SMALLEST_FIT:
            break
        model = fit(sweep.points, sweep.config, sweep.gpus)
        rates = {key: model.predict(Setting(*key, gpus=sweep.gpus)).frames_per_s for key in left}
        measured(max(left, key=lambda key: rates[key]))


def results(sweep: Sweep) -> dict[str, Any]:
    """Returns the results of the points, for the file."""
    points, best = sweep.points, recommended(sweep.points)
    curves = {name: curve_of(points, name) for name in ("actors", "threads")}
    found = {
        name: knee([getattr(point, name) for point in curve], [point.frames_per_s for point in curve])
        for name, curve in curves.items()
    }
    multiprocessors = sweep.machine.multiprocessors
    threads = best.threads if found["threads"] is None else found["threads"]
    chosen = {name: getattr(best, name) for name in NUMBERS}
    return {
        "knee": found,
        "threads_per_sm": round(threads / multiprocessors, 4) if multiprocessors else None,
        "recommended": {**chosen, "share_of_best": round(quality(best, points), 4)},
        "model": model_of(sweep),
    }


def model_of(sweep: Sweep) -> dict[str, Any] | None:
    """Returns the model's service times and leave-one-out errors; `None` with too few points."""
    errors = left_out_errors(sweep.points, sweep.config, sweep.gpus)
    if not errors:
        return None
    services = fit(sweep.points, sweep.config, sweep.gpus).services
    return {
        "services": dataclasses.asdict(services),
        "left_out_error_median": round(statistics.median(errors), 4),
        "left_out_error_largest": round(max(errors), 4),
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
