"""Any DistributedDataParallel script, its gradients summed in the network: two agents, the same five lines.

    python examples/ddp_hook.py --agent a2c --workers 4          # an aggregator of our own
    innet-replay serve --gradients 127.0.0.1:7711
    python examples/ddp_hook.py --agent dqn --gradients innet://127.0.0.1:7710

The lines of innet-drl are numbered. `--gradients gloo` leaves them out: the same training over Gloo's all-reduce.
"""

import argparse
import copy
import secrets
import tempfile
from collections.abc import Iterator

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from gymnasium.wrappers.vector import RecordEpisodeStatistics
from torch import Tensor, nn
from torch.nn.functional import huber_loss
from torch.nn.parallel import DistributedDataParallel

import innet_drl as innet
from innet_drl.distributed import State, hook  # 1


def make_envs(num_envs: int) -> RecordEpisodeStatistics:
    """CartPole with the scores of the last 20 games, reset by the step after a game's end."""
    envs = gymnasium.make_vec("CartPole-v1", num_envs, vectorization_mode="vector_entry_point")
    return RecordEpisodeStatistics(envs, buffer_length=20)


def a2c(model: nn.Module, network: nn.Module, envs: RecordEpisodeStatistics, seed: int) -> Iterator[Tensor]:
    """The losses of advantage actor-critic (Mnih et al., 2016); the network has two logits and a value."""
    observation, _ = envs.reset(seed=seed)
    ended = np.zeros(envs.num_envs, bool)
    while True:
        rows = []
        for _ in range(16):
            now, reset = torch.from_numpy(observation), torch.from_numpy(ended)
            with torch.no_grad():
                action = network(now)[:, :2].softmax(1).multinomial(1).squeeze(1)
            observation, reward, terminated, truncated, _ = envs.step(action.numpy())
            ended = terminated | truncated
            with torch.no_grad():
                # A truncated game bootstraps from its last observation, which this step returns.
                cut = torch.from_numpy(truncated & ~terminated) * network(torch.from_numpy(observation))[:, 2]
            worth = torch.from_numpy(reward).float() + 0.99 * cut
            rows.append((now, action, worth, torch.from_numpy(~ended), ~reset))
        with torch.no_grad():
            following = network(torch.from_numpy(observation))[:, 2]
        goals: list[Tensor] = []
        for _, _, reward, going, _ in reversed(rows):
            following = reward + 0.99 * going * following
            goals.insert(0, following)
        # A row that resets its game has no action of its own.
        now, action, _, _, valid = (torch.cat(column) for column in zip(*rows, strict=True))
        output, goal = model(now[valid]), torch.cat(goals)[valid]
        policy = torch.distributions.Categorical(logits=output[:, :2])
        advantage = goal - output[:, 2].detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        gain = policy.log_prob(action[valid]) * advantage + 0.01 * policy.entropy()  # type: ignore[no-untyped-call]
        yield 0.5 * huber_loss(output[:, 2], goal) - gain.mean()


def dqn(model: nn.Module, network: nn.Module, envs: RecordEpisodeStatistics, seed: int) -> Iterator[Tensor]:
    """The losses of double Q-learning (van Hasselt et al., 2016); the network has two Q-values."""
    rng, target, view, name = np.random.default_rng(seed), copy.deepcopy(network), innet.NStep(), "worker"
    spaces = envs.single_observation_space, envs.single_action_space
    replay = innet.Memory(innet.Table.from_spaces(name, *spaces, 20_000, sampler="uniform"), seed=seed)
    recorder = innet.Recorder(envs, replay.writer(name, envs.num_envs, view, chunk_steps=10))
    batches = replay.batches(name, 64, view, prefetch=0, device="cpu")
    observation, _ = recorder.reset(seed=seed)
    for step in range(1_000_000):
        with torch.no_grad():
            best = network(torch.from_numpy(observation)).argmax(1).numpy()
        explore = rng.random(envs.num_envs) < max(0.05, 1.0 - step / 500)
        observation, *_ = recorder.step(np.where(explore, rng.integers(2, size=envs.num_envs), best))
        if step < 60:
            continue
        batch = next(batches)
        with torch.no_grad():
            # The target follows slowly: a copy now and then makes the scores swing.
            for old, new in zip(target.parameters(), network.parameters(), strict=True):
                old.lerp_(new, 0.01)
            following = network(batch.next_observation).argmax(1, keepdim=True)
            goal = batch.reward + batch.discount * target(batch.next_observation).gather(1, following).squeeze(1)
        yield huber_loss(model(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1), goal)


class ActorCritic(nn.Module):
    """Two logits and a value, without weights in common: values of 100 would outweigh the policy in them."""

    def __init__(self) -> None:
        super().__init__()
        self.policy, self.value = (
            nn.Sequential(nn.Linear(4, 128), nn.Tanh(), nn.Linear(128, outputs)) for outputs in (2, 1)
        )

    def forward(self, observation: Tensor) -> Tensor:
        """Outputs [B, 3] of observations [B, 4]."""
        return torch.cat([self.policy(observation), self.value(observation)], 1)


def work(rank: int, flags: argparse.Namespace, gradients: str, job: str, store: str) -> None:
    """Trains in one process."""
    torch.set_num_threads(1)
    torch.manual_seed(flags.seed)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=flags.workers)
    hidden = (nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
    network, losses, num_envs = {
        "a2c": (ActorCritic(), a2c, 16),
        "dqn": (nn.Sequential(*hidden, nn.Linear(128, 2)), dqn, 8),
    }[flags.agent]
    model = DistributedDataParallel(network)
    if gradients != "gloo":
        state = State.join(gradients, job)  # 2
        model.register_comm_hook(state, hook)  # 3
    optimizer, envs = torch.optim.Adam(model.parameters(), 1e-3), make_envs(num_envs)
    # The same weights so far, from here on each worker's own chances.
    seed = flags.seed + 1000 * rank
    torch.manual_seed(seed)
    updates = flags.updates or {"a2c": 600, "dqn": 2000}[flags.agent]
    for update, loss in zip(range(1, updates + 1), losses(model, network, envs, seed), strict=False):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and update % max(1, updates // 10) == 0:
            score = np.mean(envs.return_queue or [0.0])
            print(f"update {update:5}: mean score of the last 20 games {score:.1f}", flush=True)
    if gradients != "gloo":
        state.close()  # 4
    dist.destroy_process_group()


def main() -> None:
    """Reads the flags and starts the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=("dqn", "a2c"), default="a2c")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, help="600 of a2c and 2,000 of dqn by default")
    parser.add_argument("--gradients", help="address of a server with --gradients, or gloo; our own by default")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, innet.Memory() as memory:
        server = memory.serve(f"unix://{folder}/gradients", gradients="127.0.0.1:0")  # 5
        run = (flags, flags.gradients or server.addresses[0], secrets.token_hex(4), f"{folder}/store")
        # Starts a process for each rank, and raises the error of the first that fails.
        torch.multiprocessing.spawn(work, run, flags.workers)  # type: ignore[attr-defined,no-untyped-call]


if __name__ == "__main__":
    main()
