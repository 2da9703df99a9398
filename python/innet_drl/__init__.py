"""Prioritized experience replay and model parameters as a network service.

The replay client needs NumPy alone:

    import innet_drl as innet

    table = innet.Table.from_spaces("apex", env.observation_space, env.action_space, capacity=100_000)
    replay = innet.Memory(table)                        # in this process, or
    replay = innet.connect("innet://host:7710")         # on a server: the same interface

`innet_drl.errors` has the errors, `innet_drl.gradients` the workers of gradient jobs. Training needs the extra `train`:
`pip install 'innet-drl[train]'`, then `innet-drl train --help`.
"""

from innet_drl import errors
from innet_drl._core import (
    Batch,
    Batches,
    Episodes,
    Memory,
    Parameters,
    Replay,
    SampledIndexes,
    Server,
    StoredTable,
    SumTree,
    UpdateReceipt,
    Writer,
    __version__,
    connect,
)
from innet_drl.definitions import Column, Mix, NStep, Sequences, Table, Trajectory, Window
from innet_drl.errors import ReplayError
from innet_drl.ragged import Ragged
from innet_drl.recorder import Recorder

__all__ = [
    "Batch",
    "Batches",
    "Column",
    "Episodes",
    "Memory",
    "Mix",
    "NStep",
    "Parameters",
    "Ragged",
    "Recorder",
    "Replay",
    "ReplayError",
    "SampledIndexes",
    "Sequences",
    "Server",
    "StoredTable",
    "SumTree",
    "Table",
    "Trajectory",
    "UpdateReceipt",
    "Window",
    "Writer",
    "__version__",
    "connect",
    "errors",
]
