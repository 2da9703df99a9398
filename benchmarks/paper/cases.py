"""Flags, systems, formats, sizes and cases of `python -m benchmarks paper`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from benchmarks.repeated import Case, RepeatFlags
from benchmarks.services import NetworkStack
from benchmarks.tasks import PARAMETERS
from innet_drl.redis.messages import TRANSITIONS, FrameFormat, MessageFormat, StackFormat
from innet_drl.train.environments import EnvironmentSpec
from innet_drl.train.memory import memory_settings
from innet_drl.train.settings.config import Config

STEPS = 25
"""Steps of each environment in a push: an actor has 8 environments for the paper's 200 transitions."""
LARGEST_PUSH = 400
"""Transitions of the largest push: the recording has 16 environments."""
BATCH = 512
"""Transitions of the learner's batch."""
CAPACITY = 4_000
"""Capacity of a replay in transitions: 0.9 GB in the paper's format. Sampling from a million takes as long."""

SYSTEMS = {
    "redis": "Redis",
    "shared": "in-network shared memory",
    "sampling": "in-network sampling",
    "ahead": "in-network sampling, sampled ahead",
    "edge": "edge server, sampled ahead",
}
"""The baseline; optimization 1, where the learner pulls experience and samples itself; optimization 2, where the server
samples; optimization 2 with prefetching; and this with the server beside the actors instead of in the middle of the
link, which needs a delay."""
FORMATS = {"stacks": "The paper's format (float32 stacks)", "frames": "Our format (each frame once, packed)"}

SPEC = EnvironmentSpec(actions=4, stack=4, frame_shape=(84, 84), frame_dtype="uint8", frames_per_step=4)

DEFAULTS: Mapping[str, Any] = {
    "actors": (1, 2, 4, 8),
    "systems": ("redis", "shared", "sampling", "ahead"),
    "formats": ("stacks", "frames"),
    "push_transitions": (TRANSITIONS,),
    "parameters_every": (1,),
    "actor_ms": 800.0,
    "update_ms": 500.0,
}
"""The paper's cases."""
DELAYED_DEFAULTS: Mapping[str, Any] = {
    **DEFAULTS,
    "actors": (2,),
    "systems": ("redis", "sampling", "ahead", "edge"),
    "formats": ("frames",),
    "parameters_every": (50,),
    "actor_ms": 100.0,
    "update_ms": 10.0,
}
"""Cases over an emulated link. The computing times of the paper would hide every delay."""


@dataclass(frozen=True)
class PaperFlags(RepeatFlags):
    """The evaluation of Furukawa and Matsutani (2022): a Redis beside a shared memory and a replay in the network."""

    actors: tuple[int, ...] = ()
    """Numbers of actors: 1 2 4 8 by default; 2 with --delay-ms, and with several values of the next two flags."""
    push_transitions: tuple[int, ...] = ()
    """Sizes of a push in transitions, for example `50 100 200 400`: 200 by default. Multiples of 25."""
    parameters_every: tuple[int, ...] = ()
    """Updates between two versions of the parameters, and pushes between two pulls of an actor, for example `1 4 16`: 1
    by default, with --delay-ms 50."""
    systems: tuple[Literal["redis", "shared", "sampling", "ahead", "edge"], ...] = ()
    """`redis` is the baseline, `shared` the in-network shared memory (optimization 1), `sampling` the in-network
    sampling (optimization 2), `ahead` in-network sampling of the next batches while the learner trains. With --delay-ms
    also `edge`: as `ahead`, with the server beside the actors."""
    stacks: tuple[Literal["kernel", "kernel-spin", "fstack"], ...] = ("kernel",)
    """Network stacks of the innet-replay server: `kernel`, `kernel-spin` with both ends spinning, `fstack`."""
    formats: tuple[Literal["stacks", "frames"], ...] = ()
    """`stacks` is the paper's format, float32 stacks; `frames` is each frame once, packed; with --delay-ms `frames` by
    default."""
    delay_ms: tuple[float, ...] = ()
    """One-way delays between actors and learner, for example `0.05 5 20`, over an emulated link."""
    link_mbit: float = 0.0
    """Rate of the emulated link in Mbit/s; 0 has no limit."""
    seconds: float = 10.0
    """Duration of each measurement."""
    actor_ms: float | None = None
    """Simulated computing time of an actor for one push of 200 transitions: 800 by default, with --delay-ms 100."""
    update_ms: float | None = None
    """Simulated computing time of the learner for one update: 500 by default, with --delay-ms 10."""
    redis: str | None = None
    """Address of a running Redis (`redis://host:port`), instead of a new one on this machine."""
    redis_stack: str = "kernel"
    """Network stack of the Redis, for the results: `fstack` if it runs on F-Stack."""
    redis_link: str = "loopback"
    """Link to the Redis, for the results: loopback, veth, memif or NIC."""
    fstack_server: Path | None = None
    """F-Stack's configuration file for the server (`innet-replay serve --stack-config`)."""
    fstack_listen: str = "innet://10.0.0.2:7710"
    """Address of F-Stack's port that the server listens on."""
    fstack_client: str | None = None
    """F-Stack's configuration file for a client; `{index}` in its name is the client's number, 0 for the learner."""
    fstack_link: str = "memif"
    """Link under F-Stack, for the results: veth, memif or NIC."""

    def complete(self) -> Any:
        """Returns the flags with defaults for those that are not given.

        Raises:
            SystemExit: A flag is unusable.
        """
        swept = max(len(self.push_transitions), len(self.parameters_every)) > 1
        defaults = DELAYED_DEFAULTS if self.delay_ms else {**DEFAULTS, **({"actors": (2,)} if swept else {})}
        given = {name: value for name in defaults if (value := getattr(self, name)) not in (None, ())}
        flags: Any = dataclasses.replace(self, **{**defaults, **given})
        if min(*flags.actors, *flags.parameters_every) < 1:
            raise SystemExit("--actors and --parameters-every: numbers of at least 1")
        if any(each % STEPS or not 0 < each <= LARGEST_PUSH for each in flags.push_transitions):
            raise SystemExit(f"--push-transitions: multiples of {STEPS}, up to {LARGEST_PUSH}")
        if not all(0 < each < math.inf for each in (flags.seconds, flags.actor_ms, flags.update_ms)):
            raise SystemExit("--seconds, --actor-ms and --update-ms: numbers above 0")
        push_s = 1e-3 * flags.actor_ms * max(flags.push_transitions) / TRANSITIONS
        if (needed := push_s * max(self.parameters_every, default=0)) > flags.seconds:
            raise SystemExit(f"--seconds {flags.seconds:g}: --parameters-every needs at least {needed:g} for a pull")
        if not all(0 <= each < math.inf for each in flags.delay_ms):
            raise SystemExit("--delay-ms: numbers of at least 0, such as 0.05 5 20")
        if flags.link_mbit < 0 or (flags.link_mbit and not flags.delay_ms):
            raise SystemExit(f"--link-mbit {flags.link_mbit:g}: it is above 0, or 0 for no limit, beside --delay-ms")
        if "edge" in flags.systems and not flags.delay_ms:
            raise SystemExit("--systems edge: it belongs beside --delay-ms")
        return flags

    def cases(self, systems: Collection[str], stacks: Collection[NetworkStack]) -> list[Case]:
        """Returns the cases of complete flags: Redis on its own stack, our systems on each of these."""
        redis = [NetworkStack(self.redis_stack, self.redis_link)]
        swept = ("actors", "push_transitions", "parameters_every")
        values = {"system": systems, "format": self.formats, **{name: getattr(self, name) for name in swept}}
        values["delay_ms"] = self.delay_ms or (None,)
        return [
            {**case, "stack": stack.name, "link": stack.link if case["delay_ms"] is None else "relay"}
            for each in itertools.product(*map(dict.fromkeys, values.values()))
            for case in [dict(zip(values, each, strict=True))]
            for stack in (redis if case["system"] == "redis" else stacks)
        ]


@dataclass(frozen=True)
class Workload:
    """What the processes of one measurement do."""

    stack: NetworkStack
    seconds: float
    """Duration of the measurement."""
    actor_ms: float
    """Simulated computing time of one push."""
    update_ms: float
    """Simulated computing time of one update."""
    link_mbit: float
    """Rate of the emulated link; 0 has no limit."""
    system: str
    format: str
    actors: int
    push_transitions: int
    """Transitions of a push."""
    parameters_every: int
    """Updates between publications of the learner, and pushes between pulls of an actor."""
    delay_ms: float | None
    """One-way delay between actors and learner; `None` for no emulated link."""

    @property
    def streams(self) -> int:
        """Environments of an actor."""
        return self.push_transitions // STEPS

    @property
    def warm_up(self) -> int:
        """Pushes of each actor before the measurement, which fill the replay with more than two batches."""
        return -(-2 * BATCH // (self.push_transitions * self.actors)) + 1

    @property
    def most_waiting(self) -> int:
        """Pushes that may wait for the learner, which it pulls at once: 200 transitions of each actor, or one push."""
        return self.actors * max(1, TRANSITIONS // self.push_transitions)

    def messages(self) -> MessageFormat:
        """The format of messages."""
        config = Config(
            environment="atari/breakout",
            stack=SPEC.stack,
            environments=self.streams,
            n_step=3,
            capacity=CAPACITY,
            min_size=2 * BATCH,
            batch_size=BATCH,
            chunk_steps=STEPS,
            max_bytes=8 << 30,
            # Tables of serial runs have no rate limiter, which would delay pushes and samples.
            serial=True,
        )
        settings = memory_settings(config, SPEC, "replay", {})
        if self.format == "frames":
            return FrameFormat(settings, self.push_transitions)
        # As in the paper, messages and memory are uncompressed.
        return StackFormat(settings, self.push_transitions, codec="none")


def parameters() -> dict[str, NDArray[np.float32]]:
    """Random parameters of the size of the paper's network."""
    return {"weights": np.random.default_rng(0).random(PARAMETERS, np.float32)}
