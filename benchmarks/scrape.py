"""Rates of pushes and samples at a server whose metrics are scraped once a second, against its own rates without."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import innet_drl as innet
from benchmarks import report
from benchmarks.snapshots import clients

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from redis_server import free_port
from serving import Server

GOAL = 0.98
SCRAPE_SECONDS = 10.0
"""Longest scrape."""
COUNTERS = {"pushed_per_s": "inserted_items", "sampled_per_s": "sampled_items"}
"""Rates, and the statistics of the table that count for them."""
BOTH = "geometric mean"


def scrape(pairs: int = 100, seconds: float = 1.0, steps: int = 20_000) -> None:
    """Rates of a writer and of a learner that samples 64, in turns of a second with one scrape and without.

    One server and the same clients have all turns, so that the turns differ by the scrape alone.

    Args:
        pairs: Turns with a scrape, each beside one without, in random order.
        seconds: Length of a turn.
        steps: Steps of 4 KiB that the table holds.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        address = f"unix://{folder}/s"
        http = f"127.0.0.1:{free_port()}"
        stack.enter_context(Server(address, f"--http={http}", "--log-level=error"))
        stack.enter_context(clients(address, steps))
        memory = stack.enter_context(innet.connect(address))

        def turn(scraped: bool) -> dict[str, float]:
            before, began = memory.stats()["tables"]["replay"], time.monotonic()
            if scraped:
                urllib.request.urlopen(f"http://{http}/metrics", timeout=SCRAPE_SECONDS).read()
            time.sleep(max(0.0, began + seconds - time.monotonic()))
            after, taken = memory.stats()["tables"]["replay"], time.monotonic() - began
            return {rate: (after[name] - before[name]) / taken for rate, name in COUNTERS.items()}

        random = np.random.default_rng(0)
        # Both share the cores: where one gains by chance, the other loses.
        logs: dict[str, list[float]] = {rate: [] for rate in [*COUNTERS, BOTH]}
        totals = {scraped: dict.fromkeys(COUNTERS, 0.0) for scraped in (False, True)}
        for _ in range(pairs):
            order = bool(random.integers(2))
            rates = {scraped: turn(scraped) for scraped in (order, not order)}
            for rate in COUNTERS:
                # A turn without any counts as one with one.
                with_scrape, without = (max(rates[scraped][rate], 1 / seconds) for scraped in (True, False))
                logs[rate].append(math.log(with_scrape / without))
            logs[BOTH].append(statistics.fmean(logs[rate][-1] for rate in COUNTERS))
            for rate in COUNTERS:
                for scraped, one in rates.items():
                    totals[scraped][rate] += one[rate] / pairs
        for scraped, name in ((False, "without"), (True, "scraped")):
            report.line("scrape", name, totals[scraped]["pushed_per_s"], "steps/s", **totals[scraped])
        for rate, each in logs.items():
            ratio, error = math.exp(float(np.mean(each))), float(np.std(each) / math.sqrt(pairs))
            quartiles = [round(math.exp(float(value)), 4) for value in np.percentile(each, (25, 75))]
            goal = {"goal": f"at least {GOAL:g} of without", "met": ratio >= GOAL}
            report.closing(
                "scrape", "scraped", rate=rate, ratio=ratio, standard_error=error, quartiles=quartiles, **goal
            )
