"""The flags of the papers' evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PaperFlags:
    """The evaluation of Furukawa and Matsutani (2022): a Redis beside a shared memory and a replay in the network."""

    actors: str | None = None
    """Numbers of actors: 1,2,4,8 by default, with --delay-ms 2."""
    json: Path | None = None
    """File for the results, one row a figure."""
    plot: Path | None = None
    """Picture of the figures, .svg or .png; needs matplotlib. Beside the JSON file by default."""
    systems: str | None = None
    """`redis` is the baseline, `shared` the in-network shared memory (optimization 1), `sampling` the in-network
    sampling (optimization 2), `ahead` in-network sampling of the next batches while the learner trains. With --delay-ms
    also `edge`: as `ahead`, with the server beside the actors."""
    stacks: str | None = None
    """Network stacks of the innet-replay server: `kernel`, `kernel-spin` with both ends spinning, `fstack`; with
    --delay-ms `kernel` by default."""
    formats: str | None = None
    """`stacks` is the paper's format, float32 stacks; `frames` is each frame once, packed; with --delay-ms `frames` by
    default."""
    delay_ms: str = ""
    """One-way delays between actors and learner, for example `0.05,5,20`: draws throughput and bytes against them, over
    an emulated link."""
    link_mbit: float = 0.0
    """Rate of the emulated link in Mbit/s; 0 has no limit."""
    seconds: float = 10.0
    """Duration of each case."""
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


@dataclass(frozen=True)
class GradientsFlags:
    """The sum of learners' gradients by innet-drl, by Gloo, and by a parameter server."""

    workers: str = "2,4,8"
    """Numbers of workers."""
    sizes: str = "6410000,3310000,157520,40020"
    """Bytes of a gradient; the paper has DQN, A2C, DDPG and PPO."""
    json: Path | None = None
    """File for the results, one row a figure."""
    systems: str = "innet,innet-fixed,gloo,gather,parameter-server"
    """`innet` sums float32, `innet-fixed` fixed point; `gloo` is its all-reduce, `gather` its gather and broadcast;
    `innet-memif` goes over DPDK."""
    loss: str = "0.001,0.01"
    """Shares of datagrams that `innet` loses at each end, where the kernel drops them and passes the others on one by
    one: also measured without loss. May be empty."""
    link_mbit: int = 0
    """Mbit/s of links, in network namespaces, from each worker and the parameter server to a switch, in which the
    innet-replay server runs. 0 uses loopback, which has no such limit. Needs root."""
    rounds: int = 3
    """Trials of each system."""
    seconds: float = 1.0
    """Approximate duration of a trial."""
    training_workers: int = 4
    """Number of workers that also train A2C on CartPole with each system. 0 for no training."""
    training_goal: float = 195.0
    """Mean score of the last 20 games of all workers, at which a training ends."""
    training_seconds: float = 120.0
    """Seconds after which a training ends."""
