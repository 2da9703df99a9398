"""Workers of gradient jobs: sums of gradients in the aggregator of a server.

`Replay.join_gradients` and `Replay.follow_gradients` make them. `docs/how-to/gradients.md` explains the jobs;
`innet_drl.distributed` uses them from torch.
"""

from innet_drl._core import GradientUpdates, GradientWorker, Station

__all__ = ["GradientUpdates", "GradientWorker", "Station"]
