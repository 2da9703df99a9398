"""The model of `innet-drl analyze`, against a simulation of actors, learner and replay ratio that it knows nothing of.

The simulation draws the time of each piece of work at random, and shares the hardware threads between processes that
have work, event by event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from innet_drl.analysis.flags import WhatIfFlags
from innet_drl.analysis.sweep.knee import curve_of, knee, recommended
from innet_drl.analysis.sweep.model import Setting, fit, left_out_errors, throughput
from innet_drl.analysis.sweep.point import Key, Point, Role
from innet_drl.analysis.sweep.ratio import Lists, propose, results
from innet_drl.analysis.sweep.sweep_file import Gpu, Machine, Sweep
from innet_drl.analysis.sweep.what_if import ROWS, predict, table
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.flags import parse
from innet_drl.train.settings.config import Config

CONFIG = Config(environment="CartPole-v1", environments=8, learner_threads=1, batch_size=64, samples_per_insert=8.0)
VECTOR_STEP, STEP, UPDATE = 400e-6, 100e-6, 0.5e-3
"""Seconds of the simulated work: of a vector step, of each of its steps, and of an update on a CPU."""
GPU_SHARE = 0.9
"""Share of a simulated update on a GPU in which the GPU computes."""
VECTOR_STEPS = 3_000


def simulated(actors: int, threads: int, environments: int, *, gpu: bool = False, gpu_speed: float = 1.0) -> Point:
    """Runs the simulation and returns its point."""
    random = np.random.default_rng([actors, threads, environments])
    service = VECTOR_STEP + environments * STEP
    update = UPDATE * (1 - GPU_SHARE + GPU_SHARE / gpu_speed) if gpu else UPDATE
    ratio, slack = CONFIG.samples_per_insert, CONFIG.slack_of(actors * environments, 1)
    left = np.append(random.gamma(4, service / 4, actors), random.gamma(4, update / 4))
    ahead = now = computed = 0.0
    steps = updates = 0
    while steps < VECTOR_STEPS * environments:
        # A finished push or batch waits, with nothing left to do, until the replay ratio admits it.
        runs = left > 0
        for worker in np.flatnonzero(~runs):
            change = ratio * environments if worker < actors else -float(CONFIG.batch_size)
            if -slack <= ahead + change <= slack:
                ahead += change
                steps += environments if worker < actors else 0
                updates += worker == actors
                mean = service if worker < actors else update
                left[worker] = random.gamma(4, mean / 4)
                runs[worker] = True
        # A GPU's update does not share the hardware threads.
        shared = runs.copy()
        shared[actors] &= not gpu
        speed = np.where(shared, min(1.0, threads / max(1, int(shared.sum()))), 1.0)
        elapsed = float((left[runs] / speed[runs]).min())
        left[runs] = np.maximum(0.0, left[runs] - elapsed * speed[runs])
        left[left < 1e-12] = 0.0
        computed += float(elapsed * speed[shared].sum())
        now += elapsed
    busy = service / environments * steps / (actors * now)
    return Point(
        actors=actors,
        threads=threads,
        environments=environments,
        frames_per_s=steps / now,
        updates_per_s=updates / now,
        samples_per_insert=updates * CONFIG.batch_size / steps,
        cpu=computed / now / threads,
        gpu=updates * UPDATE * GPU_SHARE / gpu_speed / now if gpu else None,
        cpu_watts=None,
        gpu_watts=None,
        watts=None,
        frames_per_joule=None,
        others=0.0,
        seconds=now,
        frames_per_step=1,
        actor=Role(
            service / environments, {"environment": 0.7 * busy, "inference": 0.3 * busy, "write": max(0.0, 1 - busy)}
        ),
        learner=Role(
            update * (1 - GPU_SHARE) if gpu else update,
            {"update": update * updates / now, "wait for a batch": 1 - update * updates / now},
        ),
    )


@pytest.fixture(scope="module")
def small_machine() -> list[Point]:
    """A sweep of up to 4 threads."""
    keys = [(1, 4, 8), (2, 4, 8), (3, 4, 8), (4, 4, 8), (6, 4, 8), (8, 4, 8), (3, 1, 8), (3, 2, 8), (2, 3, 8)]
    return [simulated(*key) for key in [*keys, (3, 4, 2), (3, 4, 4), (3, 4, 16), (1, 1, 8), (1, 2, 2)]]


def test_points_left_out_of_the_fit_are_predicted(small_machine: list[Point]) -> None:
    errors = left_out_errors(small_machine, CONFIG, gpus=0)
    assert errors is not None
    assert errors["left_out_error_median"] < 0.05
    assert errors["left_out_error_largest"] < 0.15


def test_larger_machines_are_predicted(small_machine: list[Point]) -> None:
    model = fit(small_machine, CONFIG, gpus=0)
    for key in [(6, 8, 8), (2, 16, 32), (12, 8, 1), (8, 8, 8)]:
        point = simulated(*key)
        predicted = model.predict(Setting(*point.key, 0))
        assert predicted.frames_per_s == pytest.approx(point.frames_per_s, rel=0.15), key
        assert predicted.updates_per_s == pytest.approx(point.updates_per_s, rel=0.15), key


def test_a_faster_gpu_is_predicted() -> None:
    points = [simulated(*key, gpu=True) for key in [(1, 4, 8), (2, 4, 8), (3, 4, 8), (4, 4, 8), (4, 2, 8), (2, 4, 2)]]
    model = fit(points, CONFIG, gpus=1)
    for actors, threads, gpu_speed in [(4, 4, 2.0), (8, 8, 2.0), (8, 8, 4.0)]:
        point = simulated(actors, threads, 8, gpu=True, gpu_speed=gpu_speed)
        predicted = model.predict(Setting(actors, threads, 8, 1, gpu_speed))
        assert predicted.frames_per_s == pytest.approx(point.frames_per_s, rel=0.15), (actors, threads, gpu_speed)


def test_the_bottleneck_is_named(small_machine: list[Point]) -> None:
    model = fit(small_machine, CONFIG, gpus=0)
    found = [model.predict(Setting(*key)).bottleneck for key in [(1, 8, 2), (8, 32, 8), (8, 1, 8)]]
    assert found == ["actors: environment", "learner: update on the CPU", "processor: all hardware threads"]


def test_a_queue_without_room_to_spare_loses_throughput() -> None:
    assert throughput(10.0, 100.0, 50) == pytest.approx(10.0)
    assert throughput(100.0, 10.0, 50) == pytest.approx(10.0)
    assert throughput(10.0, 10.0, 4) == pytest.approx(8.0)
    assert throughput(10.0, 10.0 + 1e-12, 4) == pytest.approx(8.0)
    assert throughput(0.0, 10.0, 4) == 0.0


def test_the_knee_is_where_a_tenth_more_buys_a_twentieth() -> None:
    counts = [1, 2, 4, 8, 16, 32]
    # Amdahl's n / (1 + s (n - 1)): the elasticity is (1 - s) / (1 + s (n - 1)), 1/2 at n = 1 / s - 1.
    assert knee(counts, [n / (1 + 0.1 * (n - 1)) for n in counts]) == pytest.approx(9.0, rel=0.02)
    assert knee(counts, [100.0 * n for n in counts]) is None
    assert knee([1, 2, 3, 4, 6, 8], [100.0, 200.0, 300.0, 300.0, 300.0, 300.0]) == pytest.approx(3.0, rel=0.1)
    assert knee([1, 2, 3, 4], [100.0, 195.0, 240.0, 238.0]) == pytest.approx(2.5, rel=0.1)
    assert knee([1, 2, 3, 4], [100.0, 102.0, 99.0, 80.0]) == 1.0
    assert knee([4, 1], [100.0, 90.0]) == 1.0
    assert knee([4, 1], [390.0, 100.0]) is None
    assert knee([2], [10.0]) is None


def test_the_longest_curve_of_a_sweep_is_fitted(small_machine: list[Point]) -> None:
    assert [point.key for point in curve_of(small_machine, "actors")] == [(n, 4, 8) for n in (1, 2, 3, 4, 6, 8)]
    assert [point.key for point in curve_of(small_machine, "threads")] == [(3, n, 8) for n in (1, 2, 4)]
    assert [point.key for point in curve_of(small_machine, "environments")] == [(3, 4, n) for n in (2, 4, 8, 16)]


def test_the_cheapest_of_equal_points_is_recommended(small_machine: list[Point]) -> None:
    best = max(small_machine, key=lambda point: point.frames_per_s)
    chosen = recommended(small_machine)
    assert chosen.frames_per_s >= 0.96 * best.frames_per_s
    assert (chosen.threads, chosen.actors) <= (best.threads, best.actors)


def sweep(points: list[Point], gpus: int) -> Sweep:
    """A sweep of simulated points, on a made-up machine."""
    machine = Machine("simulated", 4, 4, 1 << 34, (Gpu("simulated GPU", 80),) * gpus)
    return Sweep(machine, "vector", CONFIG, points)


def test_another_machine_is_asked_for(small_machine: list[Point]) -> None:
    found = predict(sweep(small_machine, gpus=0), WhatIfFlags(Path("sweep.json"), cores=64))
    best = recommended(small_machine)
    predicted, measured, asked = (found[row] for row in ROWS)
    assert [row["threads"] for row in (predicted, measured, asked)] == [best.threads, best.threads, 64]
    assert (measured["actors"], measured["frames_per_s"]) == (best.actors, best.frames_per_s)
    assert predicted["actors"] == best.actors
    assert predicted["frames_per_s"] != measured["frames_per_s"]
    assert predicted["frames_per_s"] == pytest.approx(measured["frames_per_s"], rel=0.15)
    assert asked["frames_per_s"] >= predicted["frames_per_s"]
    assert asked["bottleneck"] == "learner: update on the CPU"
    shown = table(found, sweep(small_machine, gpus=0))
    assert all(row in shown for row in ROWS)
    assert "64 threads are more than the 4 that were measured" in shown


def test_the_errors_of_a_prediction_have_their_median_and_the_point_of_the_largest(small_machine: list[Point]) -> None:
    """A point of half the frames is off by 100 %."""
    wrong = small_machine[3]
    points = [*small_machine, dataclasses.replace(wrong, actors=5, frames_per_s=wrong.frames_per_s / 2)]
    found = predict(sweep(points, gpus=0), WhatIfFlags(Path("sweep.json")))
    assert found["model"]["largest_at"] == {"actors": 5, "threads": 4, "environments": 8}
    assert found["model"]["left_out_error_median"] < 0.1 < 0.8 < found["model"]["left_out_error_largest"]
    shown = table(found, sweep(points, gpus=0))
    assert f"largest {found['model']['left_out_error_largest']:.0%} (5 actors, 4 threads, 8 environments)" in shown


def test_several_faster_gpus_are_asked_for() -> None:
    points = [simulated(*key, gpu=True) for key in [(1, 4, 8), (2, 4, 8), (4, 4, 8), (6, 4, 8), (4, 2, 8)]]
    flags = WhatIfFlags(Path("sweep.json"), cores=64, gpus=4, gpu_speed=2.0)
    found = predict(sweep(points, gpus=1), flags)
    predicted, _, asked = (found[row] for row in ROWS)
    assert asked["frames_per_s"] > 4 * predicted["frames_per_s"]
    assert asked["actors"] > predicted["actors"]
    assert "an upper bound" in table(found, sweep(points, gpus=1))


@pytest.mark.parametrize(
    ("gpus", "changes", "part"),
    [
        (0, {"gpus": 4}, "was measured without a GPU"),
        (0, {"gpu_speed": 2.0}, "was measured without a GPU"),
        (1, {"gpus": 0}, "has no update on a CPU"),
    ],
)
def test_questions_without_an_answer(gpus: int, changes: dict[str, float], part: str) -> None:
    flags = WhatIfFlags(Path("sweep.json"), **changes)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=part):
        predict(sweep([], gpus), flags)


def test_a_faster_gpu_needs_the_measured_ones_utilization(small_machine: list[Point]) -> None:
    flags = WhatIfFlags(Path("sweep.json"), gpu_speed=2.0)
    with pytest.raises(ConfigurationError, match=r"gpu-speed 2: sweep.json has no utilization of the GPU"):
        predict(sweep(small_machine, gpus=1), flags)


def test_too_few_points_are_not_fitted(small_machine: list[Point]) -> None:
    with pytest.raises(ConfigurationError, match="the model needs 3 measured points, and there are 2"):
        predict(sweep(small_machine[:2], 0), WhatIfFlags(Path("sweep.json"), cores=8))


def test_points_without_an_update_are_left_out(small_machine: list[Point]) -> None:
    """A sweep with such a point ends, and is continued."""
    idle = dataclasses.replace(small_machine[0], actors=7, updates_per_s=0.0)
    stopped = dataclasses.replace(small_machine[0], actors=9, frames_per_s=0.0, updates_per_s=0.0)
    with_idle = [idle, *small_machine[:5], stopped]
    assert left_out_errors(with_idle, CONFIG, 0) == left_out_errors(small_machine[:5], CONFIG, 0) is not None
    flags = WhatIfFlags(Path("sweep.json"), cores=8)
    assert predict(sweep(with_idle, 0), flags) == predict(sweep(small_machine[:5], 0), flags)
    assert results(sweep(with_idle, 0))["model"] is not None
    # With too few others there is no model and no proposal.
    few = sweep([idle, stopped, *small_machine[:2]], 0)
    assert results(few)["model"] is None
    propose(Lists([1, 2, 3], [4], [8]), few, few.points, refuse)


def refuse(swept: str, keys: Sequence[Key]) -> list[Point]:
    assert keys == []
    return []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu-speed", "0"], "gpu_speed 0.0: it must be greater than 0"),
        (["--cores", "0"], "cores 0: it must be greater than or equal to 1"),
        (["--actors", "-1"], "actors -1: it must be greater than or equal to 1"),
    ],
)
def test_numbers_out_of_range_are_one_error(flags: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        parse(WhatIfFlags, "analyze what-if", ["sweep.json", *flags])
