"""Stable-Baselines3 on this memory: a replay buffer for its algorithms, and algorithms with prioritized replay.

from stable_baselines3 import SAC
from innet_drl.sb3 import InnetReplayBuffer, PrioritizedDQN

model = SAC("MlpPolicy", "Pendulum-v1", replay_buffer_class=InnetReplayBuffer)
model = PrioritizedDQN("MlpPolicy", "CartPole-v1")
"""

from innet_drl.errors import MissingExtraError, naming_extras

with naming_extras():
    from stable_baselines3 import __version__ as _release

    # Samples have discounts since 2.7; 2.9 is the oldest release that is tested.
    if tuple(int(part) for part in _release.split(".")[:2]) < (2, 9):
        raise MissingExtraError(f"stable_baselines3 is {_release}, and 2.9 is needed: pip install -U 'innet-drl[sb3]'")
    from innet_drl.sb3.algorithms import PrioritizedDQN, PrioritizedSAC
    from innet_drl.sb3.buffer import InnetReplayBuffer
    from innet_drl.sb3.processes import collect, train

__all__ = ["InnetReplayBuffer", "PrioritizedDQN", "PrioritizedSAC", "collect", "train"]
