"""Environments of actors, evaluations and videos: anything that Gymnasium makes or a factory returns.

Rewards are unclipped here, for scores; the actor clips the rewards that it stores.
"""

from innet_drl.train.environments.making import ATARI_FRAME_SKIP, atari_hint, check, make, make_colour
from innet_drl.train.environments.spaces import Arrays, EnvironmentSpec, Part
from innet_drl.train.environments.vector import Environments, Step

__all__ = [
    "ATARI_FRAME_SKIP",
    "Arrays",
    "EnvironmentSpec",
    "Environments",
    "Part",
    "Step",
    "atari_hint",
    "check",
    "make",
    "make_colour",
]
