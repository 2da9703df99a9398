"""The flags of `innet-drl bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class PaperFlags:
    """The evaluation of Furukawa and Matsutani (2022): a Redis beside a shared memory and a replay in the network."""

    actors: str = "1,2,4,8"
    """Numbers of actors."""
    json: Path | None = None
    """File for the results, one row a figure."""
    plot: Path | None = None
    """Picture of the figures, .svg or .png; needs matplotlib. Beside the JSON file where it is not given."""
    systems: str = "redis,shared,sampling,ahead"
    """`redis` is the baseline, `shared` the in-network shared memory (optimization 1), `sampling` the in-network
    sampling (optimization 2), `ahead` the same with the next batch drawn while the learner trains."""
    stacks: str = "kernel,kernel-spin,fstack"
    """What carries the bytes to our server: the kernel, the kernel with both ends spinning, F-Stack."""
    formats: str = "stacks,frames"
    """`stacks` is the paper's format, float32 stacks; `frames` is each frame once, packed."""
    seconds: float = 10.0
    """Measured of each case."""
    actor_ms: float = 800.0
    """What an actor computes for one push of 200 transitions: waited for, as other machines do it."""
    update_ms: float = 500.0
    """What the learner computes for one update: waited for, too."""
    redis: str | None = None
    """A Redis that runs already (`redis://host:port`), in place of one on this machine."""
    redis_stack: str = "kernel"
    """What carries the bytes to it, for the results: `fstack` where it is a Redis on F-Stack."""
    redis_link: str = "loopback"
    """loopback, veth, memif or NIC, for the results."""
    fstack_server: Path | None = None
    """F-Stack's configuration file for the server (`innet-replay serve --stack-config`)."""
    fstack_listen: str = "innet://10.0.0.2:7710"
    """Address of F-Stack's port that the server listens on."""
    fstack_client: str | None = None
    """F-Stack's configuration file for a client; `{index}` in its name is the client's number: the learner is 0."""
    fstack_link: str = "memif"
    """veth, memif or NIC, for the results."""


@dataclass(frozen=True)
class GradientsFlags:
    """One sum of gradients between learners: by us, by Gloo, and by a parameter server."""

    workers: str = "2,4,8"
    """Numbers of workers."""
    sizes: str = "6410000,3310000,157520,40020"
    """Bytes of a gradient; the paper's are those of DQN, A2C, DDPG and PPO."""
    json: Path | None = None
    """File for the results, one row a figure."""
    systems: str = "innet,innet-fixed,gloo,gather,parameter-server"
    """`innet` sums float32, `innet-fixed` fixed point; `gloo` is its all-reduce, `gather` its gather and broadcast;
    `innet-memif` goes over DPDK."""
    loss: str = "0.001,0.01"
    """Shares of datagrams that are lost on the way, over a relay that is also measured without loss; may be empty."""
    link_mbit: int = 0
    """Mbit/s of a link that each worker has, in network namespaces, to a switch that our server is in; the parameter
    server has one, too. 0 for loopback, which has no such limit. Wants root."""
    rounds: int = 3
    """Turns of each system."""
    seconds: float = 1.0
    """Length of a turn, about."""
    training_workers: int = 4
    """Where there are so many workers, they train by each system, too: A2C on CartPole. 0 for no training."""
    training_goal: float = 195.0
    """Mean score of the last 20 games of all workers, at which a training ends."""
    training_seconds: float = 120.0
    """After which it ends as well."""
