"""Systems, network stacks, formats and sizes of `python -m benchmarks paper`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl.redis.messages import TRANSITIONS, FrameFormat, MessageFormat, StackFormat
from innet_drl.train.config import Config
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.memory import memory_settings

STREAMS = 8
"""Environments of an actor: 25 steps of each are a push."""
BATCH = 512
"""Transitions of the learner's batch."""
CAPACITY = 4_000
"""Capacity of a replay in transitions: 0.9 GB in the paper's format. Sampling from a million takes as long."""
PARAMETERS = 3_292_837
"""float32 values of the paper's network: 13.17 MB."""
PARAMETERS_EVERY = 50
"""Updates between two versions of the parameters over an emulated link. In the paper's cases each update has one."""
ENVIRONMENT = "atari/breakout"
ACTIONS = 4

SYSTEMS = {
    "redis": "Redis on kernel TCP",
    "shared": "in-network shared memory",
    "sampling": "in-network sampling",
    "ahead": "in-network sampling, sampled ahead",
    "edge": "edge server, sampled ahead",
}
"""The baseline; optimization 1, where the learner pulls experience and samples itself; optimization 2, where the server
samples; optimization 2 with prefetching; and this with the server beside the actors instead of in the middle of the
link, which needs a delay."""
FORMATS = {"stacks": "the paper's format: float32 stacks", "frames": "our format: each frame once, packed"}

SPEC = EnvironmentSpec(actions=ACTIONS, stack=4, frame_shape=(84, 84), frame_dtype="uint8", frames_per_step=4)


@dataclass(frozen=True)
class NetworkStack:
    """The network stack between two processes."""

    name: str
    link: str
    """Link under the stack: loopback, veth, memif, NIC."""
    serve: tuple[str, ...] = ()
    """Flags of `innet-replay serve`."""
    listen: str = "innet://127.0.0.1:0"
    """Address that the server listens on."""
    scheme: str = "innet"
    """Scheme of the address that clients connect to."""
    spin: bool = False
    """Clients poll for answers without sleeping."""
    client_config: str = ""
    """F-Stack's configuration file of a client; `{index}` in its name is the client's number, 0 for the learner."""

    def connection(self, address: str, client: int) -> tuple[str, dict[str, Any]]:
        """Returns URL and options of `innet.connect` for one client."""
        options: dict[str, Any] = {"spin": True} if self.spin else {}
        if self.client_config:
            options["config"] = self.client_config.format(index=client)
        return address.replace("innet://", f"{self.scheme}://", 1), options


KERNEL = NetworkStack("kernel", "loopback")
SPINNING = NetworkStack("kernel-spin", "loopback", serve=("--spin",), spin=True)


@dataclass(frozen=True)
class Case:
    """One measurement: a system on a network stack, with a format and a number of actors."""

    system: str
    stack: NetworkStack
    format: str
    actors: int
    seconds: float
    """Duration of the measurement."""
    actor_ms: float
    """Simulated computing time of one push."""
    update_ms: float
    """Simulated computing time of one update."""
    scene: Path
    """Recording of frames, by `scene.record`."""
    delay_ms: float | None = None
    """One-way delay between actors and learner; `None` for no emulated link."""
    link_mbit: float = 0.0
    """Rate of the emulated link; 0 has no limit."""

    @property
    def parameters_every(self) -> int:
        """Updates between publications of the learner, and pushes between pulls of an actor."""
        return 1 if self.delay_ms is None else PARAMETERS_EVERY

    @property
    def warm_up(self) -> int:
        """Pushes of each actor before the measurement, which fill the replay with more than two batches."""
        return -(-2 * BATCH // (TRANSITIONS * self.actors)) + 1

    def messages(self) -> MessageFormat:
        """The format of the case's messages."""
        config = Config(
            environment=ENVIRONMENT,
            stack=SPEC.stack,
            environments=STREAMS,
            n_step=3,
            capacity=CAPACITY,
            min_size=2 * BATCH,
            batch_size=BATCH,
            chunk_steps=TRANSITIONS // STREAMS,
            max_bytes=8 << 30,
            # Tables of serial runs have no rate limiter, which would delay pushes and samples.
            serial=True,
        )
        settings = memory_settings(config, SPEC, "replay", {})
        if self.format == "frames":
            return FrameFormat(settings)
        # As in the paper, messages and memory are uncompressed.
        return StackFormat(settings, codec="none")


def parameters() -> dict[str, NDArray[np.float32]]:
    """Random parameters of the size of the paper's network."""
    return {"weights": np.random.default_rng(0).random(PARAMETERS, np.float32)}
