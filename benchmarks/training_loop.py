"""Training rate of actors and learner apart, against a plain loop in one process.

    python -m benchmarks.training_loop --rounds 3 --seconds 60

Both sides have the same network, optimizer, batch, replay ratio and number of environments. The plain loop
steps the environments, stores the steps in NumPy arrays, samples uniformly from them and updates, one after
the other, each with all cores. Ours is `innet-drl train` as it is, with its memory in the learner's process.

The sides take turns, each in processes of its own. One JSON line for each turn says how many updates a
second were made once learning ran, how long one took in the seconds of the turn, and where the time went; the last
line has the medians and their ratio. Processor time is that of all the processes of a turn, from start to end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro
from numpy.typing import NDArray

from benchmarks import report
from benchmarks.processes import children_cpu_seconds
from innet_drl.train.observe.metrics import values_of
from innet_drl.train.settings.config import PRESETS, Config

RECIPE: dict[str, Any] = {"samples_per_insert": 4.0, "layer_norm": False, "n_step": 3, "frame_size": 84}
"""Settings of both sides on the preset `breakout`: the plain double DQN that the preset is compared with."""
GOAL = 0.95
"""Least ratio of our rate to the plain loop's."""
WARM_UP_SHARE = 0.25
"""Share of the learning time that is excluded, in which caches and the limiter's slack fill up."""


@dataclass(frozen=True)
class Flags:
    """Training rate of actors and learner apart, against a plain loop in one process."""

    rounds: int = 3
    """Turns of each side."""
    seconds: float = 60.0
    """Length of a turn's training."""
    min_size: int = 2_000
    """Steps before learning starts."""
    threads: int = os.cpu_count() or 1
    """Threads of the plain loop's environments and network."""
    flags: str = ""
    """More flags for our side, as for `innet-drl train`."""
    side: Literal["both", "plain"] = "both"
    """`plain` is one turn of the plain loop: how this program calls itself."""


Mark = tuple[float, int, int]
"""Time in seconds, agent steps, and updates."""


class PlainReplay:
    """Uniform replay of single frames in NumPy arrays: [capacity, environments, ...]."""

    def __init__(self, capacity: int, environments: int, random: np.random.Generator) -> None:
        self.frames = np.zeros((capacity, environments, 84, 84), np.uint8)
        self.actions = np.zeros((capacity, environments), np.int64)
        self.rewards = np.zeros((capacity, environments), np.float32)
        self.terminated = np.zeros((capacity, environments), np.bool_)
        self.ended = np.zeros((capacity, environments), np.bool_)
        self.first = np.ones((capacity, environments), np.bool_)
        self.rows = 0
        self._random = random

    def add(self, **row: NDArray[Any]) -> None:
        """Appends one step of every environment."""
        place = self.rows % len(self.frames)
        for name, values in row.items():
            getattr(self, name)[place] = values
        self.rows += 1

    def sample(self, count: int, stack: int, n: int, gamma: float) -> dict[str, NDArray[Any]]:
        """Transitions with n-step returns."""
        capacity = len(self.frames)
        oldest = max(0, self.rows - capacity)
        row = self._random.integers(oldest + stack, self.rows - n, count)
        environment = self._random.integers(0, self.frames.shape[1], count)
        reward = np.zeros(count, np.float32)
        discount = np.ones(count, np.float32)
        alive = np.ones(count, np.bool_)
        after = row.copy()
        for step in range(n):
            at = (row + step) % capacity
            reward += np.where(alive, gamma**step * self.rewards[at, environment], 0)
            discount = np.where(alive, discount * gamma, discount)
            discount = np.where(alive & self.terminated[at, environment], 0, discount)
            after = np.where(alive, row + step + 1, after)
            alive &= ~(self.terminated[at, environment] | self.ended[at, environment])
        return {
            "observation": self._stacks(row, environment, stack),
            "action": self.actions[row % capacity, environment],
            "reward": reward,
            "discount": discount.astype(np.float32),
            "next_observation": self._stacks(after, environment, stack),
            "weights": np.ones(count, np.float32),
            "probabilities": np.full(count, 1 / len(self.frames)),
            "ages": np.zeros(count, np.uint32),
        }

    def _stacks(self, row: NDArray[np.int64], environment: NDArray[np.int64], stack: int) -> NDArray[np.uint8]:
        capacity = len(self.frames)
        rows = row[:, None] + np.arange(1 - stack, 1)
        frames: NDArray[np.uint8] = self.frames[rows % capacity, environment[:, None]]
        visible = np.ones(len(row), np.bool_)
        for place in range(stack - 1, -1, -1):
            frames[~visible, place] = 0
            visible &= ~self.first[rows[:, place] % capacity, environment]
        return frames


def plain_turn(config: Config, seconds: float, threads: int) -> dict[str, Any]:
    """Trains in one process and returns its rates."""
    import torch

    from innet_drl.torch_batches import TorchBatch
    from innet_drl.train import environments
    from innet_drl.train.learn.learner import Learner
    from innet_drl.train.learn.numerics import choose_numerics
    from innet_drl.train.observe.stopwatch import Stopwatch
    from innet_drl.train.play.exploration import annealed, choose, epsilon_ladder

    torch.set_num_threads(threads)
    count = config.environments
    arena = environments.make(config, count, threads=threads)
    learner = Learner(config, arena.spec)
    learner.use(choose_numerics(config, arena.spec))
    random = np.random.default_rng(config.seed)
    replay = PlainReplay(config.capacity // count, count, random)
    epsilon = epsilon_ladder(count)
    observation = arena.reset(config.seed)
    first, final = np.ones(count, np.bool_), np.zeros(count, np.bool_)
    stopwatch, started = Stopwatch(), time.perf_counter()
    marks: list[Mark] = []
    while time.perf_counter() - started < seconds:
        with torch.inference_mode():
            q = learner.network(torch.from_numpy(observation)).numpy()
        stopwatch.lap("inference")
        action = choose(q, annealed(epsilon, replay.rows * count, config.epsilon_anneal_steps), random)
        step = arena.step(action)
        stopwatch.lap("environment")
        terminated = step.terminated | step.life_lost
        replay.add(
            frames=observation[:, -1],
            actions=action,
            rewards=np.sign(step.reward),
            terminated=terminated,
            ended=step.truncated | final,
            first=first,
        )
        first, final, observation = final, step.terminated | step.truncated, step.observation
        stopwatch.lap("store")
        while learner.updates * config.batch_size < config.samples_per_insert * (replay.rows * count - config.min_size):
            arrays = replay.sample(config.batch_size, config.stack, config.n_step, config.gamma)
            stopwatch.lap("sample")
            batch = {name: torch.from_numpy(array) for name, array in arrays.items()}
            learner.update(TorchBatch(config.batch_size, batch)).priorities()
            stopwatch.lap("update")
            if learner.updates == 1:
                stopwatch.take()
        if learner.updates:
            marks.append((time.perf_counter(), replay.rows * count, learner.updates))
    spent = stopwatch.take()
    shares = {name: round(value / sum(spent.values()), 3) for name, value in spent.items()}
    return {"side": "plain", **rates(marks, config), "time": shares}


def our_turn(config: Config, seconds: float, flags: str) -> dict[str, Any]:
    """Runs `innet-drl train` and reads its rates from its metrics."""
    changes = ["--minutes", f"{seconds / 60:.4f}", "--min-size", str(config.min_size), "--report-seconds", "1"]
    for name, value in RECIPE.items():
        flag = name.replace("_", "-")
        changes += [f"--{'' if value else 'no-'}{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "innet_drl", "train", "--out", str(run), "--evaluation-games", "1"]
        command += ["--evaluation-frames", "100", "--no-video", *changes, *flags.split()]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    learning = [line for line in lines if line["learner_updates"]]
    marks = [(line["time_s"], line["agent_steps"], line["learner_updates"]) for line in learning]
    warm = learning[int(len(learning) * WARM_UP_SHARE) :]
    spent = {side: _mean_shares([values_of(line, f"{side}_time") for line in warm]) for side in ("learner", "actor")}
    return {"side": "apart", **rates(marks, config), "time": spent}


def rates(marks: list[Mark], config: Config) -> dict[str, float]:
    """Rates after the warm-up.

    `work` is the smaller of the updates and the updates that the replay ratio allows for the steps: running ahead of
    the ratio gains nothing.
    """
    marks = marks[int(len(marks) * WARM_UP_SHARE) :]
    (begin, steps, updates), (end, last_steps, last_updates) = marks[0], marks[-1]
    seconds = end - begin
    times = _times_ms(marks)
    wanted = config.samples_per_insert / config.batch_size
    return {
        "updates_per_s": round((last_updates - updates) / seconds, 3),
        "agent_steps_per_s": round((last_steps - steps) / seconds, 1),
        "work": round(min(last_updates - updates, (last_steps - steps) * wanted) / seconds, 3),
        "p50_ms": round(float(np.percentile(times, 50)), 3),
        "p99_ms": round(float(np.percentile(times, 99)), 3),
    }


def _times_ms(marks: list[Mark]) -> list[float]:
    """Milliseconds of an update, for each second between marks."""
    times = []
    begin, _, before = marks[0]
    for now, _, updates in marks[1:]:
        if now - begin >= 1.0 and updates > before:
            times.append(1e3 * (now - begin) / (updates - before))
            begin, before = now, updates
    return times or [1e3 * (marks[-1][0] - marks[0][0]) / max(1, marks[-1][2] - marks[0][2])]


def _mean_shares(shares: list[dict[str, float]]) -> dict[str, float]:
    names = sorted({name for share in shares for name in share})
    return {name: round(statistics.fmean(share.get(name, 0.0) for share in shares), 3) for name in names}


def main() -> None:
    """Runs the benchmark, or one turn of its plain side."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    flags = tyro.cli(Flags)
    config = dataclasses.replace(PRESETS["breakout"], min_size=flags.min_size, actors=1, **RECIPE)
    if flags.side == "plain":
        print(json.dumps(plain_turn(config, flags.seconds, flags.threads)), flush=True)
        return
    work: dict[str, list[float]] = {"plain": [], "apart": []}
    repeat = [sys.executable, "-m", "benchmarks.training_loop", "--side", "plain", "--seconds", str(flags.seconds)]
    repeat += ["--min-size", str(flags.min_size), "--threads", str(flags.threads)]
    for turn in range(flags.rounds):
        for take in (
            lambda: json.loads(subprocess.run(repeat, check=True, stdout=subprocess.PIPE, text=True).stdout),
            lambda: our_turn(config, flags.seconds, flags.flags),
        ):
            before = children_cpu_seconds()
            result = take()
            told = {"round": turn, "per_s": result["updates_per_s"], "cpu_s": round(children_cpu_seconds() - before, 2)}
            side = result.pop("side")
            work[side].append(result["work"])
            report.line("training_loop", side, result["work"], "updates/s", **told, **result)
    medians = {side: statistics.median(values) for side, values in work.items()}
    ratio = medians["apart"] / medians["plain"]
    report.closing(
        "training_loop",
        "apart",
        goal=f"{GOAL} x plain",
        ratio=ratio,
        met=ratio >= GOAL,
        cores=os.cpu_count(),
        median_updates_per_s=medians,
    )


if __name__ == "__main__":
    main()
