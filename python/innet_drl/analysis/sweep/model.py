"""A model of a run: service times of environment, inference, transfer and update, and the queues between them.

- An actor's agent step takes `fixed / environments + each` seconds, for environment, inference and transfer.
- An update takes `update` seconds of its learner; the GPU's part of it is divided by the GPU's speed.
- **Processor.** Actors and learners share the hardware threads equally: if they need more processor seconds than
  there are, all are slowed by the same factor (processor sharing).
- **Replay memory.** Actors fill it and learners empty it at the replay ratio: an M/M/1/K queue, whose capacity K is the
  slack of the ratio. With rates p and q its throughput is p (1 - x^K) / (1 - x^(K + 1)), x = p / q.

The measured points give the service times. Three factors and the parallel share of an update are then fitted to the
rates, by least squares of their logarithms with a weak prior at the direct measurement.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import brentq, least_squares, nnls

from innet_drl.analysis.sweep.point import SWEPT, Point
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.observe.stopwatch import MEMORY, WAITING
from innet_drl.train.settings.config import Config

SMALLEST_FIT = 3
"""Least number of points for a fit."""
PRIOR = 0.3
"""Prior standard deviation of the fitted factors' logarithms, in units of the residuals."""
NOISE = 0.05
"""Standard deviation of a measured rate's logarithm."""
MOST_ACTORS_PER_THREAD = 8
"""Largest number of actors for each hardware thread; more would only wait."""


@dataclass(frozen=True)
class ServiceTimes:
    """Service times in seconds on an idle machine."""

    environment: tuple[float, float]
    """Time of a vector step, and time of each of its agent steps."""
    inference: tuple[float, float]
    """Time of a vector step, and time of each of its agent steps."""
    transfer: float
    """Time of packing, pushing and pulling parameters for an agent step."""
    update: float
    """Time of an update with one thread of the learner's network, without the GPU's part."""
    update_gpu: float
    """GPU time of an update; 0 without a GPU."""
    update_processor: float
    """Processor seconds of an update in the learner's process."""
    actor_speed: float = 1.0
    """Factor on an actor's speed by the service times: above 1 if several threads step its environments."""
    efficiency: float = 1.0
    """Share of the hardware threads' seconds that processes get when all threads are busy."""
    parallel: float = 0.0
    """Parallel share of an update over the threads of the learner's network (Amdahl)."""

    def step(self, environments: int) -> float:
        """Processor seconds of an agent step in an actor with so many environments."""
        fixed, each = (a + b for a, b in zip(self.environment, self.inference, strict=True))
        return fixed / environments + each + self.transfer


@dataclass(frozen=True)
class Setting:
    """A setting of a run on a machine."""

    actors: int
    threads: int
    environments: int
    gpus: int = 0
    gpu_speed: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """Predicted rates of a setting."""

    frames_per_s: float
    updates_per_s: float
    bottleneck: str
    """`actors`, `learner` or `processor` (all hardware threads), with its largest part."""
    cpu: float
    """Share of the hardware threads that the run uses."""


@dataclass(frozen=True)
class Model:
    """The model of runs with some settings.

    Args:
        services: Service times.
        config: Settings of the runs.
        frames_per_step: Environment frames of an agent step.
    """

    services: ServiceTimes
    config: Config
    frames_per_step: int

    def predict(self, setting: Setting) -> Prediction:
        """Predicts the rates of a setting."""
        services, config = self.services, self.config
        learners = max(setting.gpus, config.learners)
        # Updates by all learners for each step.
        updates_per_step = config.samples_per_insert / config.batch_size
        step = services.step(setting.environments)
        fill = setting.actors * services.actor_speed / step
        update = self._update(setting)
        empty = learners / (update * updates_per_step)
        processor = step + updates_per_step * services.update_processor
        most = services.efficiency * setting.threads / processor
        room = self._room(setting.actors, setting.environments, learners)

        def rate(speed: float) -> float:
            return throughput(speed * fill, speed * empty, room)

        steps = rate(1.0)
        if steps > most:
            slowed = brentq(lambda speed: rate(speed) - most, 0.0, 1.0)
            steps = rate(slowed)
        limits = {
            f"actors: {self._largest_part(setting.environments)}": fill,
            f"learner: {self._slower_side(setting)}": empty,
            "processor: all hardware threads": most,
        }
        return Prediction(
            frames_per_s=steps * self.frames_per_step,
            updates_per_s=steps * updates_per_step / learners,
            bottleneck=min(limits, key=lambda name: limits[name]),
            cpu=steps * processor / setting.threads,
        )

    def fewest_actors(self, setting: Setting, near: float = 0.99) -> Setting:
        """Returns the setting with the fewest actors whose rate is at least `near` of the highest."""
        numbers = range(1, MOST_ACTORS_PER_THREAD * setting.threads + 1)
        rates = {number: self.predict(dataclasses.replace(setting, actors=number)).frames_per_s for number in numbers}
        best = max(rates.values())
        return dataclasses.replace(setting, actors=next(n for n, rate in rates.items() if rate >= near * best))

    def _update(self, setting: Setting) -> float:
        services = self.services
        threads = learner_threads(self.config, setting.actors, setting.threads)
        divided = 1 - services.parallel + services.parallel / threads
        return services.update * divided + services.update_gpu / setting.gpu_speed

    def _room(self, actors: int, environments: int, learners: int) -> float:
        """Capacity of the queue in updates: actors and learners may be ahead of each other by the slack."""
        slack = self.config.slack_of(actors * environments, learners)
        return max(2.0, 2 * slack / (self.config.batch_size * learners))

    def _largest_part(self, environments: int) -> str:
        services = self.services
        parts = {
            "environment": services.environment[0] / environments + services.environment[1],
            "inference": services.inference[0] / environments + services.inference[1],
            "transfer": services.transfer,
        }
        return max(parts, key=lambda name: parts[name])

    def _slower_side(self, setting: Setting) -> str:
        gpu = self.services.update_gpu / setting.gpu_speed
        return "GPU" if gpu > self._update(setting) - gpu else "update on the CPU"


def throughput(fill: float, empty: float, room: float) -> float:
    """Throughput of a queue that is filled at one rate, emptied at another and holds `room` (M/M/1/K)."""
    if fill <= 0 or empty <= 0:
        return 0.0
    ratio = min(fill, empty) / max(fill, empty)
    # The formula is symmetric in both rates; equal rates need its limit.
    blocked = room / (room + 1) if ratio > 1 - 1e-9 else (1 - ratio**room) / (1 - ratio ** (room + 1))
    return float(min(fill, empty) * blocked)


def learner_threads(config: Config, actors: int, threads: int) -> int:
    """Threads of a pass of the learner's network, as `Learner.threads_left` on a CPU, where Atari games have images."""
    if config.learner_threads:
        return config.learner_threads
    left = (threads - actors * config.actor_threads) // config.learners
    ahead = config.targets_ahead == "on" or (config.targets_ahead == "auto" and config.is_atari and threads > 1)
    return max(1, left // 2 if ahead else left)


def usable(points: Sequence[Point]) -> list[Point]:
    """Returns the points that the model can be fitted to: with frames and updates."""
    return [point for point in points if point.frames_per_s > 0 and point.updates_per_s > 0]


def fit(points: Sequence[Point], config: Config, gpus: int) -> Model:
    """Fits the model to the usable points.

    Args:
        points: Measured points.
        config: Settings of their runs.
        gpus: GPUs of the learners; 0 for learners on the CPU.

    Raises:
        ConfigurationError: There are too few points.
    """
    used = usable(points)
    if len(used) < SMALLEST_FIT:
        raise ConfigurationError(
            f"the model needs {SMALLEST_FIT} measured points, and there are {len(used)}: sweep more of them with "
            "innet-drl analyze ratio"
        )
    first = Model(_direct(used, gpus), config, used[0].frames_per_step)

    def changed(factors: Sequence[float]) -> Model:
        services = first.services
        return dataclasses.replace(
            first,
            services=dataclasses.replace(
                services,
                actor_speed=float(np.exp(factors[0])),
                update=services.update * float(np.exp(factors[1])),
                update_gpu=services.update_gpu * float(np.exp(factors[1])),
                efficiency=float(np.exp(factors[2])),
                parallel=float(factors[3]),
            ),
        )

    def residuals(factors: Sequence[float]) -> list[float]:
        model = changed(factors)
        found: list[float] = []
        for point in used:
            predicted = model.predict(Setting(*point.key, gpus))
            found.append(np.log(predicted.frames_per_s / point.frames_per_s) / NOISE)
            found.append(np.log(predicted.updates_per_s / point.updates_per_s) / NOISE)
        return found + [factor / PRIOR for factor in factors]

    bounds = ((-2.0, -2.0, -2.0, 0.0), (2.0, 2.0, 0.2, 0.98))
    return changed(least_squares(residuals, (0.0, 0.0, 0.0, 0.3), bounds=bounds, loss="soft_l1").x)


def left_out_errors(points: Sequence[Point], config: Config, gpus: int) -> dict[str, Any] | None:
    """Returns the errors of frames a second at points that are left out of the fit; `None` with too few points."""
    used, errors = usable(points), []
    if len(used) <= SMALLEST_FIT:
        return None
    for index, point in enumerate(used):
        others = [*used[:index], *used[index + 1 :]]
        predicted = fit(others, config, gpus).predict(Setting(*point.key, gpus)).frames_per_s
        errors.append((round(abs(predicted / point.frames_per_s - 1), 4), point.key))
    largest, key = max(errors)
    return {
        "left_out_error_median": statistics.median(error for error, _ in errors),
        "left_out_error_largest": largest,
        "largest_at": dict(zip(SWEPT, key, strict=True)),
    }


def _direct(points: Sequence[Point], gpus: int) -> ServiceTimes:
    """Directly measured service times, before the fit."""
    # Waits for the memory include waits for the replay ratio: the smallest share of all points is closest to transfer.
    transfer = min(_share(point.actor.shares, "write", MEMORY, "parameters") for point in points)
    played = [_share(point.actor.shares, "environment", "inference") for point in points]
    of_environment = [
        _share(point.actor.shares, "environment") / share if share else 0.5
        for point, share in zip(points, played, strict=True)
    ]
    busy = [point.actor.processor_s * (1 - transfer) for point in points]
    numbers = [point.environments for point in points]
    environment = _per_step(numbers, [b * share for b, share in zip(busy, of_environment, strict=True)])
    inference = _per_step(numbers, [b * (1 - share) for b, share in zip(busy, of_environment, strict=True)])
    updates = [(1 - _share(point.learner.shares, WAITING)) / point.updates_per_s for point in points]
    gpu = [(point.gpu or 0.0) / point.updates_per_s if gpus else 0.0 for point in points]
    # The minimum, because contention only lengthens updates.
    least = min(update - part for update, part in zip(updates, gpu, strict=True))
    return ServiceTimes(
        environment=environment,
        inference=inference,
        transfer=transfer * statistics.median(point.actor.processor_s for point in points),
        update=max(1e-6, least),
        update_gpu=statistics.median(gpu),
        update_processor=statistics.median(point.learner.processor_s for point in points),
    )


def _per_step(environments: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits `fixed / environments + each` to seconds of a step, with relative errors and no negative value."""
    kept = [(number, value) for number, value in zip(environments, seconds, strict=True) if value > 0]
    if not kept:
        return 0.0, 0.0
    rows = np.array([[1 / number / value, 1 / value] for number, value in kept])
    fixed, each = nnls(rows, np.ones(len(kept)))[0]
    return float(fixed), float(each)


def _share(shares: dict[str, Any], *activities: str) -> float:
    return float(sum(shares.get(activity, 0.0) for activity in activities))
