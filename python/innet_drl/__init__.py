"""Prioritized experience replay and parameters as a service in the network.

The replay client needs NumPy alone:

    import innet_drl as innet

    columns = {"frame": ("uint8", (84, 84)), "action": "int64", "reward": "float32"}
    table = innet.Table("apex", columns, capacity=100_000)
    replay = innet.Replay([table])                      # in this process, or
    replay = innet.connect("innet://host:7710")         # on a server: the same interface

`docs/api.md` shows the whole interface by example; `innet_drl.errors` lists its errors. Training needs the extra
`train`: `pip install 'innet-drl[train]'`, then `innet-drl train --help`.
"""

from innet_drl import errors
from innet_drl._core import (
    Batch,
    Batches,
    Column,
    GradientUpdates,
    GradientWorker,
    NStep,
    Parameters,
    Replay,
    SampledIndexes,
    Sequence,
    Server,
    Station,
    SumTree,
    Table,
    UpdateReceipt,
    Window,
    Writer,
    __version__,
    connect,
)
from innet_drl.errors import ReplayError

__all__ = [
    "Batch",
    "Batches",
    "Column",
    "GradientUpdates",
    "GradientWorker",
    "NStep",
    "Parameters",
    "Replay",
    "ReplayError",
    "SampledIndexes",
    "Sequence",
    "Server",
    "Station",
    "SumTree",
    "Table",
    "UpdateReceipt",
    "Window",
    "Writer",
    "__version__",
    "connect",
    "errors",
]
