"""Rates of pushes and samples at a server whose metrics are scraped once a second, against rates without scrapes."""

from __future__ import annotations

import tempfile
import urllib.request
from contextlib import ExitStack

import numpy as np
from serving import Server

import innet_drl as innet
from benchmarks.systems import free_port
from benchmarks.turns import clients, compare, turn

GOAL = 0.98
SCRAPE_SECONDS = 10.0
"""Timeout of a scrape."""


def scrape(pairs: int = 100, seconds: float = 1.0, steps: int = 20_000) -> None:
    """Rates of a writer and of a learner that samples 64, in turns of a second with one scrape and without.

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

        def get() -> None:
            urllib.request.urlopen(f"http://{http}/metrics", timeout=SCRAPE_SECONDS).read()

        random = np.random.default_rng(0)
        found = []
        for _ in range(pairs):
            if random.integers(2):
                found.append((turn(memory, seconds, get), turn(memory, seconds)))
            else:
                without = turn(memory, seconds)
                found.append((turn(memory, seconds, get), without))
        compare("scrape", "scraped", GOAL, found)
