"""TorchRL on this memory's sum tree.

from innet_drl.torchrl import InnetSampler
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

buffer = TensorDictReplayBuffer(
    storage=LazyTensorStorage(1_000_000),
    sampler=InnetSampler(1_000_000, alpha=0.6, beta=0.4),
    priority_key="td_error",
    batch_size=256,
)
"""

from innet_drl.errors import MissingExtraError, naming_extras

with naming_extras():
    from torchrl import __version__ as _release

    # Priorities of new items were transformed twice before.
    if tuple(int(part) for part in _release.split(".")[:2]) < (0, 14):
        raise MissingExtraError(f"torchrl is {_release}, and 0.14 is needed: pip install -U 'innet-drl[torchrl]'")
    from innet_drl.torchrl.buffer import InnetReplayBuffer
    from innet_drl.torchrl.sampler import InnetSampler

__all__ = ["InnetReplayBuffer", "InnetSampler"]
