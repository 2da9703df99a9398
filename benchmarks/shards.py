"""A memory sharded over servers against one server of the same total size: rate of a learner."""

from __future__ import annotations

import statistics
import time
from contextlib import ExitStack

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks import report
from benchmarks.recording import STREAMS, record
from benchmarks.relay import RelayProcess
from benchmarks.systems.innet import VIEW, rows, table, url

BATCH = 512
GOAL = 0.9


class Learner:
    """A prefetching learner that updates priorities, with its own servers."""

    def __init__(self, servers: int, steps: int, each_way_ms: float, stack: ExitStack) -> None:
        addresses = [
            stack.enter_context(Server("innet://127.0.0.1:0", "--log-level=error")).address for _ in range(servers)
        ]
        if each_way_ms:
            at = [address.removeprefix("innet://").split(":") for address in addresses]
            links = [stack.enter_context(RelayProcess((host, int(port)), each_way_ms)) for host, port in at]
            addresses = [url(link.address) for link in links]
        self._addresses = addresses
        tables = [table(servers * -(-steps // servers))]
        self._replay = stack.enter_context(innet.connect(",".join(addresses), tables=tables))
        each = STREAMS // servers
        for server in range(servers):
            with self._replay.writer("breakout", each, VIEW, server=server) as writer:
                for _, row in zip(range(steps // servers // each), rows(each), strict=False):
                    writer.append(**row)
        self._random = np.random.default_rng(0)
        self._batches = stack.enter_context(self._replay.batches("breakout", BATCH, VIEW, threads=1))
        self.name = "one server" if servers == 1 else f"{servers} servers"

    def rate(self, seconds: float) -> float:
        """Batches a second."""
        done, began = 0, time.monotonic()
        while time.monotonic() - began < seconds:
            batch = next(self._batches)
            self._replay.update_priorities("breakout", batch.ids, self._random.random(len(batch)) + 0.1, wait=False)
            done += 1
        return done / (time.monotonic() - began)

    def excess(self, batches: int) -> float:
        """Chi-square of samples by server against sums of priorities, in standard deviations above its mean."""
        expected: dict[int, float] = {}
        for address in self._addresses:
            with innet.connect(address) as server:
                number = _numbers(server.sample("breakout", 1, VIEW))[0]
                expected[number] = server.stats()["tables"]["breakout"]["total_mass"]
        observed = dict.fromkeys(expected, 0)
        for _ in range(batches):
            for number in _numbers(self._replay.sample("breakout", BATCH, VIEW)):
                observed[number] += 1
        sampled, total = batches * BATCH, sum(expected.values())
        means = {number: sampled * mass / total for number, mass in expected.items()}
        square = sum((observed[number] - mean) ** 2 / mean for number, mean in means.items())
        freedom = max(len(expected) - 1, 1)
        return float((square - freedom) / np.sqrt(2 * freedom))


def _numbers(batch: innet.Batch) -> list[int]:
    """The number of the server's table for each item: the first 16 bits of its id."""
    numbers: list[int] = (batch.ids >> np.uint64(48)).tolist()
    return numbers


def shards(
    rounds: int = 5, seconds: float = 2.0, steps: int = 48_000, servers: int = 3, each_way_ms: float = 0.0
) -> None:
    """Rate of a learner that samples 512 and updates, over several local servers and over one of the same total size.

    Args:
        rounds: Turns of each.
        seconds: Length of a turn.
        steps: Steps of all servers together.
        servers: Number of servers.
        each_way_ms: One-way delay of an emulated link in front of each server, in milliseconds; 0 has no link.
    """
    record()
    with ExitStack() as stack:
        learners = [Learner(count, steps, each_way_ms, stack) for count in (1, servers)]
        rates: list[list[float]] = [[], []]
        for learner in learners:
            learner.rate(seconds / 4)
        for _ in range(rounds):
            for learner, measured in zip(learners, rates, strict=True):
                measured.append(learner.rate(seconds))
        for learner, measured in zip(learners, rates, strict=True):
            settings = {"batch": BATCH, "each_way_ms": each_way_ms}
            report.line("shards", learner.name, statistics.median(measured), "batches/s", **settings)
        ratio = statistics.median(many / one for one, many in zip(*rates, strict=True))
        report.closing(
            "shards", learners[1].name, goal=f"at least {GOAL} of one server", ratio=ratio, met=ratio >= GOAL
        )
        excess = learners[1].excess(100)
        report.closing("shards", learners[1].name, goal="frequencies of one memory", excess=excess, met=excess < 5)
