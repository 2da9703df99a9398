"""The prioritized DQN of dqn_cartpole.py with an actor and a learner in processes of their own, around a server.

python examples/client_server.py                                      # starts a server of its own
innet-replay serve --listen innet://127.0.0.1:7710
python examples/client_server.py --server innet://127.0.0.1:7710
"""

import argparse
import itertools
import multiprocessing
import time

import gymnasium
import numpy as np
import torch
from dqn_cartpole import BATCH_SIZE, GAME, GOAL, NUM_ENVS, TABLE, VIEW, Learner, act, evaluate, make_network, make_table

import innet_drl as innet

# Transitions sampled for each new one, as in dqn_cartpole.py: the process that is ahead waits for the other one.
RATIO = 32.0


def run_actor(server: str, seed: int) -> None:
    """Plays with the newest parameters and pushes every step, until the learner ends it."""
    torch.set_num_threads(1)
    rng, network, version = np.random.default_rng(seed), make_network(), 0
    envs = gymnasium.make_vec(GAME, NUM_ENVS, vectorization_mode="vector_entry_point")
    # Both processes name the table, and the first one to connect makes it.
    replay = innet.connect(server, tables=make_table(samples_per_insert=RATIO))
    with replay, innet.Recorder(envs, replay.writer(TABLE, NUM_ENVS, VIEW, chunk_steps=10)) as recorder:
        observation, _ = recorder.reset(seed=seed)
        for step in itertools.count(0, NUM_ENVS):
            # `None`, in a short message, where the actor has the newest version.
            parameters = replay.get_parameters(TABLE, newer_than=version, device="cpu")
            if parameters is not None:
                version = parameters.version
                network.load_state_dict(parameters.tensors)
            observation, *_ = recorder.step(act(network, observation, max(0.05, 1.0 - step / 10_000), rng))


def learn(server: str, steps: int) -> None:
    """Learns from batches that are decoded ahead, publishes parameters, and ends with the goal or the last step."""
    learner, start = Learner(), time.monotonic()
    replay = innet.connect(server, tables=make_table(samples_per_insert=RATIO))
    with replay, replay.batches(TABLE, BATCH_SIZE, VIEW, device="cpu") as batches:
        for update, batch in enumerate(batches, 1):
            replay.update_priorities(TABLE, batch.ids, learner.update(batch))
            if update % 10 == 0:
                replay.put_parameters(TABLE, learner.network.state_dict())
            last = update * BATCH_SIZE >= steps * RATIO
            if update % 1_000 == 0 or last:
                score = evaluate(learner.network)
                print(f"update {update}: greedy mean {score:.1f}, {time.monotonic() - start:.0f} s", flush=True)
                if score >= GOAL or last:
                    return


def main() -> None:
    """Starts the actor, and learns in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", help="address of a running server; by default this process serves a memory")
    parser.add_argument("--steps", type=int, default=200_000, help="steps of all environments at most")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    torch.set_num_threads(1)
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as own:
        server = flags.server or own.addresses[0]
        # "spawn": threads and connections do not survive a fork. A daemon ends with this process, also after an error.
        context = multiprocessing.get_context("spawn")
        actor = context.Process(target=run_actor, args=(server, flags.seed), daemon=True)
        actor.start()
        learn(server, flags.steps)
        actor.terminate()
        actor.join()


if __name__ == "__main__":
    main()
