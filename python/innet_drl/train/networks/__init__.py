"""Networks from observations to the inputs of the loss."""

from innet_drl.train.networks.making import has_blocks, load_published, make_network, published, q_values
from innet_drl.train.networks.q_network import Network, QNetwork, VectorTorso, space_to_depth

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
