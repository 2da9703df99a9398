"""The processes of one measurement: actors and the learner, each with a clock.

A process sends "ready", waits for the start, and sends the laps of its clock. Computation is simulated by sleeping
(`Workload.actor_ms`, `Workload.update_ms`): the paper has separate machines, here all processes share the cores.

The delay of an emulated link is the one-way delay between actors and learner. A server in the middle has half of it to
both sides; an edge server is beside the actors, and the learner is at the other end of the link.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

import numpy as np

from benchmarks.crew import Crew
from benchmarks.paper import systems
from benchmarks.paper.cases import BATCH, Workload, parameters
from benchmarks.paper.systems import Clock
from benchmarks.relay import Relay

Laps = dict[str, list[float]]


@dataclass(frozen=True)
class Measured:
    """Laps of all clocks of one work."""

    actors: list[Laps]
    learner: Laps
    bytes_per_s: dict[str, float]
    """Bytes per second over the emulated link in both directions, by role; empty without a link."""


@contextlib.contextmanager
def emulate(work: Workload, address: str) -> Iterator[tuple[dict[str, str], dict[str, Relay]]]:
    """Puts relays with the link's delay and rate between the processes and the server at `address`.

    Yields:
        The server's address and the relay by role, `actors` and `learner`; no relays without an emulated link.
    """
    if work.delay_ms is None:
        yield dict.fromkeys(("actors", "learner"), address), {}
        return
    at = urlsplit(address)
    assert at.hostname is not None
    to = f"{socket.gethostbyname(at.hostname)}:{at.port}"
    edge = work.system == "edge"
    with contextlib.ExitStack() as running:
        relays = {}
        for role, share in (("actors", 0.0 if edge else 0.5), ("learner", 1.0 if edge else 0.5)):
            # Actors beside an edge server have no rate limit.
            rate = work.link_mbit * 1e6 / 8 if share else 0.0
            relays[role] = running.enter_context(Relay(to, delay=share * 1e-3 * work.delay_ms, rate=rate or None))
        yield {role: at._replace(netloc=relay.address).geturl() for role, relay in relays.items()}, relays


def measure(work: Workload, address: str) -> Measured:
    """Runs actors and learner against a server, over the emulated link if there is one.

    Raises:
        SystemExit: A process failed.
    """
    with emulate(work, address) as (urls, relays), Crew() as crew:
        # The learner starts first, as it creates the table.
        learner = crew.start(_learn, work, urls["learner"])
        crew.receive(learner)
        actors = [crew.start(_act, work, urls["actors"], index) for index in range(work.actors)]
        for each in actors:
            crew.receive(each)
        learner.send("the replay is full")
        crew.receive(learner)
        before, began = {role: sum(relay.bytes) for role, relay in relays.items()}, time.perf_counter()
        for each in (learner, *actors):
            each.send("begin")
        laps = [crew.receive(each, work.seconds) for each in actors]
        of_learner = crew.receive(learner, work.seconds)
        seconds = time.perf_counter() - began
        carried = {role: (sum(relay.bytes) - before[role]) / seconds for role, relay in relays.items()}
        return Measured(laps, of_learner, carried)


def _act(work: Workload, address: str, index: int, pipe: Connection) -> None:
    with systems.open_actor(work, address, index, systems.recorded_rows(work)) as actor:
        for number in range(work.warm_up):
            actor.push(number)
        actor.pull()
        pipe.send("ready")
        pipe.recv()
        # Starts are spread over a period, like the pushes of long-running actors.
        time.sleep(1e-3 * work.actor_ms * index / work.actors)
        clock, end, number = Clock(), time.perf_counter() + work.seconds, work.warm_up
        while time.perf_counter() < end:
            if number % work.parameters_every == 0:
                actor.pull()
                clock.lap("pull")
            time.sleep(1e-3 * work.actor_ms)
            clock.lap("compute")
            actor.push(number)
            clock.lap("push")
            number += 1
        pipe.send(clock.laps)
        pipe.recv()


def _learn(work: Workload, address: str, pipe: Connection) -> None:
    tensors = parameters()
    random = np.random.default_rng(0)
    with systems.open_learner(work, address) as learner:
        learner.publish(tensors)
        pipe.send("ready")
        _receive_until_message(pipe, learner)
        for _ in range(3):
            learner.sample(Clock())
        pipe.send("ready")
        pipe.recv()
        clock, parts, end, updates = Clock(), Clock(), time.perf_counter() + work.seconds, 0
        while time.perf_counter() < end:
            parts.lap("other")
            batch = learner.sample(parts)
            clock.lap("sample")
            time.sleep(1e-3 * work.update_ms)
            clock.lap("train")
            learner.update(batch["ids"], random.random(BATCH))
            clock.lap("priorities")
            updates += 1
            if updates % work.parameters_every == 0:
                learner.publish(tensors)
                clock.lap("set")
            del batch
        del parts.laps["other"]
        pipe.send(clock.laps | {f"sample: {name}": laps for name, laps in parts.laps.items()})
        _receive_until_message(pipe, learner)


def _receive_until_message(pipe: Connection, learner: systems.LearnerClient) -> None:
    """Receives experience until a message arrives; otherwise actors would wait for the learner."""
    while not pipe.poll(0.01):
        learner.receive(Clock())
    pipe.recv()
