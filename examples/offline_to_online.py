"""Offline to online: a DQN learns from demonstrations, then from batches of which half are demonstrations.

python examples/offline_to_online.py
"""

import copy

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

import innet_drl as innet

GAMES, UPDATES, STEPS = 8, 2_000, 24_000  # updates offline, steps of all environments online
MIX = innet.Mix({"demonstrations": 0.5, "online": 0.5})  # as RLPD (Ball et al., 2023), with normalized layers

torch.manual_seed(0)
torch.set_num_threads(1)
rng = np.random.default_rng(0)
games = gymnasium.make_vec("CartPole-v1", GAMES)
spaces = games.single_observation_space, games.single_action_space
replay = innet.Memory([innet.Table.from_spaces(n, *spaces, 50_000, view=innet.NStep(n=3)) for n in MIX.shares], seed=0)
layers = [nn.Linear(4, 128), nn.LayerNorm(128), nn.ReLU(), nn.Linear(128, 128), nn.LayerNorm(128), nn.ReLU()]
network = nn.Sequential(*layers, nn.Linear(128, 2))
target, optimizer = copy.deepcopy(network), torch.optim.Adam(network.parameters(), 5e-4)


def act(observation: NDArray[np.float32], epsilon: float) -> NDArray[np.int64]:
    """One action for each observation: a random one with probability epsilon, otherwise the best one."""
    with torch.no_grad():
        best = network(torch.as_tensor(observation)).argmax(1).numpy()
    return np.where(rng.random(len(best)) < epsilon, rng.integers(2, size=len(best)), best)


def score() -> float:
    """Mean return of 20 greedy games."""
    envs, total, playing = gymnasium.make_vec("CartPole-v1", 20), np.zeros(20), np.ones(20, bool)
    observation, _ = envs.reset(seed=1)
    while playing.any():
        observation, reward, terminated, truncated, _ = envs.step(act(observation, 0.0))
        total += reward * playing
        playing &= ~(terminated | truncated)
    return float(total.mean())


def update(source: str | innet.Mix) -> None:
    """Makes one update of Q-learning from a batch of one table or of both, and sets priorities there."""
    batch = replay.sample(source, 128, device="cpu")
    with torch.no_grad():
        goal = batch.reward + batch.discount * target(batch.next_observation).amax(1)
    value = network(batch.observation).gather(1, batch.action.unsqueeze(1)).squeeze(1)
    optimizer.zero_grad()
    (batch.weights * nn.functional.huber_loss(value, goal, reduction="none")).mean().backward()
    optimizer.step()
    for old, new in zip(target.parameters(), network.parameters(), strict=True):
        old.data.lerp_(new.data, 0.01)
    replay.update_priorities(source, batch.ids, (goal - value).detach().abs().numpy())


# A noisy demonstrator pushes to where the pole falls. `innet_drl.datasets.import_table` reads a file instead.
with innet.Recorder(games, replay.writer("demonstrations", GAMES)) as recorder:
    seen = recorder.reset(seed=0)[0]
    for _ in range(1_000):
        pushes = np.where(rng.random(GAMES) < 0.7, rng.integers(2, size=GAMES), seen[:, 2] + 0.3 * seen[:, 3] > 0)
        seen = recorder.step(pushes)[0]
for _ in range(UPDATES):
    update("demonstrations")
print(f"offline, {UPDATES} updates: mean score {score():.1f}")

games = gymnasium.make_vec("CartPole-v1", GAMES)  # the recorder has closed the others
with replay, innet.Recorder(games, replay.writer("online", GAMES)) as recorder:
    seen = recorder.reset(seed=1)[0]
    for step in range(GAMES, STEPS + 1, GAMES):
        seen = recorder.step(act(seen, 0.05))[0]
        for _ in range(2 * (step >= 1_000)):
            update(MIX)
        if step % 4_000 == 0:
            print(f"online, {step} steps: mean score {score():.1f}", flush=True)
