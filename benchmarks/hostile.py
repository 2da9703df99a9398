"""Eight actors and a learner beside a hostile client that knows a token: their rates and waits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from numpy.typing import NDArray
from serving import Server

import innet_drl as innet
from benchmarks import attacks, processes, report
from benchmarks.crew import Crew

ACTORS = 8
PUSH = 50
BATCH = 64
TOKENS = {role: f"token of the {role}" for role in ("operator", "learner", "actor")}
FRAME_BYTES = 32 << 20
MAX_BYTES = 512 << 20
REPLY_BYTES = 4 * FRAME_BYTES
"""Limits of the server: a frame, its memory, and unread replies, which are not part of `MAX_BYTES`."""
PARAMETERS_BYTES = 24 << 20
"""Larger than the socket buffers."""

VIEW = innet.Window(0, 0)
COLUMNS: dict[str, Any] = {"tag": "int64", "frame": ("uint8", (32, 32))}
HONEST = [
    innet.Table("replay", COLUMNS, 50_000),
    # `audit` samples every step once.
    innet.Table("queue", COLUMNS, 20_000, sampler="fifo", max_times_sampled=1, samples_per_insert=1, slack=8_192),
]
HOSTILE = [
    innet.Table("hostile", {"tag": innet.Column("int64", codec=None)}, 100_000, capacity_bytes=32 << 20),
    # No honest client samples from it, so that its rate limiter blocks pushes.
    innet.Table("blocked", {"tag": innet.Column("int64", codec=None)}, 10_000, samples_per_insert=1, slack=64),
]

Times = NDArray[np.float64]
"""Start time in seconds and duration in milliseconds, [operations, 2]."""


def timed(into: list[tuple[float, float]], work: Callable[[], Any]) -> Any:
    """Calls `work` and appends its start time and duration."""
    began = time.monotonic()
    result = work()
    into.append((began, 1e3 * (time.monotonic() - began)))
    return result


def begun(pipe: Connection) -> float:
    """Reports that this process is ready; returns the time at which it ends."""
    pipe.send(None)
    return float(pipe.recv())


def paced(until: float, per_s: float) -> Iterator[None]:
    """Yields `per_s` times a second until `until`, catching up after delays; 0 sets no pace."""
    due = time.monotonic()
    while time.monotonic() < until:
        yield
        due += 1 / per_s if per_s else 0.0
        time.sleep(max(0.0, due - time.monotonic()))


def act(address: str, actor: int, per_s: float, pipe: Connection) -> None:
    """Writes steps tagged with actor and number to both tables, and waits until they are stored."""
    pushes: list[tuple[float, float]] = []
    with (
        innet.connect(address, token=TOKENS["actor"]) as memory,
        memory.writer("replay", 1, VIEW) as replay,
        memory.writer("queue", 1, VIEW) as queue,
    ):
        tag = actor << 32

        def push(writer: innet.Writer) -> None:
            for at in range(tag, tag + PUSH):
                frame = np.full((1, 32, 32), at % 251, np.uint8)
                writer.append(tag=np.array([at]), frame=frame, terminated=[False], truncated=[False])
            writer.flush()

        for _ in paced(begun(pipe), per_s / PUSH):
            timed(pushes, lambda: push(replay))
            timed(pushes, lambda: push(queue))
            tag += PUSH
    pipe.send((np.array(pushes), tag - (actor << 32)))


def learn(address: str, per_s: float, pipe: Connection) -> None:
    """Samples and updates priorities."""
    samples: list[tuple[float, float]] = []
    random = np.random.default_rng(0)
    with innet.connect(address, token=TOKENS["learner"]) as memory:
        for _ in paced(begun(pipe), per_s):
            batch = timed(samples, lambda: memory.sample("replay", BATCH, VIEW))
            assert (batch.frame[:, :, 0, 0] == batch.tag % 251).all(), (
                "the frame of a sampled step is not the one of its tag"
            )
            memory.update_priorities("replay", batch.ids, random.random(BATCH))
    pipe.send((np.array(samples), None))


def audit(address: str, pipe: Connection) -> None:
    """Samples the queue until it has received the announced number of steps, or a sample times out."""
    tags: list[NDArray[np.int64]] = []
    total = None
    with innet.connect(address, token=TOKENS["learner"]) as memory:
        while total is None or len(tags) * PUSH < total:
            try:
                batch = memory.sample("queue", PUSH, VIEW, timeout=5)
                assert (batch.frame[:, :, 0, 0] == batch.tag % 251).all(), (
                    "the frame of a sampled step is not the one of its tag"
                )
                tags.append(batch.tag.ravel().copy())
            except innet.errors.DeadlineError:
                if total is not None:
                    break
            if total is None and pipe.poll():
                total = pipe.recv()
    pipe.send(np.concatenate(tags))


def of(times: Times, begin: float, end: float) -> Times:
    """Durations of the calls that began between `begin` and `end`."""
    durations: Times = times[(begin <= times[:, 0]) & (times[:, 0] < end), 1]
    return durations


def hostile(minutes: float = 10.0, steps_per_s: float = 0.0, batches_per_s: float = 0.0, seed: int = 0) -> None:
    """Rates and waits of eight actors and a learner: alone, beside a hostile actor, beside a hostile operator.

    Args:
        minutes: Length of the three together.
        steps_per_s: Steps that each actor writes into each table; 0 sets no pace.
        batches_per_s: Batches that the learner samples and updates; 0 sets no pace.
        seed: Of the attacks.
    """
    third = minutes * 20
    limits = [f"--max-frame-bytes={FRAME_BYTES}", f"--max-bytes={MAX_BYTES}", f"--reply-bytes={REPLY_BYTES}"]
    tokens = [f"--{role}-token={token}".replace("operator-", "") for role, token in TOKENS.items()]
    with Server("innet://127.0.0.1:0", "--log-level=error", *limits, *tokens) as server, Crew() as crew:
        host, port = server.address.removeprefix("innet://").split(":")
        operator = innet.connect(server.address, token=TOKENS["operator"], tables=HONEST + HOSTILE)
        operator.put_parameters("hostile", {"x": np.zeros(PARAMETERS_BYTES, np.uint8)})
        actors = [crew.start(act, server.address, actor, steps_per_s) for actor in range(ACTORS)]
        learner, auditor = crew.start(learn, server.address, batches_per_s), crew.start(audit, server.address)
        for each in (*actors, learner):
            crew.receive(each)
        begin = time.monotonic()
        ends = [begin + third, begin + 2 * third, begin + 3 * third]
        for each in (*actors, learner):
            each.send(ends[-1])
        parts: list[dict[str, Any]] = []
        for role, end in zip((None, "actor", "operator"), ends, strict=True):
            attacker = None
            if role is not None:
                # Actors may write into every table.
                # Operators may drop every table, so a hostile operator attacks no table of the honest clients.
                tables = ["hostile", "blocked"] + (["replay", "queue"] if role == "actor" else [])
                attacker = crew.start(
                    attacks.attack, (host, int(port)), TOKENS[role], tables, end - min(2.0, third / 2), seed
                )
            time.sleep(max(0.0, end - time.monotonic()))
            parts.append({"attacker": attacker, "peak": processes.peak_bytes(server.pid)})
        attacked_how = [part["attacker"] and crew.receive(part["attacker"]) for part in parts]
        acted = [crew.receive(each) for each in actors]
        samples, _ = crew.receive(learner)
        written = sum(steps for _, steps in acted)
        auditor.send(written)
        tags, counts = np.unique(crew.receive(auditor), return_counts=True)
        stats = operator.stats()["server"]
        operator.close()
    pushes = np.concatenate([times for times, _ in acted])
    told = {name: stats[name] for name in ("bad_frames", "connections_refused", "errors", "slow_readers_dropped")}
    rates = []
    p99 = 0.0
    for start, end, part, how in zip([begin, *ends], ends, parts, attacked_how, strict=False):
        push_ms, sample_ms = of(pushes, start, end), of(samples, start, end)
        rates.append((len(push_ms) * PUSH / third, len(sample_ms) / third))
        # If no call began, an earlier one lasted for the whole part.
        times = {
            f"{what}_p99_ms": float(np.percentile(taken, 99)) if len(taken) else 1e3 * third
            for what, taken in (("push", push_ms), ("sample", sample_ms))
        }
        p99 = max(p99, *times.values())
        more = times | {"batches_per_s": rates[-1][1], "peak_bytes": part["peak"], "attacks": how}
        report.line("hostile", "innet", rates[-1][0], "steps/s", **more)
    ratio = float(min(np.min(np.divide(each, rates[0])) for each in rates[1:]))
    memory = parts[-1]["peak"] / (MAX_BYTES + REPLY_BYTES)
    lost, doubled = written - len(tags), int((counts - 1).sum())
    report.closing("hostile", "innet", goal="more than 0.5 of the rate alone", ratio=ratio, met=ratio > 0.5, **told)
    report.closing("hostile", "innet", goal="p99 under 1000 ms", ratio=p99 / 1e3, met=p99 < 1e3)
    report.closing("hostile", "innet", goal="at most 1.1 x the memory limits", ratio=memory, met=memory < 1.1)
    report.closing(
        "hostile", "innet", goal="no step lost or doubled", lost=lost, doubled=doubled, met=not lost + doubled
    )
