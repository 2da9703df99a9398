"""Rules by which a client of several servers may charge their rate limiters: a model of limiters, writers and a reader.

`python -m benchmarks.limiter_rules` prints a line of JSON for each job and rule: the rate of the reader and of the
slowest writer, as parts of what they have with one server, and by how much samples were ahead of the ratio, in parts of
the sum of the slacks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

RATIO, SLACK, MIN_SIZE, BATCH, SERVERS = 4.0, 3000.0, 300, 64, 3
TICKS = 4000
CAPACITY = 9000


@dataclass
class Server:
    """A table's limiter, with the items that a capacity leaves."""

    parts: int
    inserted: int = 0
    sampled: int = 0

    def lead(self) -> float:
        return RATIO * (self.inserted - MIN_SIZE / self.parts) - self.sampled

    def allowed(self) -> int:
        return max(0, int(self.lead() + SLACK / self.parts))

    def admits_insert(self) -> bool:
        return self.lead() + RATIO <= SLACK / self.parts

    def items(self) -> int:
        return min(self.inserted, CAPACITY // self.parts)


def divided(count: int, weights: list[float], at: float = 0.5) -> list[int]:
    """Parts of `count` in proportion to the weights, each rounded up or down."""
    total, up_to = sum(weights), 0.0
    parts: list[int] = []
    for weight in weights:
        up_to += weight
        parts.append(int(count * up_to / total + at) - sum(parts) if total else 0)
    return parts


def charges(rule: str, batch: int, servers: list[Server], mass: list[float]) -> list[int]:
    """What each limiter is charged for a batch."""
    if rule == "its own items":
        return divided(
            BATCH, [server.items() * each for server, each in zip(servers, mass, strict=True)], batch * 0.618 % 1
        )
    if rule == "an equal part":
        return [(BATCH + (batch + index) % len(servers)) // len(servers) for index in range(len(servers))]
    return divided(BATCH, [float(server.allowed()) for server in servers])


def run(
    rule: str, rates: list[float], reader: float, mass: list[float], dies: bool
) -> tuple[float, list[float], float]:
    """Items sampled for each tick of the second half, inserted by each server's writers, largest error of the ratio."""
    one = rule == "one server"
    servers = [Server(1)] if one else [Server(SERVERS) for _ in rates]
    rates, mass = ([sum(rates)], [1.0]) if one else (rates, mass)
    owed, batches, budget, worst = [0.0] * len(rates), 0, 0.0, 0.0
    lost = [0, 0]
    begin = (0, [0] * len(rates))
    for tick in range(TICKS):
        if dies and tick == TICKS // 4 and not one:
            lost = [servers[-1].inserted, servers[-1].sampled]
            servers[-1] = Server(SERVERS)
        if tick == TICKS // 2:
            begin = (batches, [server.inserted for server in servers])
        for index, (server, rate) in enumerate(zip(servers, rates, strict=True)):
            # A writer that waits makes up for nothing.
            owed[index] = min(owed[index] + rate, rate + 1)
            while owed[index] >= 1 and server.admits_insert():
                owed[index] -= 1
                server.inserted += 1
        budget = min(budget + reader, reader + BATCH)
        while budget >= BATCH and sum(server.items() for server in servers) >= MIN_SIZE:
            parts = charges(rule, batches, servers, mass)
            if sum(parts) < BATCH or any(part > server.allowed() for part, server in zip(parts, servers, strict=True)):
                break
            for part, server in zip(parts, servers, strict=True):
                server.sampled += part
            batches += 1
            budget -= BATCH
        inserted, sampled = sum(s.inserted for s in servers) + lost[0], sum(s.sampled for s in servers) + lost[1]
        worst = max(worst, (sampled - RATIO * (inserted - MIN_SIZE)) / SLACK)
    half = TICKS - TICKS // 2
    return (
        (batches - begin[0]) * BATCH / half,
        [(server.inserted - before) / half for server, before in zip(servers, begin[1], strict=True)],
        worst,
    )


JOBS = {
    "even": ([10.0, 10.0, 10.0], [1.0] * 3, False),
    "90 % at one": ([27.0, 1.5, 1.5], [1.0] * 3, False),
    "one without writers": ([15.0, 15.0, 0.0], [1.0] * 3, False),
    "one seldom sampled": ([10.0, 10.0, 10.0], [1.0, 1.0, 0.001], False),
    "one came back empty": ([10.0, 10.0, 10.0], [1.0] * 3, True),
}


def main() -> None:
    for reader, faster in ((240.0, "reader"), (60.0, "writers")):
        for job, (rates, mass, dies) in JOBS.items():
            alone, writers, _ = run("one server", rates, reader, mass, dies)
            share = writers[0] / sum(rates)
            for rule in ("its own items", "an equal part", "what each admits"):
                sampled, inserted, worst = run(rule, rates, reader, mass, dies)
                slowest = min(each / rate / share for each, rate in zip(inserted, rates, strict=True) if rate)
                line = {
                    "faster": faster,
                    "job": job,
                    "charged": rule,
                    "reader": round(sampled / alone, 3),
                    "slowest_writer": round(slowest, 3),
                    "ratio_off": round(worst, 3),
                }
                print(json.dumps(line))


if __name__ == "__main__":
    main()
