"""Calls of the public interface with sizes that the process has no memory for, for `test_scarce_memory.py`.

`addresses FOLDER`: under a limit of the address space (`ulimit -v`).
`group FOLDER GROUP`: in that control group of 512 MB.
It prints a line before each call and its outcome after it, so that a signal names its call.
"""

from __future__ import annotations

import gc
import json
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

# Imported by `device="cpu"`, which would not fit.
import torch  # noqa: F401

import innet_drl as innet

ROOM = {"addresses": 128 << 20, "group": 512 << 20}
WIDE = innet.NStep(stack=4, n=1, observation="frame")


FITS = ("writing three times what a table holds", "default limits")


def write_thrice(capacity_bytes: int) -> None:
    """Writes to a memory of the default size."""
    frames = np.random.default_rng(1).integers(256, size=(16, 1, 256, 256), dtype=np.uint8)
    table = innet.Table("t", {"frame": ("uint8", (256, 256))}, 1 << 16, capacity_bytes=capacity_bytes)
    ended: dict[str, Any] = {name: np.zeros((16, 1), bool) for name in ("terminated", "truncated")}
    with innet.Memory(table) as memory, memory.writer("t", 1, innet.Window(0, 0)) as writer:
        for _ in range(3 * capacity_bytes // frames.nbytes):
            writer.extend(frame=frames, **ended)


def check_limits(room: int) -> None:
    """Checks that tables, parameters and received data of a memory of the default size fit together."""
    with innet.Memory() as memory:
        most = memory.stats()["max_bytes"]
        assert most <= room, f"{most} of {room}"


def limit(how: str, group: str | None) -> None:
    """Limits this process from now on."""
    if group is not None:
        Path(group, "cgroup.procs").write_text("0")
        return
    status = Path("/proc/self/status").read_text()
    used = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM[how],) * 2)


def fill(replay: innet.Replay, table: str) -> None:
    """Writes steps of 64 KiB, which nearly vanish where they are packed."""
    with replay.writer(table, 1, WIDE) as writer:
        for t in range(64):
            frame, last = np.zeros((1, 256, 256), np.uint8), np.array([t % 32 == 31])
            writer.append(frame=frame, reward=np.zeros(1, np.float32), terminated=last, truncated=np.zeros(1, bool))


def extend(replay: innet.Replay) -> None:
    """Gives a writer 1 GiB that takes no memory until it is copied."""
    steps = 1 << 14
    frames = np.broadcast_to(np.zeros((), np.uint8), (steps, 1, 256, 256))
    with replay.writer("raw", 1, WIDE) as writer:
        flags: dict[str, Any] = {name: np.zeros((steps, 1), bool) for name in ("terminated", "truncated")}
        writer.extend(frame=frames, reward=np.zeros((steps, 1), np.float32), **flags)


def calls(how: str, folder: str, stack: ExitStack) -> Iterator[tuple[str, Callable[[], object]]]:
    """Calls that do not fit, with what they need made beforehand."""
    scale = ROOM[how] >> 20
    frames = innet.Table("frames", {"frame": ("uint8", (256, 256)), "reward": "float32"}, 100, view=WIDE)
    wide = innet.Table("wide", {"a": ("uint8", (1 << 28,))}, 1000, capacity_bytes=1 << 31)
    memory = stack.enter_context(innet.Memory([frames, wide]))
    server = stack.enter_context(memory.serve(f"unix://{folder}/s", gradients="127.0.0.1:0"))
    replay = stack.enter_context(innet.connect(server.addresses[0]))
    fill(memory, "frames")
    # Zeros that nobody has written take no memory.
    large = {"w": np.zeros(scale * 3 << 18, np.float32)}
    ids, priorities = np.zeros(scale << 16, np.uint64), np.zeros(scale << 16, np.float32)
    tree = innet.SumTree(1 << 16)
    raw = innet.Table("raw", {"frame": innet.Column("uint8", (256, 256), codec="none"), "reward": "float32"}, 64)
    memory.create_table(raw)
    fill(memory, "raw")
    batch = memory.sample("frames", scale * 2, WIDE)
    reduced: Any = batch.__reduce__()
    restore, content = reduced
    del batch
    saved = Path(folder, "saved")
    with innet.Memory(innet.Table("large", {"a": "uint8"}, scale << 14)) as other:
        other.save(saved)
    memory.put_parameters("half", {"w": np.zeros(scale * 3 << 17, np.float32)}, dtype="bfloat16")
    items = min(65_536, scale * 8)
    limit(how, sys.argv[3] if how == "group" else None)

    yield "SumTree", lambda: [innet.SumTree(1 << 24) for _ in range(8)]
    yield "SumTree.update", lambda: tree.update(ids.view(np.int64), priorities)

    def of_replay(of: innet.Replay, name: str) -> Iterator[tuple[str, Callable[[], object]]]:
        yield f"create_table, {name}", lambda: of.create_table(innet.Table("large", {"a": "uint8"}, 1 << 24))
        yield f"sample, {name}", lambda: of.sample("frames", items, WIDE)
        yield f"sample of raw rows, {name}", lambda: of.sample("raw", items, WIDE)
        yield f"sample of a mix, {name}", lambda: of.sample(innet.Mix({"frames": 1.0}), items, WIDE)
        yield f"sample of tensors, {name}", lambda: of.sample("raw", items, WIDE, device="cpu")
        if how == "addresses":
            # In a control group the kernel ends Python itself: NumPy copies an array whose rows are one row.
            yield f"extend, {name}", lambda: extend(of)
        yield f"batches, {name}", lambda: next(of.batches("frames", items, WIDE, prefetch=1024))
        yield f"writer, {name}", lambda: of.writer("wide", 1, innet.Window(0, 0), chunk_steps=1)
        yield f"put_parameters, {name}", lambda: of.put_parameters("large", large)
        yield f"get_parameters, {name}", lambda: of.get_parameters("half")
        yield f"update_priorities, {name}", lambda: of.update_priorities("frames", ids, priorities)

    yield from of_replay(memory, "in process")
    yield from of_replay(replay, "served")
    yield "Memory", lambda: innet.Memory(innet.Table("large", {"a": "uint8"}, 1 << 24), max_bytes=1 << 50)
    if how == "addresses":
        yield "threads", lambda: next(memory.batches("frames", 1, WIDE, threads=256))
        # In a control group the kernel ends Python itself, which copies the bytes first.
        # Not by `pickle.loads`, whose own copy may be the one that does not fit.
        yield "a pickled batch", lambda: [restore(*content) for _ in range(64)]
        yield "Memory.serve", lambda: memory.serve(f"unix://{folder}/other", io_threads=256)
    yield "follow_gradients", lambda: replay.follow_gradients("job", 0, 1, values=scale << 19, threshold=1)
    yield FITS[0], lambda: write_thrice(scale << 18)
    yield FITS[1], lambda: check_limits(ROOM[how])
    yield "Memory.restore", lambda: innet.Memory(max_bytes=1 << 50).restore(saved)


def main(how: str, folder: str) -> None:
    with ExitStack() as stack:
        for name, call in calls(how, folder, stack):
            print(json.dumps({"call": name}), flush=True)
            outcome: dict[str, Any] = {"call": name, "error": None}
            try:
                call()
            except BaseException as error:
                own = isinstance(error, (innet.ReplayError, MemoryError))
                outcome |= {"error": type(error).__name__, "own": own, "text": str(error)}
            gc.collect()
            print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
