"""Losses: the loss and the priority of each transition of a batch.

| file | subject |
| --- | --- |
| `base` | the contract |
| `q_learning` | `double_q`, and the terms of `--munchausen` |
| `distributional` | `categorical`, `quantile` |
| `making` | the configured loss; the user's functions |
"""

from innet_drl.train.losses.base import PRIORITY_FLOOR, Loss, Outputs, TransitionLoss, of_actions
from innet_drl.train.losses.making import FunctionLoss, make_loss, tried

__all__ = [
    "PRIORITY_FLOOR",
    "FunctionLoss",
    "Loss",
    "Outputs",
    "TransitionLoss",
    "make_loss",
    "of_actions",
    "tried",
]
