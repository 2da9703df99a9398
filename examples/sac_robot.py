"""SAC on a robot's dictionary, camera and joints: three collectors and a learner with prioritized replay.

pip install '.[sb3]' 'gymnasium[mujoco]'    # in a checkout; on a machine without a screen MUJOCO_GL=egl
python examples/sac_robot.py
python examples/sac_robot.py --one-process  # SB3's own SAC and buffer, to compare
"""

import argparse
import multiprocessing
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3 import SAC
from stable_baselines3.common.callbacks import EvalCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecTransposeImage

import innet_drl as innet
from innet_drl.sb3 import PrioritizedSAC, collect, train

STEPS, START, COLLECTORS, BATCH_SIZE = 30_000, 1_000, 3, 256
SETTINGS: dict[str, Any] = {"buffer_size": 100_000, "batch_size": BATCH_SIZE, "learning_starts": START}


class Robot(gymnasium.ObservationWrapper[Any, Any, Any]):
    """A two-joint arm: its joints as numbers; the target is in the picture alone."""

    def __init__(self) -> None:
        super().__init__(gymnasium.make("Reacher-v5", render_mode="rgb_array", width=64, height=64))
        joints = spaces.Box(-np.inf, np.inf, (6,), np.float32)
        self.observation_space = spaces.Dict(camera=spaces.Box(0, 255, (64, 64, 3), np.uint8), joints=joints)

    def observation(self, observation: NDArray[Any]) -> dict[str, NDArray[Any]]:
        """Adds the picture to cosines, sines and velocities of both joints."""
        joints = observation[[0, 1, 2, 3, 6, 7]].astype(np.float32)
        return {"camera": np.asarray(self.env.render()), "joints": joints}


def make(address: str, seed: int, device: str) -> PrioritizedSAC:
    """The model, which is the same in all processes except for seed and device."""
    memory = {"address": address, "table": "robot", "capacity_bytes": 1 << 30, "min_size": START}
    # One update for each step of all collectors, as SAC in one process.
    memory["samples_per_insert"] = float(BATCH_SIZE)
    return PrioritizedSAC(
        "MultiInputPolicy", Robot(), replay_buffer_kwargs=memory, seed=seed, device=device, **SETTINGS
    )


def run_collector(address: str, seed: int) -> None:
    """Plays with the newest policy, until the learner ends it."""
    collect(make(address, seed, "cpu"), 10 * STEPS)


def main() -> None:
    """Trains, and prints the mean return of ten games every 2,000 steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one-process", action="store_true")
    flags = parser.parse_args()
    games = VecTransposeImage(DummyVecEnv([lambda: Monitor(Robot())]))
    evaluation = EvalCallback(games, eval_freq=2_000, n_eval_episodes=10)
    if flags.one_process:
        SAC("MultiInputPolicy", Robot(), **SETTINGS).learn(STEPS, evaluation)
        return
    with innet.Memory() as memory, memory.serve("innet://127.0.0.1:0") as server:
        context = multiprocessing.get_context("spawn")
        arguments = [(server.addresses[0], seed) for seed in range(1, COLLECTORS + 1)]
        collectors = [context.Process(target=run_collector, args=each, daemon=True) for each in arguments]
        for collector in collectors:
            collector.start()
        train(make(server.addresses[0], 0, "auto"), STEPS, callback=evaluation)
        for collector in collectors:
            collector.terminate()


if __name__ == "__main__":
    main()
