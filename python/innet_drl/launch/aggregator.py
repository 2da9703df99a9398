"""The aggregator of several learners' gradients: its token, and whether it can be used."""

from __future__ import annotations

import os

import innet_drl as innet
from innet_drl.train.config import Config
from innet_drl.train.errors import ConfigurationError


def check_aggregator(config: Config) -> None:
    """Connects to the server that sums the learners' gradients, so that a wrong one is named before anything is made.

    Raises:
        ConfigurationError: The server sums no gradients.
        innet_drl.ReplayError: The address is wrong, or nothing answers there.
    """
    with innet.connect(config.gradients, token=aggregator_token(config), tls_ca=config.replay_ca) as server:
        if "gradients" not in server.stats():
            raise ConfigurationError(
                "the server at {address} sums no gradients: start it as innet-replay serve --gradients IP:PORT, or "
                "omit {gradients}",
                address=config.gradients,
            )


def aggregator_token(config: Config) -> str:
    """The token of the aggregator, from the environment; an embedded one has none."""
    return "" if config.gradients == "embedded" else os.environ.get("INNET_TOKEN", "").strip()
