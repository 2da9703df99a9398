"""Actors with a server beside them, at the edge, and a learner over a long link, in the cloud.

The actors push every step to their own server; only sampled batches, priorities and parameters cross the link. Batches
are requested ahead, and priorities are sent without waiting, so the delay costs the learner no throughput.

python examples/edge_cloud.py --delay-ms 20                                   # both ends here, over an emulated link
python examples/edge_cloud.py --role actors --server innet://127.0.0.1:7710   # at the edge, beside `innet-replay serve`
python examples/edge_cloud.py --role learner --server innet://EDGE:7710       # in the cloud
"""

import argparse
import asyncio
import contextlib
import copy
import itertools
import multiprocessing
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import innet_drl as innet

GAME, TABLE = "CartPole-v1", "dqn"
NUM_ENVS, BATCH_SIZE, MIN_SIZE = 8, 128, 1_000
# Transitions sampled for each new one: the side that is ahead waits for the other one.
RATIO = 32.0
VIEW = innet.NStep(n=3, gamma=0.99)
ACTORS = 2
PUBLISH_EVERY = 100  # each version costs the learner a round trip: it waits for the answer


def make_table() -> innet.Table:
    """The definition of the memory, which all processes name: columns from the game's spaces, one row a step."""
    with gymnasium.make(GAME) as env:
        spaces = env.observation_space, env.action_space
    return innet.Table.from_spaces(TABLE, *spaces, 50_000, min_size=MIN_SIZE, samples_per_insert=RATIO)


def make_network() -> nn.Module:
    """Q-values of both actions."""
    return nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))


def act(network: nn.Module, observation: NDArray[Any], epsilon: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """One action for each observation: a random one with probability epsilon, otherwise the best one."""
    with torch.no_grad():
        best = network(torch.as_tensor(observation)).argmax(1).numpy()
    return np.where(rng.random(len(best)) < epsilon, rng.integers(2, size=len(best)), best)


def evaluate(network: nn.Module, games: int = 20) -> float:
    """Mean score of greedy games, each in an environment of its own."""
    envs = gymnasium.make_vec(GAME, games, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=1)
    scores, playing, rng = np.zeros(games), np.ones(games, bool), np.random.default_rng()
    while playing.any():
        observation, reward, terminated, truncated, _ = envs.step(act(network, observation, 0.0, rng))
        scores += reward * playing
        playing &= ~(terminated | truncated)
    return float(scores.mean())


class Learner:
    """A network, its target network, and an update that returns the new priorities."""

    def __init__(self) -> None:
        self.network = make_network()
        self.target = copy.deepcopy(self.network)
        self.optimizer = torch.optim.Adam(self.network.parameters(), 1e-3)

    def update(self, batch: Any) -> NDArray[np.float32]:
        """Makes one update of double Q-learning from a batch of tensors; returns the absolute TD errors."""
        with torch.no_grad():
            # Double Q-learning: the network chooses the action, its older copy rates the action.
            best = self.network(batch.next_observation).argmax(1, keepdim=True)
            # The discount is gamma^3, less where the episode ended earlier, and 0 where the pole fell.
            goal = batch.reward + batch.discount * self.target(batch.next_observation).gather(1, best).squeeze(1)
        error = goal - self.network(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
        # The weights correct for the items that prioritized sampling prefers.
        loss = (batch.weights * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.network.parameters(), 10.0)
        self.optimizer.step()
        for old, new in zip(self.target.parameters(), self.network.parameters(), strict=True):
            old.data.lerp_(new.data, 0.01)
        priorities: NDArray[np.float32] = error.detach().abs().numpy()
        return priorities


def run_actor(server: str, seed: int) -> None:
    """Plays with the newest parameters and pushes every step, until the learner ends it."""
    torch.set_num_threads(1)
    rng, network, version = np.random.default_rng(seed), make_network(), 0
    envs = gymnasium.make_vec(GAME, NUM_ENVS, vectorization_mode="vector_entry_point")
    # The first process to connect makes the table.
    replay = innet.connect(server, tables=make_table())
    with replay, innet.Recorder(envs, replay.writer(TABLE, NUM_ENVS, VIEW, chunk_steps=10)) as recorder:
        observation, _ = recorder.reset(seed=seed)
        for step in itertools.count(0, NUM_ENVS):
            # `None`, in a short message, where the actor has the newest version.
            parameters = replay.get_parameters(TABLE, newer_than=version, device="cpu")
            if parameters is not None:
                version = parameters.version
                network.load_state_dict(parameters.tensors)
            observation, *_ = recorder.step(act(network, observation, max(0.05, 1.0 - step / 10_000), rng))


@contextlib.contextmanager
def running_actors(server: str, seed: int) -> Iterator[list[multiprocessing.process.BaseProcess]]:
    """Runs actors, each in a process of its own."""
    # "spawn": threads and connections do not survive a fork. A daemon ends with this process, also after an error.
    context = multiprocessing.get_context("spawn")
    actors = [context.Process(target=run_actor, args=(server, seed + n), daemon=True) for n in range(ACTORS)]
    for actor in actors:
        actor.start()
    yield list(actors)
    for actor in actors:
        actor.terminate()
        actor.join()


async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float, sizes: list[int]) -> None:
    """Passes each piece on after the delay; the pieces behind it do not wait for it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):  # a killed peer
        while piece := await reader.read(1 << 16):
            sizes.append(len(piece))
            loop.call_later(delay, writer.write, piece)
    loop.call_later(delay, writer.close)


async def emulate_link(edge: str, delay: float, address: "Future[str]", sizes: list[int]) -> None:
    """A link to the server with a one-way delay in seconds; `sizes` gets the bytes to the learner."""
    host, port = edge.removeprefix("innet://").split(":")

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_edge, to_edge = await asyncio.open_connection(host, int(port))
        await asyncio.gather(carry(reader, to_edge, delay, []), carry(from_edge, writer, delay, sizes))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as listening:
        address.set_result("innet://{}:{}".format(*listening.sockets[0].getsockname()))
        await listening.serve_forever()


def learn(address: str, updates: int) -> None:
    """Learns over the link."""
    learner, began = Learner(), time.monotonic()
    replay = innet.connect(address, tables=make_table())
    with replay, replay.batches(TABLE, BATCH_SIZE, VIEW, device="cpu") as batches:
        for update, batch in enumerate(batches, 1):
            replay.update_priorities(TABLE, batch.ids, learner.update(batch), wait=False)
            if update % PUBLISH_EVERY == 0:
                replay.put_parameters(TABLE, learner.network.state_dict())
            if update == updates:
                break
    rate = updates / (time.monotonic() - began)
    print(f"{updates} updates, {rate:.0f} a second: greedy mean {evaluate(learner.network):.1f}", flush=True)


def main() -> None:
    """Runs one end of the link, or both over an emulated one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--role", choices=["actors", "learner", "both"], default="both")
    parser.add_argument("--server", help="address of the server at the edge; both roles together start their own")
    parser.add_argument("--delay-ms", type=float, default=20.0, help="one-way delay of the emulated link")
    parser.add_argument("--updates", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    torch.set_num_threads(1)
    if flags.role != "both" and not flags.server:
        parser.error(f"--role {flags.role} needs --server")
    if flags.role == "actors":
        with running_actors(flags.server, flags.seed) as actors:
            for actor in actors:
                actor.join()
    elif flags.role == "learner":
        learn(flags.server, flags.updates)
    else:
        with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
            (edge,) = server.addresses
            address, sizes = Future[str](), list[int]()
            link = (emulate_link(edge, flags.delay_ms / 1e3, address, sizes),)
            threading.Thread(target=asyncio.run, args=link, daemon=True).start()
            with running_actors(edge, flags.seed):
                learn(address.result(), flags.updates)
                print(f"{sum(sizes) / flags.updates / 1e3:.1f} kB an update crossed the link to the learner")


if __name__ == "__main__":
    main()
