"""Ape-X DQN on an environment of your own: a cart that has to come to rest in the middle of its rails.

pip install '.[train]'                        # in a checkout
python examples/own_environment.py            # a minute

The same by the command, in the folder of this file:
innet-drl train --environment own_environment:Cart --environment-args steps=50 --minutes 1
"""

import argparse
import tempfile
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from innet_drl import train


class Cart(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Position and velocity; the actions brake, coast and push. A step costs the distance from the middle.

    Args:
        steps: Steps of an episode, which is then truncated.
    """

    def __init__(self, steps: int = 50) -> None:
        self.observation_space = spaces.Box(-4.0, 4.0, (2,), np.float32)
        self.action_space = spaces.Discrete(3)
        self._steps = steps

    def reset(self, **arguments: Any) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Begins at a random place, with a random velocity."""
        super().reset(**arguments)
        self._state = self.np_random.uniform(-1.0, 1.0, 2)
        self._left = self._steps
        return self._observation(), {}

    def step(self, action: np.int64) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Moves for a tenth of a second. The rails end 4 m from the middle, and so does the episode."""
        position, velocity = self._state
        velocity = 0.98 * velocity + 0.2 * (int(action) - 1)
        self._state = np.array([position + 0.1 * velocity, velocity])
        self._left -= 1
        terminated = bool(abs(self._state[0]) > 4.0)
        cost = 50.0 if terminated else abs(self._state[0])
        return self._observation(), -float(cost), terminated, self._left == 0, {}

    def _observation(self) -> NDArray[np.float32]:
        return self._state.clip(-4.0, 4.0).astype(np.float32)


def main() -> None:
    """Trains, and plays a game with the agent."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    flags = parser.parse_args()
    settings = {"environment_args": {"steps": 50}, "minutes": flags.minutes, "video": False}
    config = train.preset("vector", environment=Cart, **settings)
    with tempfile.TemporaryDirectory() as folder:
        result = train.run(config, folder=f"{folder}/run")
        agent = train.load(f"{folder}/run")
    if result.evaluation is not None:
        print(f"mean score of {len(result.evaluation.scores)} games: {result.evaluation.mean:.1f}")
    game = Cart()
    observation, _ = game.reset(seed=0)
    print(f"begins at {observation[0]:+.2f} m with {observation[1]:+.2f} m/s")
    truncated = terminated = False
    while not (truncated or terminated):
        observation, _, terminated, truncated, _ = game.step(agent.act(observation))
    print(f"ends at {observation[0]:+.2f} m with {observation[1]:+.2f} m/s")


if __name__ == "__main__":  # actors are processes that import this script
    main()
