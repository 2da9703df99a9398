"""Ape-X in one file (Horgan et al., 2018, "Distributed Prioritized Experience Replay"): CartPole by several actors.

    python examples/apex_single_file.py                # until 20 greedy games reach 475 on average
    python examples/apex_single_file.py --actors 4

Sections and algorithms named in the comments are the paper's. The main process is the learner (algorithm 2) and holds
the replay memory, which it serves on a Unix socket; each actor (algorithm 1) is a process that connects there.
"""

import argparse
import copy
import multiprocessing
import tempfile
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import innet_drl as innet


@dataclass(frozen=True)
class Settings:
    """Settings of a run; the paper's values for Atari are in the comments."""

    game: str = "CartPole-v1"
    actors: int = 2  # 360
    envs: int = 4  # of each actor, stepped together: 1
    goal: float = 475.0
    seed: int = 0
    # Exploration: actor i plays with epsilon^(1 + alpha * i / (actors - 1)), section 4.1.
    epsilon: float = 0.4
    alpha: float = 7.0
    # The memory.
    capacity: int = 50_000  # 2,000,000
    min_size: int = 1_000  # 50,000
    priority_exponent: float = 0.6
    beta: float = 0.4
    samples_per_insert: float = 32.0  # not limited: actors and learner run as fast as they can
    # The learner.
    view: ClassVar[innet.NStep] = innet.NStep(n=3, gamma=0.99)  # assembled by the memory from single rows
    batch_size: int = 128  # 512
    learning_rate: float = 1e-3  # 0.00025 / 4
    target_period: int = 200  # 2,500
    publish_period: int = 10  # updates between two versions of the parameters

    def spaces(self) -> tuple[Any, Any]:
        """The game's observations and actions."""
        env = gymnasium.make(self.game)
        return env.observation_space, env.action_space

    def table(self) -> innet.Table:
        """The definition of the memory."""
        return innet.Table.from_spaces(
            "apex",
            *self.spaces(),
            self.capacity,
            priority_exponent=self.priority_exponent,
            min_size=self.min_size,
            samples_per_insert=self.samples_per_insert,
        )


class DuelingNetwork(nn.Module):
    """Q-values as a state's value plus each action's advantage (Wang et al., 2016)."""

    def __init__(self, observations: Any, actions: Any) -> None:
        super().__init__()
        inputs = observations.shape[0]
        self.body = nn.Sequential(nn.Linear(inputs, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.value, self.advantage = nn.Linear(128, 1), nn.Linear(128, int(actions.n))

    def forward(self, observation: Tensor) -> Tensor:
        """Q-values [B, actions] of observations [B, inputs]."""
        features = self.body(observation)
        advantage = self.advantage(features)
        q: Tensor = self.value(features) + advantage - advantage.mean(1, keepdim=True)
        return q

    def q_values(self, observation: NDArray[Any]) -> NDArray[np.float32]:
        """Q-values of a NumPy array of observations."""
        with torch.no_grad():
            return np.asarray(self(torch.as_tensor(observation)))


def run_actor(settings: Settings, server: str, actor: int) -> None:
    """Algorithm 1: plays with a copy of the parameters, and adds transitions with their initial priorities."""
    torch.set_num_threads(1)
    seed = settings.seed + 1_000 * (actor + 1)
    rng = np.random.default_rng(seed)
    epsilon = settings.epsilon ** (1 + settings.alpha * actor / max(1, settings.actors - 1))
    network = DuelingNetwork(*settings.spaces())
    envs = gymnasium.make_vec(settings.game, settings.envs, vectorization_mode="vector_entry_point")
    with innet.connect(server) as replay:
        writer = replay.writer("apex", settings.envs, settings.view, name=f"actor {actor}", chunk_steps=10)
        # Line 2: the first parameters, which the learner published before it started the actors.
        version = 0
        with innet.Recorder(envs, writer) as recorder:
            observation, _ = recorder.reset(seed=seed)
            while True:
                # Line 13: newer parameters, in every step; `None`, in a short message, where there are none.
                newest = replay.get_parameters("apex", newer_than=version, device="cpu")
                if newest is not None:
                    network.load_state_dict(newest.tensors)
                    version = newest.version
                # Line 5: epsilon-greedy.
                q = network.q_values(observation)
                explore = rng.random(settings.envs) < epsilon
                action = np.where(explore, rng.integers(q.shape[1], size=settings.envs), q.argmax(1))
                # Lines 6 to 12: the environments step, and the writer adds the row. From `q` it computes the n-step TD
                # error of each transition, its priority at birth. The paper's actors buffer transitions for it.
                observation, *_ = recorder.step(action, q=q)


def evaluate(settings: Settings, network: DuelingNetwork, games: int = 20) -> float:
    """Mean score of greedy games, each in an environment of its own."""
    envs = gymnasium.make_vec(settings.game, games, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=settings.seed)
    scores, playing = np.zeros(games), np.ones(games, bool)
    while playing.any():
        observation, reward, terminated, truncated, _ = envs.step(network.q_values(observation).argmax(1))
        scores += reward * playing
        playing &= ~(terminated | truncated)
    return float(scores.mean())


def run_learner(settings: Settings, replay: innet.Replay, network: DuelingNetwork, updates: int) -> None:
    """Algorithm 2: samples batches, applies updates, sets priorities and publishes parameters."""
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), settings.learning_rate)
    start = time.monotonic()
    # Line 4: batches are sampled and unpacked in a thread of their own, as in the paper, while the learner computes.
    with replay.batches("apex", settings.batch_size, settings.view, beta=settings.beta, device="cpu") as batches:
        for update, batch in zip(range(1, updates + 1), batches, strict=False):
            # Lines 5 and 6: the loss of double Q-learning with n-step returns, section 3.2. The discount is gamma^n,
            # less where the episode ended earlier, and 0 where it terminated.
            with torch.no_grad():
                best = network(batch.next_observation).argmax(1, keepdim=True)
                goal = batch.reward + batch.discount * target(batch.next_observation).gather(1, best).squeeze(1)
            error = goal - network(batch.observation).gather(1, batch.action[:, None]).squeeze(1)
            loss = (batch.weights * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 40.0)
            optimizer.step()
            # Lines 7 and 8: the new priorities. Ids of transitions that were evicted meanwhile are ignored.
            replay.update_priorities("apex", batch.ids, error.detach().abs().numpy())
            # Line 9, the removal of old transitions, is the table's: it evicts the oldest beyond its capacity.
            if update % settings.publish_period == 0:
                replay.put_parameters("apex", network.state_dict())
            if update % settings.target_period == 0:
                target.load_state_dict(network.state_dict())
            if update % 1_000 == 0 or update == updates:
                score = evaluate(settings, network)
                steps = replay.stats()["tables"]["apex"]["inserted_items"]
                print(
                    f"update {update}, {steps} steps, {time.monotonic() - start:.0f} s: greedy mean {score:.1f}",
                    flush=True,
                )
                if score >= settings.goal:
                    break


def main() -> None:
    """Serves the memory, starts the actors, and learns in this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--actors", type=int, default=Settings.actors)
    parser.add_argument("--updates", type=int, default=50_000, help="updates of the learner at most")
    parser.add_argument("--seed", type=int, default=Settings.seed)
    flags = parser.parse_args()
    settings = Settings(actors=flags.actors, seed=flags.seed)
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)  # more threads than one cost time with a network this small
    network = DuelingNetwork(*settings.spaces())
    # "spawn": threads and connections do not survive a fork.
    processes = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/replay"
        with innet.Memory(settings.table(), seed=settings.seed) as replay, replay.serve(address):
            replay.put_parameters("apex", network.state_dict())
            actors = [
                processes.Process(target=run_actor, args=(settings, address, actor), daemon=True)
                for actor in range(settings.actors)
            ]
            for process in actors:
                process.start()
            run_learner(settings, replay, network, flags.updates)
            # An actor that is ended loses the chunk that it was filling, and nothing else.
            for process in actors:
                process.terminate()
                process.join()


if __name__ == "__main__":
    main()
