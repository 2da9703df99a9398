"""Putting and getting the parameters of the paper's network, beside a plain TCP transfer of as many bytes."""

from __future__ import annotations

import socket
import threading

import numpy as np

import innet_drl as innet
from benchmarks import breakout, report

PARAMETERS = 3_292_837
"""Of the paper's network for four actions: 13.17 MB in float32."""


def parameters(seconds: float = 5.0) -> None:
    """Time of one put and of one get of 13.17 MB.

    Args:
        seconds: Length of each measurement.
    """
    tensors = {"weights": np.random.default_rng(0).random(PARAMETERS, np.float32)}
    with innet.Replay() as replay:
        _measure(replay, "in process", tensors, seconds)
    with breakout.server() as (address, _), innet.connect(address) as replay:
        _measure(replay, "loopback TCP", tensors, seconds)
    spent = _plain_transfer(tensors["weights"].tobytes(), seconds)
    report.line("transfer", "plain TCP", spent["p50_ms"], "ms", **spent)


def _measure(replay: innet.Replay, system: str, tensors: dict[str, np.ndarray], seconds: float) -> None:
    spent = report.timed(lambda: replay.put_parameters("policy", tensors), seconds)
    report.line("put_parameters", system, spent["p50_ms"], "ms", **spent)
    got = replay.get_parameters("policy")
    if got is None or not np.array_equal(got.tensors["weights"], tensors["weights"]):
        raise SystemExit("the parameters that came back are not those that were put")
    spent = report.timed(lambda: replay.get_parameters("policy"), seconds)
    report.line("get_parameters", system, spent["p50_ms"], "ms", **spent)


def _plain_transfer(payload: bytes, seconds: float) -> dict[str, float]:
    """One byte there, `payload` back, over loopback TCP into a buffer that is reused."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_answer, args=(listener, payload), daemon=True).start()
        with socket.create_connection(listener.getsockname()) as client:
            buffer = memoryview(bytearray(len(payload)))

            def transfer() -> None:
                client.sendall(b"?")
                have = 0
                while have < len(payload):
                    have += client.recv_into(buffer[have:])

            return report.timed(transfer, seconds)


def _answer(listener: socket.socket, payload: bytes) -> None:
    connection, _ = listener.accept()
    with connection:
        while connection.recv(1):
            connection.sendall(payload)
