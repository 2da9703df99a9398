"""Networks from observations to the inputs of the loss.

| file | subject |
| --- | --- |
| `torsos` | features: `nature`, `impala`, `mlp`, `dict` |
| `q_network` | the dueling head; the user's modules |
| `making` | the configured network, and its published parameters |
"""

from innet_drl.train.networks.making import has_blocks, load_published, make_network, published, q_values
from innet_drl.train.networks.q_network import Network, QNetwork
from innet_drl.train.networks.torsos import VectorTorso, space_to_depth

__all__ = [
    "Network",
    "QNetwork",
    "VectorTorso",
    "has_blocks",
    "load_published",
    "make_network",
    "published",
    "q_values",
    "space_to_depth",
]
