"""Losses: the loss and the priority of each transition of a batch."""

from innet_drl.train.losses.making import FunctionLoss, make_loss, tried
from innet_drl.train.losses.q_learning import PRIORITY_FLOOR, Loss, Outputs, TransitionLoss, of_actions

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
