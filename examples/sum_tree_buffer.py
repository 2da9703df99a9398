"""A prioritized replay buffer over torch tensors: `SumTree` samples the indexes, the data stays where it is.

    python examples/sum_tree_buffer.py
    python examples/sum_tree_buffer.py --device cuda     # the tensors on a GPU

The game is the blind cliffwalk of Schaul et al. (2016, section 3.1): a walk of n steps with two actions in each state.
The wrong one ends the walk, and only the last right one is rewarded. The buffer holds every possible walk, so the
reward is in one of 2^(n+1) - 2 transitions. Prioritized sampling finds it, and its consequences, in far fewer
updates.
"""

import argparse

import torch
from torch import Tensor

import innet_drl as innet


class TorchBuffer:
    """A ring of transitions in tensors of one device, with a sum tree over their priorities."""

    def __init__(self, capacity: int, columns: dict[str, torch.dtype], device: str, exponent: float, seed: int) -> None:
        self.columns = {name: torch.zeros(capacity, dtype=dtype, device=device) for name, dtype in columns.items()}
        self.tree = innet.SumTree(capacity, priority_exponent=exponent, seed=seed)
        self.added, self.device, self.max_priority = 0, device, 1.0

    def add(self, **rows: Tensor) -> None:
        """Adds transitions, over the oldest ones where the buffer is full; each will be sampled soon."""
        count = len(next(iter(rows.values())))
        indexes = torch.arange(self.added, self.added + count) % self.tree.capacity
        for name, values in rows.items():
            self.columns[name][indexes.to(self.device)] = values.to(self.device)
        self.tree.update(indexes.numpy(), torch.full((count,), self.max_priority).numpy())
        self.added += count

    def sample(self, batch_size: int, beta: float) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Columns of a batch, its importance weights, and the indexes for `set_priorities`."""
        sampled = self.tree.sample(batch_size, beta=beta)
        indexes = torch.as_tensor(sampled.indexes, device=self.device)
        batch = {name: values[indexes] for name, values in self.columns.items()}
        return batch, torch.as_tensor(sampled.weights, device=self.device), indexes

    def set_priorities(self, indexes: Tensor, priorities: Tensor) -> None:
        """Sets the priorities of sampled transitions."""
        self.max_priority = max(self.max_priority, float(priorities.max()))
        self.tree.update(indexes.cpu().numpy(), priorities.cpu().numpy())


def every_walk(length: int, seed: int) -> dict[str, Tensor]:
    """The transitions of all 2^length walks, in random order."""
    state, action, reward, following = [], [], [], []
    for first_wrong in range(length + 1):
        # Walks with their first wrong action here; the actions after it make no difference.
        for _ in range(2 ** max(0, length - 1 - first_wrong)):
            for step in range(min(first_wrong + 1, length)):
                right = step < first_wrong
                state.append(step)
                action.append(int(right))
                reward.append(float(right and step == length - 1))
                following.append(step + 1 if right and step < length - 1 else -1)
    order = torch.randperm(len(state), generator=torch.Generator().manual_seed(seed))
    rows = {"state": state, "action": action, "reward": reward, "following": following}
    return {name: torch.tensor(values)[order] for name, values in rows.items()}


def updates_until_learned(length: int, exponent: float, limit: int, device: str, seed: int) -> int | None:
    """Updates of tabular Q-learning until the values are right to 0.03; `None` where the limit comes first."""
    gamma = 1 - 1 / length
    walks = every_walk(length, seed)
    columns = {name: values.dtype for name, values in walks.items()}
    buffer = TorchBuffer(len(walks["state"]), columns, device, exponent, seed)
    buffer.add(**walks)
    q = torch.zeros(length + 1, 2, device=device)  # the last row, at -1, is the end: it stays 0
    right = gamma ** torch.arange(length - 1, -1, -1, device=device)
    for update in range(1, limit + 1):
        # Beta is 0: a table of values of a deterministic game averages no outcomes. A network needs 0.4 or more.
        batch, weights, indexes = buffer.sample(16, beta=0.0)
        goal = batch["reward"] + gamma * q[batch["following"]].amax(1)
        error = goal - q[batch["state"], batch["action"]]
        # A transition may be in the batch several times: the mean of its errors is one step.
        places = (batch["state"], batch["action"])
        count = torch.zeros_like(q).index_put_(places, torch.ones_like(error), accumulate=True)
        q += 0.25 * torch.zeros_like(q).index_put_(places, weights * error, accumulate=True) / count.clamp(min=1)
        # A transition without an error keeps a small chance.
        buffer.set_priorities(indexes, error.abs() + 1e-3)
        if update % 20 == 0 and bool((q[:-1, 1] - right).square().mean() < 1e-3):
            return update
    return None


def main() -> None:
    """Compares prioritized with uniform sampling."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=12, help="steps of the walk")
    parser.add_argument("--updates", type=int, default=20_000, help="updates at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.set_num_threads(1)  # more threads than one cost time with tensors this small
    for name, exponent in (("prioritized", 0.6), ("uniform", 0.0)):
        updates = updates_until_learned(flags.length, exponent, flags.updates, flags.device, flags.seed)
        print(f"{name}: {'not learned' if updates is None else 'learned'} after {updates or flags.updates} updates")


if __name__ == "__main__":
    main()
