"""Gradient all-reduce in the network, for any `torch.distributed` program and for asynchronous workers.

There are three interfaces:

    model.register_comm_hook(State.join("innet://host:7710", "job"), hook)     # DistributedDataParallel
    torch.distributed.init_process_group("cpu:innet")                          # every collective of a process group
    replica = Replica(model, optimizer, "innet://host:7710", "job", ...)       # asynchronous workers

The server is `innet-replay serve --gradients HOST:PORT`. Importing this package registers the backend `innet`.
See `docs/how-to/data-parallel.md`.
"""

from innet_drl.errors import naming_extras

with naming_extras():
    from innet_drl.distributed.asynchronous import Contributions, Replica
    from innet_drl.distributed.backend import register
    from innet_drl.distributed.hook import State, hook

__all__ = ["Contributions", "Replica", "State", "hook"]

register()
