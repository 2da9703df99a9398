"""`python -m benchmarks paper`: measures every system, and prints, writes and draws the figures.

`docs/explanation/paper.md` defines the figures.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import tyro

from benchmarks import results, services
from benchmarks.flags import PaperFlags
from benchmarks.paper import figures, scene
from benchmarks.paper.roles import Laps, Measured, measure
from benchmarks.paper.settings import (
    BATCH,
    CAPACITY,
    FORMATS,
    KERNEL,
    PARAMETERS,
    SPINNING,
    STREAMS,
    SYSTEMS,
    Case,
    NetworkStack,
)
from benchmarks.results import Row
from innet_drl.analysis.pictures import can_draw
from innet_drl.redis.messages import TRANSITIONS
from innet_drl.train.machine import cores

DEFAULTS: dict[str, Any] = {
    "actors": "1,2,4,8",
    "systems": "redis,shared,sampling,ahead",
    "stacks": "kernel,kernel-spin,fstack",
    "formats": "stacks,frames",
    "actor_ms": 800.0,
    "update_ms": 500.0,
}
"""The paper's cases."""
DELAYED_DEFAULTS: dict[str, Any] = {
    "actors": "2",
    "systems": "redis,sampling,ahead,edge",
    "stacks": "kernel",
    "formats": "frames",
    "actor_ms": 100.0,
    "update_ms": 10.0,
}
"""Cases over an emulated link. The computing times of the paper would hide every delay."""
LATENCY_LAPS = {
    "actor push": ("actors", ("push",)),
    "actor pull": ("actors", ("pull",)),
    "learner set": ("learner", ("set",)),
    "learner sampling": ("learner", ("sample",)),
    "learner sampling: pull": ("learner", ("sample: pull",)),
    "learner sampling: store": ("learner", ("sample: store",)),
    "learner sampling: sample": ("learner", ("sample: sample",)),
    "learner priorities": ("learner", ("priorities",)),
}
"""Latencies: the role and the laps of each."""
TIME_SHARES: dict[str, dict[str, tuple[str, ...]]] = {
    "actors": {"compute": ("compute",), "pull": ("pull",), "push": ("push",)},
    "learner": {"train": ("train",), "sample": ("sample", "priorities"), "set": ("set",)},
}
"""Shares of the time of actors and learner; all except the first of each are communication."""


def paper(flags: Annotated[PaperFlags, tyro.conf.arg(name="")]) -> None:
    """Measures all cases, prints and writes the results.

    Raises:
        SystemExit: An unusable flag, or: A case cannot be measured.
    """
    chosen = _with_defaults(flags)
    one_way = _delays(chosen.delay_ms) if chosen.delay_ms else [None]
    if chosen.link_mbit < 0 or (chosen.link_mbit and not chosen.delay_ms):
        raise SystemExit(f"--link-mbit {chosen.link_mbit:g}: it is above 0, or 0 for no limit, beside --delay-ms")
    actors = results.numbers(chosen.actors, "actors")
    known = SYSTEMS if chosen.delay_ms else [name for name in SYSTEMS if name != "edge"]
    systems = results.names(chosen.systems, known, "systems")
    formats = results.names(chosen.formats, FORMATS, "formats")
    stacks = list(_stacks(chosen))
    if "redis" in systems and (reason := services.why_not_redis(chosen.redis)):
        print(f"redis is left out: {reason}")
        systems.remove("redis")
    if not systems or (not stacks and systems != ["redis"]):
        raise SystemExit("nothing is left to measure")
    plot = chosen.plot or (chosen.json.with_suffix(".svg") if chosen.json else None)
    if plot is not None and not can_draw():
        print("no picture: matplotlib is not installed (pip install 'innet-drl[bench]')")
        plot = None
    print(
        f"up to {max(actors)} actors, the learner and the server share {cores()} cores of this machine: computing is "
        f"waited for ({chosen.actor_ms:g} ms a push, {chosen.update_ms:g} ms an update), moving bytes is not"
    )
    rows: list[Row] = []
    versions: dict[str, str | None] = {}
    with tempfile.TemporaryDirectory(prefix="innet-") as directory:
        played = Path(directory) / "scene.npz"
        scene.record(played)
        for format_name, number, delay, system in itertools.product(formats, actors, one_way, systems):
            redis = [NetworkStack(chosen.redis_stack, chosen.redis_link)]
            for stack in redis if system == "redis" else list(stacks):
                case = Case(
                    system,
                    stack,
                    format_name,
                    number,
                    chosen.seconds,
                    chosen.actor_ms,
                    chosen.update_ms,
                    played,
                    delay,
                    chosen.link_mbit,
                )
                server = services.redis(chosen.redis, versions) if system == "redis" else services.ours(stack)
                try:
                    with server as address:
                        of_case = _rows(case, measure(case, address))
                except SystemExit as error:
                    if stack.name != "fstack" or stack not in stacks:
                        raise
                    # F-Stack is optional: the other cases are measured without it.
                    print(f"fstack is left out: {error}")
                    stacks.remove(stack)
                    continue
                rows += of_case
                print(figures.line(of_case, case), flush=True)
                if chosen.json is not None:
                    results.write(chosen.json, rows, _settings(chosen), versions)
    print()
    print(figures.tables(rows))
    if chosen.json is not None:
        print(f"rows: {chosen.json}")
    if plot is not None:
        figures.draw(rows, plot)
        print(f"picture: {plot}")


def _with_defaults(flags: PaperFlags) -> Any:
    """Returns the flags with defaults for missing values."""
    defaults = DELAYED_DEFAULTS if flags.delay_ms else DEFAULTS
    given = {name: value for name in defaults if (value := getattr(flags, name)) is not None}
    return dataclasses.replace(flags, **{**defaults, **given})


def _delays(text: str) -> list[float]:
    def holds(delays: list[float]) -> bool:
        return all(0 <= delay < math.inf for delay in delays) and len(set(delays)) == len(delays)

    return results.values(text, "delay-ms", float, holds, "different numbers such as 0.05,5,20")


def _stacks(flags: Any) -> Iterator[NetworkStack]:
    """Yields the requested stacks that are available."""
    for name in results.names(flags.stacks, ("kernel", "kernel-spin", "fstack"), "stacks"):
        if flags.delay_ms and name != "kernel":
            print(f"{name} is left out: --delay-ms relays the kernel's TCP")
        elif name == "kernel":
            yield KERNEL
        elif name == "kernel-spin":
            yield SPINNING
        elif flags.fstack_server is None or flags.fstack_client is None:
            print("fstack is left out: name its configurations with --fstack-server and --fstack-client")
        else:
            yield NetworkStack(
                "fstack",
                flags.fstack_link,
                serve=("--stack", "fstack", "--stack-config", str(flags.fstack_server), "--trusted-network"),
                listen=flags.fstack_listen,
                scheme="innet+fstack",
                client_config=flags.fstack_client,
            )


def _rows(case: Case, measured: Measured) -> list[Row]:
    """Computes the figures of one case."""
    laps: dict[str, list[Laps]] = {"actors": measured.actors, "learner": [measured.learner]}

    def row(what: str, times: list[float] | None = None, **more: Any) -> Row:
        p50, p99 = (None, None) if not times else (round(float(np.percentile(times, share)), 3) for share in (50, 99))
        key: Row = {"system": case.system, "stack": case.stack.name, "link": case.stack.link}
        key |= {"format": case.format, "actors": case.actors}
        if case.delay_ms is not None:
            key |= {"link": "relay", "delay_ms": case.delay_ms}
        return {**key, "what": what, "p50_ms": p50, "p99_ms": p99, **more}

    def gather(role: str, names: tuple[str, ...]) -> list[float]:
        return [time for each in laps[role] for name in names for time in each.get(name, [])]

    rows = [
        row(what, times, count=len(times))
        for what, (role, names) in LATENCY_LAPS.items()
        if (times := gather(role, names))
    ]
    # The rate of an actor is over its own time, as actors start one after the other.
    rate = sum(1e3 * len(each["push"]) / sum(map(sum, each.values())) for each in measured.actors)
    rows.append(row("pushes", per_s=round(rate, 3), ideal_per_s=round(1e3 * case.actors / case.actor_ms, 3)))
    rows.append(row("experiences", per_s=round(rate * TRANSITIONS, 1)))
    learner_seconds = 1e-3 * sum(sum(measured.learner[name]) for name in ("sample", "train", "priorities", "set"))
    rows.append(row("updates", per_s=round(len(measured.learner["train"]) / learner_seconds, 2)))
    rows += [row(f"{role}: link", mb_per_s=round(1e-6 * each, 3)) for role, each in measured.bytes_per_s.items()]
    communication, all_of_it = 0.0, 0.0
    for role, parts in TIME_SHARES.items():
        seconds = {name: sum(gather(role, names)) / len(laps[role]) for name, names in parts.items()}
        total = sum(seconds.values())
        rows += [row(f"{role}: {name}", share=round(value / total, 4)) for name, value in seconds.items()]
        communication += total - next(iter(seconds.values()))
        all_of_it += total
    rows.append(row("communication", share=round(communication / all_of_it, 4)))
    return rows


def _settings(flags: PaperFlags) -> dict[str, Any]:
    return results.settings(flags) | {
        "transitions_a_push": TRANSITIONS,
        "environments_of_an_actor": STREAMS,
        "batch": BATCH,
        "capacity": CAPACITY,
        "parameter_bytes": 4 * PARAMETERS,
    }
