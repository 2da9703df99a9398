"""Any DistributedDataParallel script, its gradients summed in the network: two agents, the same five lines.

    python examples/ddp_hook.py --agent a2c --workers 4          # an aggregator of our own
    innet-replay serve --gradients 127.0.0.1:7711
    python examples/ddp_hook.py --agent dqn --gradients innet://127.0.0.1:7710

What is innet-drl's is marked. `--gradients gloo` leaves it out: the same training over Gloo's all-reduce.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import random
import secrets
import tempfile
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import innet_drl as innet
from innet_drl.distributed import State, hook  # 1

ENVIRONMENT = "CartPole-v1"
INPUTS, ACTIONS = 4, 2


@dataclass(frozen=True)
class Run:
    """What every worker is told."""

    agent: str
    workers: int
    updates: int
    gradients: str
    job: str
    store: str
    """File of the process group's store."""
    seed: int


class ActorCritic(nn.Module):
    """Policy and value of an observation."""

    def __init__(self) -> None:
        super().__init__()
        # No weights in common: values of 100 would outweigh the policy in them.
        self.policy = nn.Sequential(nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, ACTIONS))
        self.value = nn.Sequential(nn.Linear(INPUTS, 128), nn.Tanh(), nn.Linear(128, 1))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, actions] and values [B] of observations [B, inputs]."""
        return self.policy(observation), self.value(observation).squeeze(-1)


class Scores:
    """Returns of the games that a vector environment finished last."""

    def __init__(self, environments: int) -> None:
        self._running = np.zeros(environments)
        self._last: deque[float] = deque(maxlen=20)

    def add(self, reward: NDArray[Any], ended: NDArray[np.bool_]) -> None:
        """Takes in one step."""
        self._running += reward
        self._last.extend(self._running[ended].tolist())
        self._running[ended] = 0.0

    @property
    def mean(self) -> float:
        """Of the last 20 games."""
        return sum(self._last) / max(len(self._last), 1)


def a2c(model: DistributedDataParallel, network: nn.Module, seed: int) -> Iterator[tuple[Tensor, float]]:
    """Advantage actor-critic (Mnih et al., 2016): yields losses, and the mean score of the last games."""
    environments, steps = 16, 16
    arena = gymnasium.make_vec(ENVIRONMENT, environments, vectorization_mode="vector_entry_point")
    scores = Scores(environments)
    observation, _ = arena.reset(seed=seed)
    resets = np.zeros(environments, np.bool_)
    while True:
        observations, actions, rewards, goes_on, valid = [], [], [], [], []
        for _ in range(steps):
            with torch.no_grad():
                logits, _ = network(torch.from_numpy(observation))
            action = logits.softmax(1).multinomial(1).squeeze(1)
            observations.append(torch.from_numpy(observation))
            # The step after a game's end only resets it.
            valid.append(torch.from_numpy(~resets))
            observation, reward, terminated, truncated, _ = arena.step(action.numpy())
            resets = terminated | truncated
            scores.add(reward, resets)
            actions.append(action)
            rewards.append(torch.from_numpy(reward.astype(np.float32)))
            goes_on.append(torch.from_numpy(~resets).float())
        with torch.no_grad():
            _, following = network(torch.from_numpy(observation))
        returns = []
        for reward_t, goes_on_t in zip(reversed(rewards), reversed(goes_on), strict=True):
            following = reward_t + 0.99 * goes_on_t * following
            returns.append(following)
        mask = torch.cat(valid)
        logits, values = model(torch.cat(observations)[mask])
        target = torch.cat(returns[::-1])[mask]
        log_policy = logits.log_softmax(1)
        chosen = log_policy.gather(1, torch.cat(actions)[mask].unsqueeze(1)).squeeze(1)
        advantage = target - values.detach()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
        entropy = -(log_policy.exp() * log_policy).sum(1).mean()
        loss = 0.5 * functional.huber_loss(values, target) - (chosen * advantage).mean() - 0.01 * entropy
        yield loss, scores.mean


def dqn(model: DistributedDataParallel, network: nn.Module, seed: int) -> Iterator[tuple[Tensor, float]]:
    """Double deep Q-learning (van Hasselt et al., 2016): yields losses, and the mean score of the last games."""
    environments, batch = 8, 64
    arena = gymnasium.make_vec(ENVIRONMENT, environments, vectorization_mode="vector_entry_point")
    chance = random.Random(seed)
    memory: deque[tuple[Any, ...]] = deque(maxlen=20_000)
    scores = Scores(environments)
    target = copy.deepcopy(network)
    observation, _ = arena.reset(seed=seed)
    resets = np.zeros(environments, np.bool_)
    update = 0
    while True:
        with torch.no_grad():
            greedy = network(torch.from_numpy(observation)).argmax(1).numpy()
        epsilon = max(0.05, 1.0 - update / 500)
        action = np.array([chance.randrange(ACTIONS) if chance.random() < epsilon else best for best in greedy])
        following, reward, terminated, truncated, _ = arena.step(action)
        for i in np.flatnonzero(~resets):
            memory.append(
                (observation[i], action[i], np.float32(reward[i]), following[i], np.float32(not terminated[i]))
            )
        resets = terminated | truncated
        scores.add(reward, resets)
        observation = following
        if len(memory) < 500:
            continue
        drawn = [np.array(column) for column in zip(*chance.choices(memory, k=batch), strict=True)]
        now, chosen, rewards, then, goes_on = (torch.from_numpy(column) for column in drawn)
        with torch.no_grad():
            # The target follows slowly: a copy now and then makes the scores swing.
            for old, new in zip(target.parameters(), network.parameters(), strict=True):
                old.lerp_(new, 0.01)
            best = target(then).gather(1, network(then).argmax(1, keepdim=True)).squeeze(1)
        q = model(now).gather(1, chosen.unsqueeze(1)).squeeze(1)
        update += 1
        yield functional.huber_loss(q, rewards + 0.99 * goes_on * best), scores.mean


def work(run: Run, rank: int) -> None:
    """Trains in one process."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    dist.init_process_group("gloo", init_method=f"file://{run.store}", rank=rank, world_size=run.workers)
    network: nn.Module = ActorCritic()
    losses, rate = a2c, 1e-3
    if run.agent == "dqn":
        hidden = (nn.Linear(INPUTS, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        network = nn.Sequential(*hidden, nn.Linear(128, ACTIONS))
        losses, rate = dqn, 1e-3
    model = DistributedDataParallel(network)
    if run.gradients != "gloo":
        state = State.join(run.gradients, run.job)  # 2
        model.register_comm_hook(state, hook)  # 3
    optimizer = torch.optim.Adam(model.parameters(), rate)
    # The same weights so far, from here on each worker's own chances.
    seed = run.seed + 1000 * rank
    torch.manual_seed(seed)
    for update, (loss, score) in enumerate(losses(model, network, seed), 1):
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and update % max(1, run.updates // 10) == 0:
            print(f"update {update:5}: mean score of the last 20 games {score:.1f}", flush=True)
        if update == run.updates:
            break
    if run.gradients != "gloo":
        state.close()  # 4
    dist.destroy_process_group()


def main() -> None:
    """Reads the flags and starts the workers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", choices=("dqn", "a2c"), default="a2c")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--updates", type=int, default=None, help="of the agent's preset where it is not given")
    parser.add_argument("--gradients", help="address of a server with --gradients, or gloo; our own by default")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    updates = flags.updates or {"a2c": 600, "dqn": 2000}[flags.agent]
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, innet.Memory([]) as nothing:
        gradients = flags.gradients
        if gradients is None:
            server = nothing.serve(f"unix://{folder}/gradients", gradients="127.0.0.1:0")  # 5
            gradients = server.addresses[0]
        job = f"{flags.agent}-{secrets.token_hex(4)}"
        run = Run(flags.agent, flags.workers, updates, gradients, job, os.path.join(folder, "store"), flags.seed)
        workers = [processes.Process(target=work, args=(run, rank)) for rank in range(run.workers)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    if any(worker.exitcode for worker in workers):
        raise SystemExit("a worker failed: its error is above")


if __name__ == "__main__":
    main()
