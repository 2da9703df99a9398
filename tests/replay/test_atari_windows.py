"""Windows rebuilt from the memory equal the stacks of `AtariVectorEnv`, bit for bit, over 16,000 steps."""

from __future__ import annotations

import numpy as np
import pytest

import innet_drl as innet

vector_env = pytest.importorskip("ale_py.vector_env", reason="needs the extra `train`")

ENVIRONMENTS = 16
STEPS = 1_000
CHUNK = 25
GAMMA = 0.99
N = 3
# The last stacks of every environment, by step number modulo this: more than a chunk and a window.
KEPT = 64


@pytest.mark.timeout(900)
def test_windows_equal_the_stacks_of_the_environment() -> None:
    view = innet.NStep(stack=4, n=N, gamma=GAMMA, padding="zero", observation="frame")
    table = innet.Table(
        "atari",
        {
            "frame": ("uint8", (84, 84)),
            "action": "int64",
            "reward": "float32",
            "environment": "int16",
            "step": "int32",
        },
        capacity=50_000,
        sampler="fifo",
        max_times_sampled=1,
    )
    environments = vector_env.AtariVectorEnv(
        "breakout", ENVIRONMENTS, stack_num=4, max_num_frames_per_episode=1_000, autoreset_mode="NextStep"
    )
    random = np.random.default_rng(0)
    stacks = np.zeros((KEPT, ENVIRONMENTS, 4, 84, 84), np.uint8)
    sampled = np.zeros((STEPS, ENVIRONMENTS), bool)
    playing = np.zeros((STEPS, ENVIRONMENTS), bool)
    ends = {"terminated": 0, "truncated": 0, "life lost": 0, "bootstrapped early": 0}

    with (
        innet.Memory([table]) as replay,
        replay.writer("atari", ENVIRONMENTS, view, chunk_steps=CHUNK) as writer,
    ):

        def check(batch: innet.Batch) -> None:
            step, environment = batch.step, batch.environment
            assert not sampled[step, environment].any()
            sampled[step, environment] = True
            np.testing.assert_array_equal(batch.observation, stacks[step % KEPT, environment])
            follows = batch.discount > 0
            after = np.rint(np.log(batch.discount[follows]) / np.log(GAMMA)).astype(int)
            ends["bootstrapped early"] += int((after < N).sum())
            expected = stacks[(step[follows] + after) % KEPT, environment[follows]]
            np.testing.assert_array_equal(batch.next_observation[follows], expected)

        stack, info = environments.reset(seed=0)
        lives = info["lives"]
        first = np.ones(ENVIRONMENTS, bool)
        final = np.zeros(ENVIRONMENTS, bool)
        for t in range(STEPS):
            stacks[t % KEPT] = stack
            playing[t] = ~final
            action = random.integers(0, 4, ENVIRONMENTS)
            next_stack, reward, terminated, truncated, info = environments.step(action)
            life_lost = ~final & (info["lives"] < lives) & ~terminated & ~truncated
            writer.append(
                frame=stack[:, -1],
                action=action,
                reward=np.asarray(reward, np.float32),
                environment=np.arange(ENVIRONMENTS, dtype=np.int16),
                step=np.full(ENVIRONMENTS, t, np.int32),
                terminated=terminated | life_lost,
                truncated=truncated,
                first=first,
                final=final,
            )
            ends["terminated"] += int(terminated.sum())
            ends["truncated"] += int(truncated.sum())
            ends["life lost"] += int(life_lost.sum())
            first, final = final, terminated | truncated
            stack, lives = next_stack, info["lives"]
            if t % CHUNK == CHUNK - 1 or t == STEPS - 1:
                writer.flush()
                ready = writer.items - int(sampled.sum())
                while ready > 0:
                    batch = replay.sample("atari", min(ready, 256), view, timeout=10)
                    check(batch)
                    ready -= len(batch)
        assert writer.dropped_windows == 0

    environments.close()
    assert all(count > 0 for count in ends.values()), ends
    # Every step was an anchor once, but for the last ones, whose windows are still open.
    assert (sampled[:-N] == playing[:-N]).all()
