"""Sums of gradients over a network that loses, doubles and reorders: real UDP over veth, between namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
from places import HELPERS
from processes import namespaces_missing
from serving import SERVE, SERVER_CLI

pytestmark = pytest.mark.slow

TESTS = HELPERS
WORKERS = 3
PATIENCE = 110


@contextmanager
def process(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def line(running: subprocess.Popen[str]) -> str:
    assert running.stdout is not None
    return running.stdout.readline()


@contextmanager
def network(rate: float) -> Iterator[tuple[list[list[str]], subprocess.Popen[str]]]:
    """What runs a command at either end of a wire, and the wire's process."""
    with process(["unshare", "--net", sys.executable, str(TESTS / "lossy_wire.py"), str(rate)]) as wire:
        holders = line(wire).split()
        yield [["nsenter", f"--net=/proc/{holder}/ns/net", "--"] for holder in holders], wire


def stats(inside: list[str]) -> dict[str, Any]:
    ask = [*inside, *SERVER_CLI, "stats", "innet://10.77.0.1:7710", "--json"]
    told = subprocess.run(ask, capture_output=True, text=True, check=True)
    gradients: dict[str, Any] = json.loads(told.stdout)["gradients"]
    return gradients


@pytest.mark.parametrize(("rate", "length", "rounds"), [(0.001, 100_000, 10), (0.01, 50_000, 6), (0.1, 10_000, 4)])
def test_sums_are_exact_whatever_the_network_does(rate: float, length: int, rounds: int) -> None:
    if reason := namespaces_missing():
        pytest.skip(reason)
    with ExitStack() as stack:
        (near, far), wire = stack.enter_context(network(rate))
        listen = ["10.77.0.1:7710", "--gradients", "0.0.0.0:7711", "--trusted-network", "--log-level=error"]
        server = stack.enter_context(process([*near, *SERVE, *listen]))
        assert " ready on " in line(server)
        work = [*far, sys.executable, str(TESTS / "gradient_worker.py"), "innet://10.77.0.1:7710"]
        numbers = [str(number) for number in (WORKERS, length, rounds)]
        workers = [stack.enter_context(process([*work, str(worker), *numbers])) for worker in range(WORKERS)]
        # Each line is a sum that was compared with the exact one.
        for seed in range(rounds):
            assert [line(worker) for worker in workers] == [f"round {seed}\n"] * WORKERS
        told = stats(near)
        assert told["counted"] == WORKERS * told["sums"] == WORKERS * rounds * -(-length // 360)
        assert (told["strangers"], told["malformed"], told["failed"]) == (0, 0, 0)
        for worker in workers:
            worker.communicate(timeout=PATIENCE)
            assert worker.returncode == 0
        counts = json.loads(wire.communicate(timeout=PATIENCE)[0])
    assert counts.get("unmarked", 0) == 0
    assert counts["marked"] > 2 * told["counted"]
    assert min(counts[fault] for fault in ("lost", "doubled", "held_back")) > 0
