"""A DistributedDataParallel script with its gradients summed in the network: double DQN, each worker with a memory.

    python examples/ddp_hook.py --workers 4                     # a server of its own sums the gradients
    innet-replay serve --gradients 127.0.0.1:7711
    python examples/ddp_hook.py --gradients innet://127.0.0.1:7710

The lines of the gradients are numbered. `--gradients gloo` leaves them out: Gloo's all-reduce instead.
"""

import argparse
import copy
import secrets
import tempfile

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import nn
from torch.nn.functional import huber_loss
from torch.nn.parallel import DistributedDataParallel

import innet_drl as innet
from innet_drl.distributed import State, hook  # 1

NUM_ENVS, NAME, VIEW = 8, "worker", innet.NStep()


def train(model: nn.Module, network: nn.Module, seed: int, updates: int, *, report: bool) -> None:
    """Double Q-learning (van Hasselt et al., 2016) on CartPole; `model` is `network` behind DDP."""
    envs = gymnasium.make_vec("CartPole-v1", NUM_ENVS, vectorization_mode="vector_entry_point")
    envs = RecordEpisodeStatistics(envs, buffer_length=20)
    spaces = envs.single_observation_space, envs.single_action_space
    replay = innet.Memory(innet.Table.from_spaces(NAME, *spaces, 20_000, sampler="uniform"), seed=seed)
    recorder = innet.Recorder(envs, replay.writer(NAME, NUM_ENVS, VIEW, chunk_steps=10))
    batches = replay.batches(NAME, 64, VIEW, prefetch=0, device="cpu")
    optimizer, target, rng = (
        torch.optim.Adam(network.parameters(), 1e-3),
        copy.deepcopy(network),
        np.random.default_rng(seed),
    )
    observation, _ = recorder.reset(seed=seed)
    for step in range(-60, updates):
        with torch.no_grad():
            best = network(torch.from_numpy(observation)).argmax(1).numpy()
        explore = rng.random(NUM_ENVS) < min(1.0, max(0.05, 0.88 - step / 500))
        observation, *_ = recorder.step(np.where(explore, rng.integers(2, size=NUM_ENVS), best))
        if step < 0:
            continue
        batch = next(batches)
        with torch.no_grad():
            # The target follows slowly: a copy now and then makes the scores swing.
            for old, new in zip(target.parameters(), network.parameters(), strict=True):
                old.lerp_(new, 0.01)
            following = network(batch.next_observation).argmax(1, keepdim=True)
            goal = batch.reward + batch.discount * target(batch.next_observation).gather(1, following).squeeze(1)
        loss = huber_loss(model(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1), goal)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        if report and (step + 1) % max(1, updates // 10) == 0:
            score = np.mean(envs.return_queue or [0.0])
            print(f"update {step + 1:5}: mean score of the last 20 games {score:.1f}", flush=True)


def work(rank: int, flags: argparse.Namespace, gradients: str, job: str, store: str) -> None:
    """Trains in one process."""
    torch.set_num_threads(1)
    # Workers begin with equal weights, and play games of their own.
    torch.manual_seed(flags.seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=flags.workers)
    network = nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
    model = DistributedDataParallel(network)
    if gradients != "gloo":
        state = State.join(gradients, job)  # 2
        model.register_comm_hook(state, hook)  # 3
    train(model, network, flags.seed + 1000 * rank, flags.updates, report=rank == 0)
    if gradients != "gloo":
        state.close()  # 4
    dist.destroy_process_group()


def main() -> None:
    """Reads the flags and starts the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=2000)
    parser.add_argument("--gradients", help="address of a server with --gradients, or gloo; by default a server here")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, innet.Memory() as memory:
        server = memory.serve(f"unix://{folder}/gradients", gradients="127.0.0.1:0")  # 5
        run = (flags, flags.gradients or server.addresses[0], secrets.token_hex(4), f"{folder}/store")
        # Starts a process for each rank, and raises the error of the first that fails.
        torch.multiprocessing.spawn(work, run, flags.workers)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
