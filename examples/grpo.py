"""GRPO (Shao et al., 2024): a transformer learns to sort digits upwards by the rewards of its responses.

    python examples/grpo.py              # three minutes on two cores
    python examples/grpo.py --reuse 4    # groups are sampled up to four times, those with large advantages more often

Rollout processes write the responses to a prompt as one episode, so that only whole groups are sampled. The learner
gets groups of the newest versions of the policy. Any process may be killed while the example runs: it is started
again, and what the learner has not acknowledged comes again.
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
COLUMNS = {
    "tokens": innet.Column("int32", (None,)),
    "log_probability": innet.Column("float32", (None,)),  # of the response's tokens, when they were sampled
    "reward": "float32",
}


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
        for layer, (norm, heads, out, hidden) in enumerate(self.layers):
            query, *memory = heads(norm(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            kept.append([torch.cat(pair, 2) for pair in zip(past[layer], memory, strict=True)] if past else memory)
            x = x + out(scaled_dot_product_attention(query, *kept[-1], is_causal=not past).transpose(1, 2).flatten(2))
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
    for prompt, row, of_row, goal in zip(
        prompts, torch.cat(tokens, 1), torch.cat(log_probabilities, 1), right, strict=True
    ):
        length = [*row.tolist(), END].index(END) + 1  # tokens after the first END are no part of the response
        found.append((torch.cat([prompt, row[:length]]).int(), of_row[:length], float(torch.equal(row[:length], goal))))
    return found


def advantages(rewards: Any) -> Any:
    """How much better each response [..., RESPONSES] is than its group, in standard deviations."""
    return (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)


def make_table(reuse: int) -> innet.Table:
    """A queue, or with reuse a table that is sampled by priority."""
    lag: Any = {"parameters": "policy", "max_sample_lag": MAX_LAG}
    if reuse == 1:
        return innet.Table.queue("groups", COLUMNS, 4 * GROUPS, **lag)
    return innet.Table("groups", COLUMNS, 8 * GROUPS * RESPONSES, max_times_sampled=reuse, priority_exponent=1.0, **lag)


def run_rollouts(address: str, seed: int) -> None:
    """Answers prompts with the newest policy, until it is ended."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, version = Policy(), 0
    with innet.connect(address) as replay, replay.writer("groups", GROUPS, VIEW) as writer:
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


def learn(address: str, seed: int, until: float, reuse: int) -> None:
    """Improves the policy by groups, and publishes it after every update, until the clock says `until`."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    policy, begin = Policy(), time.monotonic()
    optimizer = torch.optim.Adam(policy.parameters(), 3e-4)

    def improve(loss: Tensor) -> None:
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()

    with innet.connect(address) as replay:
        newest = replay.get_parameters("policy", device="cpu")
        for _ in range(IMITATED if newest is None else 0):
            # Examples of which a third is right: rewards can only choose among what the policy does at times.
            prompts, right = make_prompts(64)
            shown = torch.where(torch.rand(64, 1) < 0.3, right, torch.cat([right[:, :-1].flip(1), right[:, -1:]], 1))
            following, _ = policy(torch.cat([prompts, shown], 1)[:, :-1])
            improve(nn.functional.nll_loss(following[:, -shown.shape[1] :].mT, shown))
        if newest is None:
            replay.put_parameters("policy", policy.state_dict())
        else:  # an earlier learner was killed
            policy.load_state_dict(newest.tensors)
        with replay.batches("groups", GROUPS, VIEW, prefetch=1, device="cpu", acknowledge=True) as batches:
            for batch in batches:
                improve(loss_of(policy, batch))
                version = replay.put_parameters("policy", policy.state_dict())
                batch.acknowledge()  # not earlier: if this process died, the next one would not get the groups
                last = time.monotonic() > until
                if version % 25 == 0 or last:
                    rewards = np.mean([reward for _ in DIGITS for *_, reward in respond(policy, *make_prompts(64))])
                    expired = replay.stats()["tables"]["groups"]["expired_items"]
                    lag = version - 1 - batch.versions.mean()
                    print(
                        f"update {version - 1:4}: {rewards:.0%} of responses right, groups {lag:.1f} updates old, "
                        f"{expired} too old, {time.monotonic() - begin:.0f} s",
                        flush=True,
                    )
                if last:
                    return


def main() -> None:
    """Serves the memory, and starts the other processes, again if one is killed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--rollouts", type=int, default=2, help="rollout processes")
    parser.add_argument("--reuse", type=int, default=1, help="how often a group may be sampled")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    # "spawn": threads and connections do not survive a fork.
    start = multiprocessing.get_context("spawn").Process
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/replay"
        roles: list[tuple[Any, ...]] = [(learn, address, flags.seed, time.monotonic() + flags.seconds, flags.reuse)]
        roles += [(run_rollouts, address, 1_000 * flags.seed + 1 + index) for index in range(flags.rollouts)]
        with innet.Memory(make_table(flags.reuse), seed=flags.seed) as replay, replay.serve(address):
            running: dict[int, Any] = {}
            while 0 not in running or running[0].exitcode != 0:
                for index, (role, *arguments) in enumerate(roles):
                    if index not in running or running[index].exitcode is not None:
                        running[index] = start(target=role, args=arguments, daemon=True)
                        running[index].start()
                time.sleep(0.1)
            for process in running.values():
                process.terminate()
                process.join()


if __name__ == "__main__":
    main()
