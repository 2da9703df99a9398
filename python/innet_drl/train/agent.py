"""A trained agent, read back from its run."""

from __future__ import annotations

from pathlib import Path

from innet_drl.train import environments
from innet_drl.train.config import Config
from innet_drl.train.networks import QNetwork, make_network
from innet_drl.train.run_folder import RunFolder


def load(run: Path) -> tuple[Config, QNetwork, Path]:
    """The settings, the network and the path of a run's newest checkpoint.

    Raises:
        RunFolderError: There is no run, or no checkpoint in it.
    """
    folder = RunFolder.open(run)
    config, checkpoint = folder.config(), folder.latest_checkpoint()
    probe = environments.make(config, 1)
    network = make_network(config, probe.spec)
    probe.close()
    network.load_state_dict(
        {n.removeprefix("average."): t for n, t in checkpoint.tensors.items() if n.startswith("average.")}
    )
    return config, network.eval(), checkpoint.path
