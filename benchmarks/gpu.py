"""`python -m benchmarks gpu`: updates of a learner and batches on a GPU, beside the limits of the same run."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import tyro

from benchmarks import recording
from benchmarks.repeated import Case, Figure, Measurements, RepeatFlags, cell, figure
from benchmarks.report import Line, markdown
from benchmarks.systems import innet
from benchmarks.tasks import Vectors
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.errors import ConfigurationError
from innet_drl.train.learn.learner import Learner, choose_device
from innet_drl.train.learn.numerics import choose_numerics, random_batch
from innet_drl.train.settings.config import PRESETS, Config

UPDATES: dict[str, Config] = {name: PRESETS[name] for name in ("breakout", "breakout-gpu", "breakout-paper")}
"""Presets whose updates are measured, on noise."""
STACKS = 512
"""Items of a batch of stacks of 84x84."""
STEPS = 40_000
"""Steps of the memory of frames."""
ROWS = 1_000_000
WARM_UP = 5
"""Calls before a measurement."""


@dataclass(frozen=True)
class GpuFlags(RepeatFlags):
    """Updates of a learner and batches on a GPU."""

    repeats: int = 1
    """Measurements of each case, each time in another order."""
    device: Literal["cuda", "cpu"] = "cuda"
    """`cpu` shows that the command works on a machine without a GPU."""
    calls: int = 100
    """Calls of one measurement."""
    train: float = 0.0
    """Minutes of a training with `--preset breakout-gpu`, to a score of 300 at most, in place of measurements."""
    trial: Annotated[bool, tyro.conf.arg(name="try")] = False
    """Few calls, then a training of seconds: shows that all of it works."""


def gpu(flags: Annotated[GpuFlags, tyro.conf.arg(name="")]) -> None:
    """Updates of a learner and batches on a GPU.

    Raises:
        SystemExit: An unusable flag, or there is no GPU.
    """
    try:
        choose_device(dataclasses.replace(PRESETS["breakout"], device=flags.device))
    except ConfigurationError as error:
        raise SystemExit(f"--{error}") from None
    if flags.train and not flags.trial:
        _train(flags)
        return
    if flags.trial:
        flags = dataclasses.replace(flags, calls=3, repeats=1)
    with Measurements("gpu", flags, list(_cases(flags)), _tables) as kept:
        for case, repeat in kept.missing():
            with kept.measurement(case, repeat) as figures:
                measure = {"update": _update, "batch": _batch}[case["task"]]
                figures += measure(case, flags)
    if flags.trial:
        _train(flags)


def _cases(flags: GpuFlags) -> Iterator[Case]:
    on_gpu = flags.device == "cuda"
    for name in UPDATES:
        for numerics in ("float32", "bfloat16")[: 1 + on_gpu]:
            for launches in ("graph", "single")[not on_gpu :]:
                yield {"task": "update", "preset": name, "numerics": numerics, "launches": launches}
    for what in (
        "stacks, host",
        "stacks",
        "copy of stacks",
        "copy on the device",
        *(f"{count} rows" for count in (256, 1024, 4096)),
    ):
        yield {"task": "batch", "of": what}
    if importlib.util.find_spec("torchrl"):
        yield {"task": "batch", "of": "256 rows, TorchRL"}
    else:
        print("TorchRL is left out: it is not installed", file=sys.stderr)


def _seconds(flags: GpuFlags, call: Callable[[], object]) -> float:
    """The mean duration of a call, until the device has finished."""
    for _ in range(WARM_UP):
        call()
    _finished(flags)
    started = time.perf_counter()
    for _ in range(flags.calls):
        call()
    _finished(flags)
    return (time.perf_counter() - started) / flags.calls


def _finished(flags: GpuFlags) -> None:
    if flags.device == "cuda":
        torch.cuda.synchronize()


def _update(case: Case, flags: GpuFlags) -> Iterator[Figure]:
    """Times updates whose priorities are read one update later, as in a run."""
    config = dataclasses.replace(
        UPDATES[case["preset"]],
        numerics=case["numerics"],
        capture="auto" if case["launches"] == "graph" else "off",
        device=flags.device,
    )
    side = config.frame_size
    spec = EnvironmentSpec(4, config.stack, (side, side), "uint8", 4)
    learner = Learner(config, spec)
    learner.use(choose_numerics(config, spec))
    batch = random_batch(spec, config.batch_size, learner.device)
    pending = [learner.update(batch)]

    def call() -> None:
        pending.append(learner.update(batch))
        pending.pop(0).priorities()

    yield figure("update", 1e3 * _seconds(flags, call), "ms", batch=config.batch_size)
    if case["launches"] == "single" and flags.device == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            call()
        kernels = [event for event in profile.events() if event.device_type.name == "CUDA"]
        busy = sum(event.self_device_time_total for event in kernels)
        yield figure("its kernels", busy / 1e3, "ms", launches=len(kernels))


def _batch(case: Case, flags: GpuFlags) -> Iterator[Figure]:
    what, device = case["of"], flags.device
    if "rows" in what:
        try:
            system = importlib.import_module(f"benchmarks.systems.{'torchrl' if 'TorchRL' in what else 'innet'}")
        except (ImportError, OSError, RuntimeError) as error:
            # Its releases are built for one release of PyTorch each.
            print(f"TorchRL is left out: {error}", file=sys.stderr)
            return
        task = Vectors(system, ROWS, int(what.split()[0]), device=device)
        done = task.measure(0.01 * flags.calls)
        yield figure("call", 1e3 * done["elapsed"] / done["count"], "ms")
    elif what.startswith("copy"):
        count = STACKS * (recording.STACK + recording.N) * 84 * 84
        target = torch.empty(count, dtype=torch.uint8, device=device)
        here = what == "copy of stacks" and device == "cuda"
        frames = torch.empty(count, dtype=torch.uint8, pin_memory=True) if here else torch.empty_like(target)
        yield figure("call", 1e3 * _seconds(flags, lambda: target.copy_(frames, non_blocking=True)), "ms")
    else:
        memory = innet.Memory(STACKS, 2 * STEPS)
        memory.push(STEPS)
        memory.flush()
        with memory.batches(None if what == "stacks, host" else device) as batches:
            yield figure("call", 1e3 * _seconds(flags, lambda: next(batches)), "ms")


def _tables(lines: list[Line]) -> str:
    rows = [
        [line[name] for name in ("preset", "what", "numerics", "launches")]
        + [str(line.get("batch", "")), cell(line, ".3f")]
        for line in lines
        if line["task"] == "update"
    ]
    updates = markdown(["preset", "", "arithmetic", "launches", "batch", "ms"], rows)
    calls = [[line["of"], cell(line, ".3f")] for line in lines if line["task"] == "batch"]
    return f"{updates}\n{markdown(['batch', 'ms'], calls)}"


def _train(flags: GpuFlags) -> None:
    """Trains, and prints the scores by time."""
    minutes = 0.2 if flags.trial else flags.train
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "innet_drl", "train", "--preset", "breakout-gpu", "--out", str(run)]
        command += ["--minutes", str(minutes), "--target-return", "300", "--no-video", "--device", flags.device]
        command += ["--evaluation-period", "5000", "--evaluation-games", "10"]
        if flags.trial:
            command += ["--min-size", "2000", "--capacity", "20000", "--actors", "1", "--evaluation-frames", "400"]
        subprocess.run(command, check=True)
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = ("time_s", "agent_steps", "learner_updates", "return_mean", "evaluation_mean")
    chosen = [lines[int(at)] for at in np.unique(np.linspace(0, len(lines) - 1, 20).astype(int))]
    print(markdown(names, [[f"{line[name]:,.1f}" if name in line else "" for name in names] for line in chosen]))
