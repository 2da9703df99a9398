"""Sequences with stored LSTM states (R2D2: Kapturowski et al., 2019) on a game that needs memory.

    python examples/r2d2_sequences.py                   # answers nearly all questions
    python examples/r2d2_sequences.py --feed-forward    # a network without memory answers half of them, by chance

The game shows a cue, left or right, and several steps later asks for the side. A sequence starts every ten steps, often
between cue and question. Then only the LSTM's state of that moment, stored with the step, has the cue.
"""

import argparse
import copy
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import innet_drl as innet

HIDDEN, NUM_ENVS, BATCH_SIZE = 32, 16, 32
BURN_IN, LENGTH = 4, 16
VIEW = innet.Sequences(LENGTH, burn_in=BURN_IN, period=10, gamma=0.9, state=["hidden", "cell"])


class Recall(gymnasium.Env[Any, Any]):
    """Eight rounds of a cue, four to eight empty steps and a question; a right answer is worth 1, a wrong one -1."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def _observe(self) -> Any:
        """The cue, -1 or 1, in the round's first step; 1 in the second place at the question; 0 otherwise."""
        return np.array([self._cue if self._wait == self._delay else 0, self._wait == 0], np.float32)

    def _begin_round(self) -> None:
        self._rounds -= 1
        self._cue = int(self.np_random.choice([-1, 1]))
        self._delay = self._wait = int(self.np_random.integers(5, 10))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode."""
        super().reset(seed=seed)
        self._rounds = 8
        self._begin_round()
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """An action counts at the question alone: 0 is left, 1 is right."""
        reward = 0.0
        if self._wait > 0:
            self._wait -= 1
        else:
            reward = 1.0 if 2 * action - 1 == self._cue else -1.0
            if self._rounds == 0:
                return self._observe(), reward, True, False, {}
            self._begin_round()
        return self._observe(), reward, False, False, {}


class Network(nn.Module):
    """Q-values of observations [B, T, 2], from an LSTM or, to compare, from each observation alone."""

    def __init__(self, feed_forward: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(2, HIDDEN), nn.ReLU())
        self.lstm = None if feed_forward else nn.LSTM(HIDDEN, HIDDEN, batch_first=True)
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 2))

    def forward(self, observation: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Q-values [B, T, 2] and the state [B, HIDDEN] after the last observation."""
        features = self.first(observation)
        if self.lstm is not None:
            features, (last_hidden, last_cell) = self.lstm(features, (hidden[None], cell[None]))
            hidden, cell = last_hidden[0], last_cell[0]
        return self.head(features), hidden, cell


def update(network: Network, target: Network, optimizer: torch.optim.Optimizer, batch: Any) -> Tensor:
    """Makes one update from a batch of sequences, and returns their priorities."""

    def q_values(network: Network) -> Tensor:
        # The burn-in brings the stored state up to date with the weights of today; nothing is learned from it.
        with torch.no_grad():
            _, hidden, cell = network(batch.observation[:, :BURN_IN], batch.hidden, batch.cell)
        values: Tensor = network(batch.observation[:, BURN_IN:], hidden, cell)[0]
        return values  # [B, LENGTH + 1, 2]: of the observation after the last step, too

    q = q_values(network)
    with torch.no_grad():
        best = q[:, 1:].argmax(2, keepdim=True)
        following = q_values(target)[:, 1:].gather(2, best).squeeze(2)
        goal = batch.reward[:, BURN_IN:] + batch.discount[:, BURN_IN:] * following
    # Where the episode ended earlier, the rest of the sequence is padding: the mask leaves it out.
    mask = batch.mask[:, BURN_IN:]
    error = (goal - q[:, :-1].gather(2, batch.action[:, BURN_IN:, None]).squeeze(2)) * mask
    loss = (batch.weights * error.square().sum(1) / mask.sum(1)).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    optimizer.step()
    for old, new in zip(target.parameters(), network.parameters(), strict=True):
        old.data.lerp_(new.data, 0.01)
    error = error.detach().abs()
    # The largest error and the mean error, mixed as in the paper.
    priorities: Tensor = 0.9 * error.amax(1) + 0.1 * error.sum(1) / mask.sum(1)
    return priorities


def main() -> None:
    """Plays and learns, and prints the share of right answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--feed-forward", action="store_true", help="without memory, to compare")
    parser.add_argument("--steps", type=int, default=32_000, help="steps of all environments")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    torch.set_num_threads(1)  # more threads than one cost time with a network this small
    rng = np.random.default_rng(flags.seed)
    network = Network(flags.feed_forward)
    target = copy.deepcopy(network)
    optimizer = torch.optim.Adam(network.parameters(), 1e-3)
    state = {"hidden": ("float32", HIDDEN), "cell": ("float32", HIDDEN)}
    table = innet.Table.from_spaces(
        "recall", Recall.observation_space, Recall.action_space, 50_000, columns=state, priority_exponent=0.9
    )
    # SAME_STEP: the step after an end is already one of the next episode, so every step has an action of its own.
    same_step = gymnasium.vector.AutoresetMode.SAME_STEP
    envs = gymnasium.vector.SyncVectorEnv([Recall] * NUM_ENVS, autoreset_mode=same_step)
    replay = innet.Memory(table, seed=flags.seed)
    batches = replay.batches("recall", BATCH_SIZE, VIEW, beta=0.6, prefetch=0, device="cpu")
    with replay, innet.Recorder(envs, replay.writer("recall", NUM_ENVS, VIEW, chunk_steps=10)) as recorder, batches:
        observation, _ = recorder.reset(seed=flags.seed)
        hidden, cell = torch.zeros(NUM_ENVS, HIDDEN), torch.zeros(NUM_ENVS, HIDDEN)
        answers: list[float] = []
        for step in range(NUM_ENVS, flags.steps + 1, NUM_ENVS):
            with torch.no_grad():
                q, next_hidden, next_cell = network(torch.as_tensor(observation)[:, None], hidden, cell)
            action = np.where(rng.random(NUM_ENVS) < 0.05, rng.integers(2, size=NUM_ENVS), q[:, 0].argmax(1).numpy())
            # A row has the state before its observation: the state to start from, if a sequence starts here.
            observation, reward, terminated, truncated, _ = recorder.step(
                action, hidden=hidden.numpy(), cell=cell.numpy()
            )
            answers += [float(r > 0) for r in reward if r]
            going = torch.as_tensor(~(terminated | truncated))[:, None]
            hidden, cell = next_hidden * going, next_cell * going
            if step > 4_000:
                batch = next(batches)
                replay.update_priorities("recall", batch.ids, update(network, target, optimizer, batch))
            if step % 4_000 == 0:
                print(f"step {step:6}: {np.mean(answers[-1000:]):.0%} of the last 1,000 answers right", flush=True)


if __name__ == "__main__":
    main()
