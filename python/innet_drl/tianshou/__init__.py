"""Tianshou on this memory's sum tree.

from innet_drl.tianshou import InnetPrioritizedVectorReplayBuffer

buffer = InnetPrioritizedVectorReplayBuffer(1_000_000, buffer_num=16, alpha=0.6, beta=0.4)
"""

from innet_drl.errors import MissingExtraError, naming_extras

with naming_extras():
    from tianshou import __version__ as _release

    # Its collectors and buffers were written anew.
    if int(_release.split(".")[0]) < 2:
        raise MissingExtraError(f"tianshou is {_release}, and 2.0 is needed: pip install -U 'innet-drl[tianshou]'")
    from innet_drl.tianshou.buffers import InnetPrioritizedReplayBuffer, InnetPrioritizedVectorReplayBuffer

__all__ = ["InnetPrioritizedReplayBuffer", "InnetPrioritizedVectorReplayBuffer"]
