"""A replay memory in one process: record an environment, sample a batch, set priorities.

python examples/replay.py
"""

import argparse

import gymnasium
import numpy as np

import innet_drl as innet

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=5_000)
steps = parser.parse_args().steps

env = gymnasium.make("CartPole-v1")
table = innet.Table.from_spaces("cartpole", env.observation_space, env.action_space, capacity=10_000)
view = innet.NStep(n=3, gamma=0.99)  # transitions of three steps

with innet.Memory(table, seed=0) as replay:
    with innet.Recorder(env, replay.writer("cartpole", 1, view)) as recorder:
        recorder.reset(seed=0)
        for _step in range(steps):
            _, _, terminated, truncated, _ = recorder.step(recorder.action_space.sample())
            if terminated or truncated:
                recorder.reset()

    # Without a priority of their own all items have the same one. A discount of 0 marks a pole that falls within three
    # steps: these transitions get four times the priority of others.
    batch = replay.sample("cartpole", 4_096, view)
    print(f"{batch!r}\nfalls in a batch: {np.mean(batch.discount == 0):.0%}, before their priority is raised")
    replay.update_priorities("cartpole", batch.ids, np.where(batch.discount == 0, 4.0, 1.0))

    # The weights correct the loss for the preference: a fall counts less, as it is sampled more often.
    batch = replay.sample("cartpole", 4_096, view, beta=1.0)
    falls = batch.discount == 0
    print(
        f"falls in a batch: {falls.mean():.0%}; weight {batch.weights[falls].min():.2f}, others {batch.weights.max()}"
    )
