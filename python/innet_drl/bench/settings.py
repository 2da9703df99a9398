"""What `innet-drl bench paper` measures: systems, stacks, formats, and the paper's sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from innet_drl.bench.messages import Format, Frames, Stacks
from innet_drl.train.config import Config
from innet_drl.train.environments import Spec

TRANSITIONS = 200
"""Of one push."""
STREAMS = 8
"""Environments of an actor: 25 steps of each are a push."""
BATCH = 512
"""Transitions of the learner's batch."""
CAPACITY = 4_000
"""Transitions that a replay keeps: 0.9 GB in the paper's format. A draw takes as long from a million."""
PARAMETERS = 3_292_837
"""float32 values of the paper's network: 13.17 MB."""
ACTIONS = 4

SYSTEMS = {
    "redis": "Redis on kernel TCP",
    "shared": "in-network shared memory",
    "sampling": "in-network sampling",
    "ahead": "in-network sampling, drawn ahead",
}
"""The baseline; optimization 1, where the learner pulls and draws by itself; optimization 2, and the same while the
learner trains on the batch before."""
FORMATS = {"stacks": "the paper's format: float32 stacks", "frames": "our format: each frame once, packed"}

SPEC = Spec(actions=ACTIONS, stack=4, frame_shape=(84, 84), frame_dtype="uint8", frames_per_step=4)


@dataclass(frozen=True)
class Stack:
    """How bytes get from one process to the other."""

    name: str
    link: str
    """What carried them: loopback, veth, memif, NIC."""
    serve: tuple[str, ...] = ()
    """Flags of `innet-replay serve`."""
    listen: str = "innet://127.0.0.1:0"
    """Where our server listens."""
    scheme: str = "innet"
    """Of the address that clients connect to."""
    spin: bool = False
    """Whether clients look for answers without sleeping."""
    client_config: str = ""
    """F-Stack's configuration file of a client; `{index}` in it is the client's number, the learner's is 0."""

    def connection(self, address: str, client: int) -> tuple[str, dict[str, Any]]:
        """URL and options of `innet.connect` for one client."""
        options: dict[str, Any] = {"spin": True} if self.spin else {}
        if self.client_config:
            options["config"] = self.client_config.format(index=client)
        return address.replace("innet://", f"{self.scheme}://", 1), options


KERNEL = Stack("kernel", "loopback")
SPINNING = Stack("kernel-spin", "loopback", serve=("--spin",), spin=True)


@dataclass(frozen=True)
class Case:
    """One run: a system on a stack, with a format and so many actors."""

    system: str
    stack: Stack
    format: str
    actors: int
    seconds: float
    """Measured."""
    actor_ms: float
    """Of computing for one push: waited for."""
    update_ms: float
    """Of the learner's update: waited for."""
    scene: Path
    """The frames, as `scene.record` left them."""

    @property
    def warm_up(self) -> int:
        """Pushes of each actor before anything is measured: the replay then has more than two batches."""
        return -(-2 * BATCH // (TRANSITIONS * self.actors)) + 1

    def messages(self) -> Format:
        """The format of its messages."""
        config = Config(
            environments=STREAMS,
            n_step=3,
            capacity=CAPACITY,
            min_size=2 * BATCH,
            batch_size=BATCH,
            message_transitions=TRANSITIONS,
            chunk_steps=TRANSITIONS // STREAMS,
            max_bytes=8 << 30,
            # Whose tables keep no replay ratio: pushes and draws are to take what they take.
            serial=True,
        )
        if self.format == "frames":
            return Frames(config, SPEC, "replay")
        # As in the paper nothing is packed, neither on the way nor where it is kept.
        return Stacks(config, SPEC, "replay", codec="none")


def parameters() -> dict[str, NDArray[np.float32]]:
    """As many as the paper's network has."""
    return {"weights": np.random.default_rng(0).random(PARAMETERS, np.float32)}
