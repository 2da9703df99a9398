"""GRPO (Shao et al., 2024): a transformer learns to sort digits upwards by the rewards of its responses.

    python examples/grpo.py              # three minutes on two cores
    python examples/grpo.py --reuse 4    # groups are sampled up to four times, those with large advantages more often

Rollout processes write the responses to a prompt as one episode: only whole groups are sampled, of the newest versions
of the policy. A process that is killed is started again, and what a learner has not acknowledged goes to the next one.
"""

import argparse
import copy
import multiprocessing
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import innet_drl as innet

DIGITS = range(4, 9)
EQUALS, END, WORDS = 10, 11, 12  # a row is a prompt, "3 1 2 =", and a response, "1 2 3" and the end
WIDTH, LAYERS, HEADS = 192, 2, 6  # 0.9 million parameters
GROUPS, RESPONSES, MAX_LAG, IMITATED = 8, 8, 4, 200
VIEW = innet.Trajectory(max_steps=RESPONSES)
COLUMNS: Any = {"tokens": ("int32", (None,)), "log_probability": ("float32", (None,)), "reward": "float32"}
torch.set_num_threads(1)  # in every process: more of them are slower with a network this small


class Policy(nn.Module):
    """A transformer: log-probabilities of the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * DIGITS.stop + 2, WIDTH)
        hidden = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)]
        parts = [nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sequential(*hidden)]
        self.layers = nn.ModuleList(copy.deepcopy(nn.ModuleList(parts)) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))

    def forward(self, tokens: Tensor, past: Any = None) -> tuple[Tensor, Any]:
        """Of tokens [N, T] that follow those of `past`: [N, T, WORDS], and the keys and values of all so far."""
        begin, kept = past[0][0].shape[2] if past else 0, []
        x = self.words(tokens) + self.places.weight[begin : begin + tokens.shape[1]]
        for layer, part in enumerate(self.layers):
            norm, heads, out, hidden = part.children()
            query, *memory = heads(norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            kept.append([torch.cat(pair, 2) for pair in zip(past[layer], memory, strict=True)] if past else memory)
            x = x + out(scaled_dot_product_attention(query, *kept[-1], is_causal=not past).transpose(1, 2).flatten(2))  # type: ignore[misc]
            x = x + hidden(x)
        return self.head(x).log_softmax(2), kept


def make_prompts(count: int) -> tuple[Tensor, Tensor]:
    """Some digits and EQUALS, one number of digits for all, and what is right, the sorted digits and END."""
    digits = torch.randint(10, (count, int(torch.randint(DIGITS.start, DIGITS.stop, ()))))
    signs = torch.tensor([EQUALS, END]).repeat(count, 1)
    return torch.cat([digits, signs[:, :1]], 1), torch.cat([digits.sort(1).values, signs[:, 1:]], 1)


@torch.no_grad()
def respond(policy: Policy, prompts: Tensor, right: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Samples a response to each prompt: all tokens, the response's log-probabilities, and its reward, 1 or 0."""
    tokens, log_probabilities, found = [], [], []
    following, past = policy(prompts)
    for _ in range(right.shape[1] + 1):
        tokens.append(torch.multinomial(following[:, -1].exp(), 1))
        log_probabilities.append(following[:, -1].gather(1, tokens[-1]))
        following, past = policy(tokens[-1], past)
    columns = prompts, torch.cat(tokens, 1), torch.cat(log_probabilities, 1), right
    for prompt, row, of_row, goal in zip(*columns, strict=True):
        length = [*row.tolist(), END].index(END) + 1  # tokens after the first END are no part of the response
        found.append((torch.cat([prompt, row[:length]]).int(), of_row[:length], float(torch.equal(row[:length], goal))))
    return found


def advantages(rewards: Any) -> Any:
    """How much better each response [..., RESPONSES] is than its group, in standard deviations."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)


def improve(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Makes one update."""
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


def imitate() -> Policy:
    """Makes a policy by some examples, of which a third is right: rewards choose among what a policy does at times."""
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-3)
    for _ in range(IMITATED):
        prompts, right = make_prompts(64)
        shown = torch.where(torch.rand(64, 1) < 0.3, right, torch.cat([right[:, :-1].flip(1), right[:, -1:]], 1))
        following, _ = policy(torch.cat([prompts, shown], 1)[:, :-1])
        improve(optimizer, nn.functional.nll_loss(following[:, -shown.shape[1] :].mT, shown))
    return policy


def run_rollouts(address: str, seed: int) -> None:
    """Answers prompts with the newest policy, until it is ended."""
    torch.manual_seed(seed)
    policy, version = Policy(), 0
    with innet.connect(address) as replay, replay.writer("groups", GROUPS, VIEW, chunk_steps=RESPONSES) as writer:
        while True:
            newest = replay.get_parameters("policy", newer_than=version, device="cpu", writer=writer)
            if newest is not None:
                policy.load_state_dict(newest.tensors)
                version = newest.version
            found = respond(policy, *(each.repeat_interleave(RESPONSES, 0) for each in make_prompts(GROUPS)))
            rewards = np.array([reward for *_, reward in found], np.float32).reshape(GROUPS, RESPONSES)
            for step in range(RESPONSES):
                tokens, log_probabilities, _ = zip(*found[step::RESPONSES], strict=True)
                writer.append(
                    tokens=tokens,
                    log_probability=log_probabilities,
                    reward=rewards[:, step],
                    priority=np.abs(advantages(rewards)).mean(1),
                    terminated=np.full(GROUPS, step == RESPONSES - 1),
                    truncated=np.zeros(GROUPS, bool),
                    timeout=None,
                )
            writer.flush(timeout=None)  # the next groups are of a policy that is as new as can be


def loss_of(policy: Policy, batch: Any) -> Tensor:
    """The clipped loss of the tokens in responses."""
    rows, old = batch.tokens.values, batch.log_probability.values
    tokens = rows.padded(END)
    following, _ = policy(tokens[:, :-1])
    # The tokens of the responses, one after the other, as the memory has their log-probabilities.
    place = torch.arange(1, tokens.shape[1])
    of_response = (place < rows.lengths[:, None]) & (place >= (rows.lengths - old.lengths)[:, None])
    new = following.gather(2, tokens[:, 1:, None].long()).squeeze(2)[of_response]
    weight = advantages(batch.reward.values.view(-1, RESPONSES)).flatten().repeat_interleave(old.lengths)
    ratio = (new - old.values).exp()
    return -torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight).mean()


def learn(address: str, seed: int, until: float) -> None:
    """Improves the policy by groups, and publishes it after every update, until the clock says `until`."""
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), 3e-4)
    with innet.connect(address) as replay:
        policy.load_state_dict(replay.get_parameters("policy", device="cpu").tensors)  # type: ignore[union-attr]
        with replay.batches("groups", GROUPS, VIEW, prefetch=0, device="cpu", acknowledge=True) as batches:
            for batch in batches:
                improve(optimizer, loss_of(policy, batch))
                version = replay.put_parameters("policy", policy.state_dict())
                batch.acknowledge()  # now the groups are gone; of a learner that dies before, the next one gets them
                left = until - time.monotonic()
                if version % 25 == 0 or left < 0:
                    right = np.mean([reward for _ in range(8) for *_, reward in respond(policy, *make_prompts(32))])
                    lag = version - 1 - np.mean(batch.versions.tolist())
                    print(f"version {version}: {right:.0%} right, lag {lag:.1f}, {left:.0f} s left", flush=True)
                if left < 0:
                    return


def main() -> None:
    """Serves the memory, and starts the other processes, again if one is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=170.0, help="after some seconds of imitation")
    parser.add_argument("--reuse", type=int, default=1, help="how often a group may be sampled")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    torch.manual_seed(flags.seed)
    of_policy: Any = {"parameters": "policy", "max_sample_lag": MAX_LAG}
    table = innet.Table.queue("groups", COLUMNS, GROUPS, **of_policy)
    if flags.reuse > 1:
        table = innet.Table("groups", COLUMNS, 64 * GROUPS, max_times_sampled=flags.reuse, **of_policy)
    start, running = multiprocessing.get_context("spawn").Process, dict[int, Any]()  # threads do not survive a fork
    with tempfile.TemporaryDirectory() as folder, innet.Memory(table, seed=flags.seed) as replay:
        replay.put_parameters("policy", imitate().state_dict())
        with replay.serve(f"unix://{folder}/replay") as server:
            (address,), until = server.addresses, time.monotonic() + flags.seconds
            roles: list[Any] = [(learn, (address, flags.seed, until))]
            roles += [(run_rollouts, (address, 10 * flags.seed + number)) for number in (1, 2)]
            while not running or running[0].exitcode != 0:
                for place, (role, arguments) in enumerate(roles):
                    if place not in running or running[place].exitcode:
                        running[place] = start(target=role, args=arguments, daemon=True)
                        running[place].start()
                        print(f"{role.__name__} is process {running[place].pid}", flush=True)
                time.sleep(0.1)
            for process in running.values():
                process.terminate()
                process.join()
            told = replay.stats()["tables"]["groups"]
            print(*(f"{name} {told[name]}" for name in ("inserted_items", "sampled_items", "expired_items", "items")))


if __name__ == "__main__":
    main()
