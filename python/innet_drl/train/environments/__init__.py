"""Environments of actors, evaluations and videos: anything that Gymnasium makes or a factory returns.

| file | subject |
| --- | --- |
| `making` | vector environments of an id, an import path or a function |
| `atari` | `atari/<game>` |
| `spaces` | observations of any space as arrays, actions as numbers |
| `spec` | shapes and dtypes, for networks and tables; observations of several parts |
| `vector` | stepping, autoreset modes, lives, frame stacks |

Rewards are unclipped here, for scores; the actor clips the rewards that it stores.
"""

from innet_drl.train.environments.atari import ATARI_FRAME_SKIP, atari_hint, make_colour
from innet_drl.train.environments.making import check, make
from innet_drl.train.environments.spec import Arrays, EnvironmentSpec, Part
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
