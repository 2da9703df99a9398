"""One memory on three servers: actors write to one server each, a batch has items of all, and one server leaves.

python examples/several_servers.py                                                        # starts three servers here
python examples/several_servers.py --servers innet://host-a:7710,innet://host-b:7710      # servers that are running
"""

import argparse
import contextlib
import logging
import sys
import threading

import gymnasium
import numpy as np

import innet_drl as innet

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--servers", help="addresses of running servers, separated by commas")
parser.add_argument("--steps", type=int, default=2_000, help="steps of each actor")
flags = parser.parse_args()
logging.basicConfig(stream=sys.stdout, format="%(message)s")

with gymnasium.make("CartPole-v1") as env:
    spaces = env.observation_space, env.action_space
# Capacity, min_size and slack are totals: each server has an equal part.
table = innet.Table.from_spaces("cartpole", *spaces, capacity=30_000, min_size=300, view=innet.NStep(n=3))


def act(address: str, actor: int) -> None:
    """Plays; the writer chooses the server with the fewest writers, or the given one."""
    games = gymnasium.make_vec("CartPole-v1", 4)
    with (
        innet.connect(address, tables=table) as replay,
        innet.Recorder(games, replay.writer("cartpole", 4, server=actor)) as recorder,
    ):
        recorder.reset(seed=actor)
        for _ in range(0, flags.steps, 4):
            recorder.step(recorder.action_space.sample())


def show(replay: innet.Replay, title: str) -> None:
    """Prints the part of each server."""
    shards = {address: stats and stats["tables"]["cartpole"] for address, stats in replay.stats()["shards"].items()}
    priority = sum(part["total_mass"] for part in shards.values() if part)
    sampled = sum(part["sampled_items"] for part in shards.values() if part)
    for address, part in shards.items():
        if part is None:
            print(f"{title}: {address} is away")
            continue
        shares = part["total_mass"] / priority, part["sampled_items"] / sampled
        steps = f"{part['steps']} of at most {part['capacity']} steps"
        print(f"{title}: {address} has {steps}, {shares[0]:.0%} of the priorities, {shares[1]:.0%} of the samples")


def learn(replay: innet.Replay, updates: int) -> None:
    """Updates priorities; your loss takes the place of the random numbers."""
    rng = np.random.default_rng(0)
    with replay.batches("cartpole", 128, prefetch=2) as batches:
        for _, batch in zip(range(updates), batches, strict=False):
            replay.update_priorities("cartpole", batch.ids, rng.random(128))


with contextlib.ExitStack() as stack:
    own = [] if flags.servers else [innet.Memory().serve("innet://127.0.0.1:0") for _ in range(3)]
    address = flags.servers or ",".join(server.addresses[0] for server in own)
    replay = stack.enter_context(innet.connect(address, tables=table))
    actors = [threading.Thread(target=act, args=(address, actor)) for actor in range(len(address.split(",")))]
    for actor in actors:
        actor.start()
    learn(replay, 200)
    for actor in actors:
        actor.join()
    learn(replay, 500)
    show(replay, "together")
    if own:
        # Batches have the items of the others, and updates of its items are ignored.
        own[-1].close()
        learn(replay, 100)
        show(replay, "one away")
