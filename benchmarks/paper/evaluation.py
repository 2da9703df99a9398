"""`python -m benchmarks paper`: measures every system, and prints a line for each figure.

`docs/explanation/paper.md` defines the figures.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import numpy as np
import tyro

import innet_drl as innet
from benchmarks import recording, report, services
from benchmarks.paper.cases import Case, PaperFlags
from benchmarks.paper.roles import Laps, Measured, measure
from benchmarks.services import KERNEL, SPINNING, NetworkStack
from innet_drl._core import fstack_release
from innet_drl.redis.messages import TRANSITIONS

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


def paper(given: Annotated[PaperFlags, tyro.conf.arg(name="")]) -> None:
    """The evaluation of Furukawa and Matsutani (2022): a Redis beside a shared memory and a replay in the network.

    Raises:
        SystemExit: A flag is unusable, or a case cannot be measured.
    """
    flags = given.complete()
    systems, stacks = list(flags.systems), list(_stacks(flags))
    if "redis" in systems and (reason := services.why_not_redis(flags.redis)):
        _left_out("redis", reason)
        systems.remove("redis")
    if not systems or (not stacks and systems != ["redis"]):
        raise SystemExit("nothing is left to measure")
    report.shared_cores(f"up to {max(flags.actors)} actors, the learner and the server")
    recording.record()
    redis = [NetworkStack(flags.redis_stack, flags.redis_link)]
    for format_name, actors, delay, system in itertools.product(
        flags.formats, flags.actors, flags.delay_ms or [None], systems
    ):
        for stack in redis if system == "redis" else list(stacks):
            times = (flags.seconds, flags.actor_ms, flags.update_ms)
            case = Case(system, stack, format_name, actors, *times, delay, flags.link_mbit)
            try:
                with _server(case, flags.redis) as (address, version):
                    measured = measure(case, address)
            except AssertionError:
                if stack.name != "fstack" or system == "redis":
                    raise
                # F-Stack is optional: the other cases are measured without it.
                _left_out("fstack", "its server did not start, see its message above")
                stacks.remove(stack)
                continue
            _report(case, measured, version)


def _left_out(name: str, reason: str) -> None:
    print(f"paper: {name} is left out: {reason}", file=sys.stderr)


def _stacks(flags: Any) -> Iterator[NetworkStack]:
    """Yields the requested stacks that are available."""
    for name in flags.stacks:
        if flags.delay_ms and name != "kernel":
            _left_out(name, "--delay-ms relays the kernel's TCP")
        elif name != "fstack":
            yield KERNEL if name == "kernel" else SPINNING
        elif flags.fstack_server is None or flags.fstack_client is None:
            _left_out(name, "name its configurations with --fstack-server and --fstack-client")
        else:
            yield NetworkStack(
                "fstack",
                flags.fstack_link,
                serve=("--stack=fstack", f"--stack-config={flags.fstack_server}", "--trusted-network"),
                listen=flags.fstack_listen,
                scheme="innet+fstack",
                client_config=flags.fstack_client,
            )


@contextlib.contextmanager
def _server(case: Case, redis: str | None) -> Iterator[tuple[str, str]]:
    """Yields the address of a case's server and its release."""
    if case.system == "redis":
        with services.redis(redis) as (address, release):
            yield address, f"Redis {release}"
    else:
        beside = f", F-Stack {fstack_release}" if case.stack.name == "fstack" else ""
        with services.ours(case.stack) as server:
            yield server.address, f"innet-drl {innet.__version__}{beside}"


def _report(case: Case, measured: Measured, version: str) -> None:
    """Prints the figures of one case."""
    laps: dict[str, list[Laps]] = {"actors": measured.actors, "learner": [measured.learner]}
    about: dict[str, Any] = {"stack": case.stack.name, "link": case.stack.link}
    about |= {"format": case.format, "actors": case.actors, "version": version}
    if case.delay_ms is not None:
        about |= {"link": "relay", "delay_ms": case.delay_ms}

    def line(what: str, value: float, unit: str, **more: Any) -> None:
        report.line("paper", case.system, value, unit, what=what, **about, **more)

    def gather(role: str, names: tuple[str, ...]) -> list[float]:
        return [time for each in laps[role] for name in names for time in each.get(name, [])]

    for what, (role, names) in LATENCY_LAPS.items():
        if times := gather(role, names):
            p50, p99 = np.percentile(times, (50, 99))
            line(what, p50, "ms", p99_ms=round(float(p99), 3), count=len(times))
    # The rate of an actor is over its own time, as actors start one after the other.
    rate = sum(1e3 * len(each["push"]) / sum(map(sum, each.values())) for each in measured.actors)
    line("pushes", rate, "pushes/s", ideal=round(1e3 * case.actors / case.actor_ms, 3))
    line("experiences", rate * TRANSITIONS, "transitions/s")
    learner_seconds = 1e-3 * sum(sum(measured.learner[name]) for name in ("sample", "train", "priorities", "set"))
    line("updates", len(measured.learner["train"]) / learner_seconds, "updates/s")
    for role, each in measured.bytes_per_s.items():
        line(f"{role}: link", 1e-6 * each, "MB/s")
    communication, all_of_it = 0.0, 0.0
    for role, parts in TIME_SHARES.items():
        seconds = {name: sum(gather(role, names)) / len(laps[role]) for name, names in parts.items()}
        total = sum(seconds.values())
        for name, value in seconds.items():
            line(f"{role}: {name}", value / total, "share")
        communication += total - next(iter(seconds.values()))
        all_of_it += total
    line("communication", communication / all_of_it, "share")
