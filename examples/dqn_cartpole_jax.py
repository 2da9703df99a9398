"""Prioritized double DQN in plain JAX learns CartPole. Arrays of a batch become JAX arrays without a copy, by DLPack.

python examples/dqn_cartpole_jax.py              # until 20 greedy games reach 475 on average, about a minute
"""

import argparse
import time
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

import innet_drl as innet

GAME, GOAL, NUM_ENVS, BATCH_SIZE, MIN_SIZE = "CartPole-v1", 475.0, 8, 128, 1_000
VIEW = innet.NStep(n=3, gamma=0.99)
USED = ("observation", "action", "reward", "discount", "next_observation", "weights")
Network = Any


def to_jax(batch: innet.Batch) -> dict[str, jax.Array]:
    """Arrays of a batch, without a copy; int64 is copied to int32, unless `jax_enable_x64` is set."""
    return {name: jnp.from_dlpack(batch[name]) for name in USED}


def make_network(key: jax.Array) -> Network:
    """Weights and biases of three layers; the last ones are Q-values of both actions."""
    make = jax.nn.initializers.he_normal()
    sizes = zip(jax.random.split(key, 3), ((4, 128), (128, 128), (128, 2)), strict=True)
    return [(make(each, size), jnp.zeros(size[1])) for each, size in sizes]


def q_values(network: Network, observation: jax.Array) -> jax.Array:
    """Q-values [B, 2]."""
    for weight, bias in network[:-1]:
        observation = jax.nn.relu(observation @ weight + bias)
    q: jax.Array = observation @ network[-1][0] + network[-1][1]
    return q


@jax.jit
def act(network: Network, observation: Any) -> jax.Array:
    """The best action for each observation."""
    return q_values(network, observation).argmax(1)


@jax.jit
def update(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
    """Makes one step of Adam from a batch; returns the new state and the absolute TD errors."""
    network, target, mean, square, count = state

    def loss(network: Network) -> tuple[jax.Array, jax.Array]:
        # Double Q-learning: the network chooses the action, its older copy rates the action.
        best = q_values(network, batch["next_observation"]).argmax(1, keepdims=True)
        value = jnp.take_along_axis(q_values(target, batch["next_observation"]), best, 1)[:, 0]
        # The discount is gamma^3, less where the episode ended earlier, and 0 where the pole fell.
        goal = jax.lax.stop_gradient(batch["reward"] + batch["discount"] * value)
        q = jnp.take_along_axis(q_values(network, batch["observation"]), batch["action"][:, None], 1)[:, 0]
        error = goal - q
        huber = jnp.where(jnp.abs(error) < 1, 0.5 * error**2, jnp.abs(error) - 0.5)
        return (batch["weights"] * huber).mean(), jnp.abs(error)

    gradient, error = jax.grad(loss, has_aux=True)(network)
    count += 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mean, gradient)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, square, gradient)
    rate = 1e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    network = jax.tree.map(lambda w, m, v: w - rate * m / (jnp.sqrt(v) + 1e-8), network, mean, square)
    target = jax.tree.map(lambda old, new: 0.99 * old + 0.01 * new, target, network)
    return (network, target, mean, square, count), error


def evaluate(network: Network, games: int = 20) -> float:
    """Mean score of greedy games, each in an environment of its own."""
    envs = gymnasium.make_vec(GAME, games, vectorization_mode="vector_entry_point")
    observation, _ = envs.reset(seed=1)
    scores, playing = np.zeros(games), np.ones(games, bool)
    while playing.any():
        observation, reward, terminated, truncated, _ = envs.step(np.asarray(act(network, observation)))
        scores += reward * playing
        playing &= ~(terminated | truncated)
    return float(scores.mean())


def main() -> None:
    """Plays, learns and evaluates until the goal or the last step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200_000, help="steps of all environments at most")
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    rng, start = np.random.default_rng(flags.seed), time.monotonic()
    network = make_network(jax.random.key(flags.seed))
    zeros = jax.tree.map(jnp.zeros_like, network)
    state = (network, network, zeros, zeros, 0)
    envs = gymnasium.make_vec(GAME, NUM_ENVS, vectorization_mode="vector_entry_point")
    spaces = envs.single_observation_space, envs.single_action_space
    replay = innet.Memory(innet.Table.from_spaces("dqn", *spaces, 50_000, min_size=MIN_SIZE), seed=flags.seed)
    with replay, innet.Recorder(envs, replay.writer("dqn", NUM_ENVS, VIEW)) as recorder:
        observation, _ = recorder.reset(seed=flags.seed)
        for step in range(NUM_ENVS, flags.steps + 1, NUM_ENVS):
            random = rng.random(NUM_ENVS) < max(0.05, 1.0 - step / 10_000)
            action = np.where(random, rng.integers(2, size=NUM_ENVS), act(state[0], observation))
            observation, *_ = recorder.step(action)
            if step >= 2 * MIN_SIZE:
                for _ in range(2):
                    batch = replay.sample("dqn", BATCH_SIZE, VIEW)
                    state, error = update(state, to_jax(batch))
                    replay.update_priorities("dqn", batch.ids, error)
            if step % 4_000 == 0:
                score = evaluate(state[0])
                print(f"step {step:6}: mean score of 20 greedy games {score:.1f}, {time.monotonic() - start:.0f} s")
                if score >= GOAL:
                    break


if __name__ == "__main__":
    main()
