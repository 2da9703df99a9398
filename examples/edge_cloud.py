"""Actors with a server beside them, at the edge, and a learner over a long link, in the cloud.

The actors push every step to their own server; only sampled batches, priorities and parameters cross the link. Batches
are requested ahead, and priorities are sent without waiting, so the delay costs the learner no throughput.

python examples/edge_cloud.py --delay-ms 20                                   # both ends here, over an emulated link
python examples/edge_cloud.py --role actors --server innet://127.0.0.1:7710   # at the edge, beside `innet-replay serve`
python examples/edge_cloud.py --role learner --server innet://EDGE:7710       # in the cloud
"""

import argparse
import contextlib
import multiprocessing
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from client_server import RATIO, run_actor
from dqn_cartpole import BATCH_SIZE, TABLE, VIEW, Learner, evaluate, make_table

import innet_drl as innet

ACTORS = 2
# Publishing waits for the answer, so each version costs the learner a round trip.
PUBLISH_EVERY = 100


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


def learn(address: str, updates: int) -> None:
    """Learns over the link."""
    learner, began = Learner(), time.monotonic()
    replay = innet.connect(address, tables=make_table(samples_per_insert=RATIO))
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
            # The emulated link of the benchmarks, which are beside the examples.
            sys.path.append(str(Path(__file__).parents[1]))
            from benchmarks.relay import Relay

            link = Relay(edge.removeprefix("innet://"), delay=flags.delay_ms / 1e3)
            with running_actors(edge, flags.seed), link:
                learn(f"innet://{link.address}", flags.updates)
                print(f"{link.bytes[1] / flags.updates / 1e3:.1f} kB an update crossed the link to the learner")


if __name__ == "__main__":
    main()
