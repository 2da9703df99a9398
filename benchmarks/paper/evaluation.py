"""`python -m benchmarks paper`: measures every system. `docs/explanation/paper.md` defines the figures."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

import innet_drl as innet
from benchmarks import report, services
from benchmarks.paper.cases import PaperFlags, Workload
from benchmarks.paper.figures import draw, tables
from benchmarks.paper.roles import Laps, Measured, measure
from benchmarks.repeated import Figure, Measurements, figure, times
from benchmarks.services import KERNEL, SPINNING, NetworkStack
from innet_drl._core import fstack_release
from innet_drl.redis.messages import TRANSITIONS

LATENCY_LAPS = {
    "actor push": ("actors", "push"),
    "actor pull": ("actors", "pull"),
    "learner set": ("learner", "set"),
    "learner sampling": ("learner", "sample"),
    "learner sampling: pull": ("learner", "sample: pull"),
    "learner sampling: store": ("learner", "sample: store"),
    "learner sampling: sample": ("learner", "sample: sample"),
    "learner priorities": ("learner", "priorities"),
}
"""Latencies: the role and the lap of each."""
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
    systems, stacks = list(flags.systems), {each.name: each for each in _stacks(flags)}
    if "redis" in systems and (reason := services.why_not_redis(flags.redis)):
        _left_out("redis", reason)
        systems.remove("redis")
    cases = flags.cases(systems, stacks.values())
    with Measurements("paper", flags, cases, tables, draw) as kept:
        report.shared_cores(f"up to {max(flags.actors)} actors, the learner and the server")
        failed: set[str] = set()
        for case, repeat in kept.missing():
            server = "redis" if case["system"] == "redis" else case["stack"]
            if server in failed:
                continue
            own = {name: value for name, value in case.items() if name not in ("stack", "link")}
            actor_ms = flags.actor_ms * case["push_transitions"] / TRANSITIONS
            # Clients of Redis have connections of their own.
            stack = stacks.get(server, KERNEL)
            work = Workload(stack, flags.seconds, actor_ms, flags.update_ms, flags.link_mbit, **own)
            try:
                with kept.measurement(case, repeat) as figures, _server(work, flags.redis) as (address, version):
                    figures += [{**each, "version": version} for each in _figures(work, measure(work, address))]
            except AssertionError:
                # The other cases are measured without it.
                _left_out(server, "its server did not start, see its message above")
                failed.add(server)
        if not kept.lines():
            raise SystemExit("nothing is left to measure")


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
def _server(work: Workload, redis: str | None) -> Iterator[tuple[str, str]]:
    """Yields the server's address and release."""
    if work.system == "redis":
        with services.redis(redis) as (address, release):
            yield address, f"Redis {release}"
    else:
        beside = f", F-Stack {fstack_release}" if work.stack.name == "fstack" else ""
        with services.ours(work.stack) as server:
            yield server.address, f"innet-drl {innet.__version__}{beside}"


def _figures(work: Workload, measured: Measured) -> Iterator[Figure]:
    """Yields the figures of one measurement."""
    laps: dict[str, list[Laps]] = {"actors": measured.actors, "learner": [measured.learner]}

    def gather(role: str, *names: str) -> list[float]:
        return [time for each in laps[role] for name in names for time in each.get(name, [])]

    for what, (role, name) in LATENCY_LAPS.items():
        if found := gather(role, name):
            yield times(what, found)
    # The rate of an actor is over its own time, as actors start one after the other.
    rate = sum(1e3 * len(each["push"]) / sum(map(sum, each.values())) for each in measured.actors)
    ideal = 1e3 * work.actors / work.actor_ms
    yield figure("pushes", rate, "pushes/s", ideal=ideal)
    yield figure("experiences", rate * work.push_transitions, "transitions/s", ideal=ideal * work.push_transitions)
    pulls = [_pulls_per_s(each, work.parameters_every) for each in measured.actors]
    if all(pulls):
        yield figure("pulls", sum(pulls), "pulls/s", ideal=ideal / work.parameters_every)
    learner_ms = sum(gather("learner", "sample", "train", "priorities", "set"))
    yield figure("updates", 1e3 * len(measured.learner["train"]) / learner_ms, "updates/s")
    for role, each in measured.bytes_per_s.items():
        yield figure(f"{role}: link", 1e-6 * each, "MB/s")
    communication, all_of_it = 0.0, 0.0
    for role, parts in TIME_SHARES.items():
        spent = {name: sum(gather(role, *names)) / len(laps[role]) for name, names in parts.items()}
        total = sum(spent.values())
        for name, value in spent.items():
            yield figure(f"{role}: {name}", value / total, "share")
        communication += total - next(iter(spent.values()))
        all_of_it += total
    yield figure("communication", communication / all_of_it, "share")


def _pulls_per_s(laps: Laps, every: int) -> float:
    """Pulls a second of one actor, over whole periods: a part of one would count as none or as a whole one."""
    periods = len(laps["push"]) // every
    counts = {"pull": periods, "compute": periods * every, "push": periods * every}
    return 1e3 * periods / sum(sum(laps[name][:count]) for name, count in counts.items()) if periods else 0.0
