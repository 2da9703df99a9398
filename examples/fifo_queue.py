"""On-policy learning with a queue: every sequence is sampled once, by an actor-critic on CartPole.

    python examples/fifo_queue.py

A table with the sampler "fifo" and `max_times_sampled=1` is a queue: an update takes the oldest sequences, and they are
gone. A sequence may have begun before the last update: the probabilities of its actions at that time are stored with
it, and the loss corrects for the difference (PPO: Schulman et al., 2017).
"""

import argparse
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Categorical

import innet_drl as innet

GAME, GAMMA, LAMBDA, GOAL = "CartPole-v1", 0.99, 0.95, 475.0
NUM_ENVS, LENGTH, BATCH_SIZE, EPOCHS = 16, 16, 32, 8
VIEW = innet.Sequences(LENGTH, gamma=GAMMA)


class ActorCritic(nn.Module):
    """Policy and value of observations [..., 4]."""

    def __init__(self) -> None:
        super().__init__()
        # No weights in common: values of 100 would outweigh the policy in them.
        self.policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))
        self.value = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1))

    def forward(self, observation: Tensor) -> tuple[Categorical, Tensor]:
        """The distribution of actions, and the values."""
        return Categorical(logits=self.policy(observation)), self.value(observation).squeeze(-1)


def loss_of(network: ActorCritic, batch: Any) -> Tensor:
    """The loss of sequences [B, T], each with the observation after its last step."""
    policy, value = network(batch.observation)
    with torch.no_grad():
        # Generalized advantages, from the last step to the first. The discount is 0 where the pole fell; a truncated
        # game bootstraps. The mask ends the sum at the end of a game: the rest of its sequence is padding.
        # Rewards are scaled so that values are between 0 and 1.
        error = (1 - GAMMA) * batch.reward + batch.discount * value[:, 1:] - value[:, :-1]
        advantage = torch.zeros_like(error)
        following = torch.zeros(len(batch))
        for t in reversed(range(LENGTH)):
            following = (error[:, t] + GAMMA * LAMBDA * following) * batch.mask[:, t]
            advantage[:, t] = following
        goal = advantage + value[:, :-1]
    played = batch.mask
    log_probability = policy.log_prob(torch.cat([batch.action, batch.action[:, -1:]], 1))[:, :-1]
    ratio = (log_probability - batch.log_probability).exp()[played]
    advantage = advantage[played]
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = policy.entropy()[:, :-1][played].mean()
    loss: Tensor = nn.functional.mse_loss(value[:, :-1][played], goal[played]) - gain - 0.01 * entropy
    return loss


def main() -> None:
    """Plays, and learns as soon as a batch is in the queue, until the goal or the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500_000, help="steps of all environments at most")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    torch.set_num_threads(1)  # more threads than one cost time with a network this small
    network, start = ActorCritic(), time.monotonic()
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(
        gymnasium.make_vec(GAME, NUM_ENVS, vectorization_mode="vector_entry_point"), buffer_length=20
    )
    spaces = envs.single_observation_space, envs.single_action_space
    table = innet.Table.from_spaces(
        "queue", *spaces, 20_000, columns={"log_probability": "float32"}, sampler="fifo", max_times_sampled=1
    )
    with innet.Memory(table) as replay:
        writer = replay.writer("queue", NUM_ENVS, VIEW)
        batches = replay.batches("queue", BATCH_SIZE, VIEW, prefetch=0, device="cpu")
        with innet.Recorder(envs, writer) as recorder, batches:
            observation, _ = recorder.reset(seed=flags.seed)
            taken = 0
            for step in range(NUM_ENVS, flags.steps + 1, NUM_ENVS):
                with torch.no_grad():
                    policy, _ = network(torch.as_tensor(observation))
                action = policy.sample()
                log_probability = policy.log_prob(action).numpy()
                observation, *_ = recorder.step(action.numpy(), log_probability=log_probability)
                # The writer's count includes items that it has not sent yet, because it sends chunks of steps.
                if writer.items - taken >= BATCH_SIZE:
                    writer.flush()
                while writer.items - taken >= BATCH_SIZE:
                    taken += BATCH_SIZE
                    batch = next(batches)
                    for _ in range(EPOCHS):
                        loss = loss_of(network, batch)
                        optimizer.zero_grad()
                        loss.backward()  # type: ignore[no-untyped-call]
                        nn.utils.clip_grad_norm_(network.parameters(), 0.5)
                        optimizer.step()
                if (step // NUM_ENVS) % 1_000 == 0:
                    score, waiting = np.mean(envs.return_queue), replay.stats()["tables"]["queue"]["items"]
                    print(
                        f"step {step:6}: mean score of the last 20 games {score:.1f}, {waiting} sequences wait, "
                        f"{time.monotonic() - start:.0f} s",
                        flush=True,
                    )
                    if score >= GOAL:
                        break


if __name__ == "__main__":
    main()
